"""The manifests and payloads of one run on disk, under a quota.

A manifest is in here only after it was verified to be the learner's word about this run's tensors, and a chunk only
after its digest was; both hold again after a restart. What is in use (fetched, applied, part of a chain) must be
pinned and is then never deleted; everything else may go, oldest first, when room is needed. Not here: which edges to
take (rollmesh_protocol.edges) and what the weights are (keeper).

Files in ``folder``, named by the manifest's digest in hex: ``.manifest`` (the signed envelope), ``.part`` and
``.payload``. Methods that write, read or delete block on the disk: daemons call them in a thread, and several threads
may do so at once. Those that only tell what is there (``names``, ``manifest``, ``envelope``, ``held``, ``is_complete``,
``payload_path``, ``part_path``, ``pin``) never wait for the disk.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

from rollmesh_peer.faults import fault_point
from rollmesh_peer.weights import durable
from rollmesh_peer.weights.payload import PART, WHOLE, Payload
from rollmesh_protocol.errors import Refused, RollmeshError
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.limits import GIB
from rollmesh_protocol.manifest import Manifest, open_manifest

log = logging.getLogger("rollmesh.weights")

MANIFEST: Final = ".manifest"


@dataclass(frozen=True)
class _Edge:
    envelope: bytes
    manifest: Manifest
    payload: Payload

    @property
    def disk_bytes(self) -> int:
        return len(self.envelope) + self.manifest.payload_bytes


class EdgeStore:
    """One run's edges on disk. ``quota_bytes`` bounds manifests and payloads together, missing chunks included."""

    def __init__(self, folder: Path, *, run: str, learner: str, layout: Layout, quota_bytes: int) -> None:
        self.folder: Final = folder
        self.quota_bytes: Final = quota_bytes
        self._run = run
        self._learner = learner
        self._layout = layout
        self._lock = Lock()
        """Held for moments, to look at the tables below."""
        self._changing = Lock()
        """Held while edges are added or deleted, files included; taken before the other."""
        self._edges: dict[bytes, _Edge] = {}  # oldest first
        self._pins: Counter[bytes] = Counter()
        with durable.disk_errors(f"the folder {folder} cannot be used"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            durable.sweep(folder)
            self._load()

    # --- manifests ---------------------------------------------------------------------------------------------------
    def names(self) -> tuple[bytes, ...]:
        """Every manifest that is held, oldest first."""
        with self._lock:
            return tuple(self._edges)

    def used_bytes(self) -> int:
        """What counts against the quota."""
        with self._lock:
            return sum(edge.disk_bytes for edge in self._edges.values())

    def add_manifest(self, name: bytes, envelope: bytes, *, payload: Path | None = None) -> Manifest:
        """Verify a manifest and make it durable; adding one again is harmless.

        ``payload`` is a complete, good payload file: it is taken over (another name, or a copy) before the manifest
        is written. Room is made by deleting what is old and not pinned.

        Raises:
            Refused: ``manifest.invalid``, ``manifest.run``, an ``envelope.*`` code; ``manifest.limits`` when the
                payload does not fit into the quota or onto the disk.
            HostError: the disk failed.
        """
        manifest = open_manifest(envelope, name=name, run=self._run, learner=self._learner, layout=self._layout)
        with self._changing:
            with self._lock:
                known = self._edges.get(name)
            if known is None:
                edge = _Edge(envelope, manifest, Payload(self._stem(name), manifest))
                self._make_room(edge, on_disk=payload is not None)
                if payload is not None:
                    edge.payload.adopt(payload)
                    fault_point("publish.payload_durable")
                durable.write_file(self._file(name, MANIFEST), envelope)
                with self._lock:
                    self._edges[name] = edge
            elif payload is not None and not known.payload.is_complete:
                known.payload.adopt(payload)
        return manifest

    def manifest(self, name: bytes) -> Manifest | None:
        """The manifest called ``name``, if it is held."""
        with self._lock:
            edge = self._edges.get(name)
        return edge.manifest if edge else None

    def envelope(self, name: bytes) -> bytes | None:
        """The signed bytes of the manifest called ``name``, to pass on."""
        with self._lock:
            edge = self._edges.get(name)
        return edge.envelope if edge else None

    # --- payloads ----------------------------------------------------------------------------------------------------
    def held(self, name: bytes) -> frozenset[int]:
        """The indices of the verified chunks of a payload; empty for an unknown name."""
        with self._lock:
            edge = self._edges.get(name)
        return edge.payload.held() if edge else frozenset()

    def is_complete(self, name: bytes) -> bool:
        """True when the whole payload is on disk under its final name."""
        with self._lock:
            edge = self._edges.get(name)
        return edge is not None and edge.payload.is_complete

    def write_chunk(self, name: bytes, index: int, chunk: bytes) -> None:
        """Keep a chunk. With the last one the payload is complete and durable.

        Raises:
            Refused: ``chunk.digest``; ``request.unknown`` for a manifest or an index that does not exist (any more).
            HostError: the disk is full or fails; the chunk is then not held.
        """
        self._edge(name).payload.write(index, chunk)

    def read_chunk(self, name: bytes, index: int) -> bytes:
        """A verified chunk of a complete or partial payload; Refused ``request.unknown`` when it is not held."""
        return self._edge(name).payload.read(index)

    def payload_path(self, name: bytes) -> Path:
        """The file of a complete payload; Refused ``request.unknown`` otherwise."""
        return self._edge(name).payload.path

    def part_path(self, name: bytes) -> Path:
        """The file in which a payload's chunks lie until it is complete. Refused ``request.unknown``."""
        return self._edge(name).payload.part

    def adopt_payload(self, name: bytes, path: Path) -> None:
        """``path`` is the complete, good payload of the manifest ``name``: take it over (another name, or a copy)."""
        self._edge(name).payload.adopt(path)

    # --- what stays --------------------------------------------------------------------------------------------------
    def retain(self, names: Collection[bytes]) -> None:
        """Delete everything that is neither in ``names`` nor pinned, oldest first."""
        wanted = frozenset(names)
        with self._changing:
            for name in self._spare():
                if name not in wanted:
                    self._delete(name)

    @contextmanager
    def pin(self, name: bytes) -> Iterator[None]:
        """While the block lasts ``name`` (which may be added later) is not deleted."""
        with self._lock:
            self._pins[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._pins[name] -= 1

    def _make_room(self, edge: _Edge, *, on_disk: bool) -> None:
        needed = edge.disk_bytes
        spare = self._spare()
        if self._fits(needed, gained=sum(self._edges[name].disk_bytes for name in spare), on_disk=on_disk):
            for name in spare:
                if self._fits(needed, gained=0, on_disk=on_disk):
                    break
                log.info("the weights of version %d make room", self._edges[name].manifest.version)
                self._delete(name)
            if self._fits(needed, gained=0, on_disk=on_disk):
                return
        raise Refused(
            "manifest.limits",
            f"a download of {needed / GIB:.2f} GiB does not fit: {self.quota_bytes / GIB:.2f} GiB are allowed for "
            f"weights, and {durable.free_bytes(self.folder) / GIB:.2f} GiB are free on the disk",
        )

    def _fits(self, needed: int, *, gained: int, on_disk: bool) -> bool:
        """True when ``needed`` bytes fit once ``gained`` bytes are deleted."""
        has_quota = self.used_bytes() - gained + needed <= self.quota_bytes
        return has_quota and (on_disk or needed <= durable.free_bytes(self.folder) + gained)

    def _spare(self) -> list[bytes]:
        """What is not pinned, oldest first."""
        with self._lock:
            return [name for name in self._edges if not self._pins[name]]

    def _delete(self, name: bytes) -> None:
        with self._lock:
            if self._pins[name]:  # since we looked
                return
            edge = self._edges.pop(name)
        # The manifest first: a payload without one is removed at the next start, a manifest alone would be kept.
        self._file(name, MANIFEST).unlink(missing_ok=True)
        edge.payload.delete()

    def _edge(self, name: bytes) -> _Edge:
        with self._lock:
            edge = self._edges.get(name)
        if edge is None:
            raise Refused("request.unknown", "no manifest by that name is held")
        return edge

    # --- files -------------------------------------------------------------------------------------------------------
    def _stem(self, name: bytes) -> Path:
        return self.folder / name.hex()

    def _file(self, name: bytes, suffix: str) -> Path:
        return self.folder / (name.hex() + suffix)

    def _load(self) -> None:
        found = sorted(self.folder.glob("*" + MANIFEST), key=lambda path: (path.stat().st_mtime_ns, path.name))
        for path in found:
            try:
                name = bytes.fromhex(path.stem)
                envelope = path.read_bytes()
                manifest = open_manifest(envelope, name=name, run=self._run, learner=self._learner, layout=self._layout)
            except (RollmeshError, ValueError) as error:
                log.warning("the manifest %s on disk is of no use (%s); discarded", path.name, error)
                path.unlink()
                continue
            self._edges[name] = _Edge(envelope, manifest, Payload(self._stem(name), manifest))
        known = {name.hex() for name in self._edges}
        for path in self.folder.iterdir():
            if path.suffix in (PART, WHOLE) and path.stem not in known:
                path.unlink()
