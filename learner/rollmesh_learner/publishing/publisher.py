"""The owner of what has been published: patches and anchors on disk, and the images of recent versions in memory.

Beside the patch of each version it writes shortcuts once a version is out: skip patches over several versions, between
images that it keeps in memory for that, and with each anchor a cumulative patch from the base model, whose image stays
on disk. Shortcuts are a service: one that cannot be written costs somebody bytes, and nothing else.

The order: a version's payload, then its manifest, are durable when :meth:`Publisher.prepare` returns; nobody hears of
it before :meth:`Publisher.announced` is called; the ledger's part (reserving the number before, recording it as
published between the two) is the coordinator's. A patch leads from the last version that was *announced* to the new
image, whatever checkpoint that came from: nodes never meet a version that they cannot reach by a patch. A manifest on
disk that was never announced is dropped at the next start.

Images in ``ram`` never change once they are there; the trainer hands each new one over as a file of its own. An
anchor's payload is an image on disk, so it is also the snapshot from which this starts again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from rollmesh_learner.publishing.published import Entry, History, Sealed, rebuild
from rollmesh_learner.publishing.ring import Ring
from rollmesh_peer.faults import fault_point
from rollmesh_peer.weights import durable
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.worker_calls import Digests
from rollmesh_peer.weights.workshop import Workshop
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.errors import ChildFailed, HostError, Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.manifest import CONTEXT_CODEC, RAW_CODEC, Edge, EdgeKind, Manifest, manifest_name
from rollmesh_protocol.messages import Head, PolicyHeader

log = logging.getLogger("rollmesh.learner.publisher")

ANCHORS_KEPT: Final = 2
"""The newest anchor, and the one before it for those who are in the middle of fetching it."""
MOST_PATCHES: Final = limits.MAX_EDGES - 1
"""Versions between two anchors at most: a joiner is told the anchor and every patch after it in one message."""
_BASE: Final = "base."
"""The base model's image lies under this name and its root in hexadecimal."""
_PUBLISHER_QUOTA: Final = 1 << 62
"""Bytes; what a publisher keeps is bounded by its retention, and by the disk."""


@dataclass(frozen=True)
class Prepared:
    """A version that is durable on disk and that nobody has heard of."""

    header: PolicyHeader
    entry: Entry
    image: Path
    """In memory, ready for auditors."""


class Publisher:
    """``folder`` holds what is published, ``ram`` (an empty folder in memory) the images of recent versions.

    ``ring_versions`` images are kept: at least S + 2, and one more for each stride (in versions) of ``skip_every``.
    ``keep_versions`` patches, and those back to the kept anchors.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ram: Path,
        run: str,
        identity: Identity,
        layout: Layout,
        workshop: Workshop,
        ring_versions: int,
        anchor_every: int,
        keep_versions: int,
        skip_every: Sequence[int] = (),
        patch_chunk_bytes: int = limits.PATCH_CHUNK_BYTES,
        anchor_chunk_bytes: int = limits.ANCHOR_CHUNK_BYTES,
    ) -> None:
        self.history = History()
        self.store: Final = EdgeStore(
            folder / "edges", run=run, learner=identity.peer, layout=layout, quota_bytes=_PUBLISHER_QUOTA
        )
        """What chunk and manifest requests are answered from."""
        self._folder = folder
        self._run = run
        self._identity = identity
        self._layout = layout
        self._workshop = workshop
        self._ring_versions = ring_versions
        self._anchor_every = min(anchor_every, MOST_PATCHES)
        self._keep_versions = max(keep_versions, ring_versions)
        self._skip_from: dict[int, bytes] = dict.fromkeys(sorted(skip_every), b"")
        """For each stride the root that the next skip patch leads from; its image stays in the ring."""
        self._patch_chunk_bytes = patch_chunk_bytes
        self._anchor_chunk_bytes = anchor_chunk_bytes
        self._ring = Ring(ram, store=self.store, workshop=workshop)
        self._pending: Prepared | None = None
        self._pins: dict[bytes, ExitStack] = {}
        self._turn = trio.Lock()
        durable.sweep(folder)
        for leftover in folder.glob("outgoing.*"):
            leftover.unlink()

    # --- what is published -------------------------------------------------------------------------------------------
    @property
    def head(self) -> Head:
        """The newest announced version; version 0 and a zero root before the first."""
        return self.history.head

    @property
    def header(self) -> PolicyHeader | None:
        """The signed-to-be header of the head, to gossip; None before the first publication."""
        return self.history.header

    def edges_towards_head(self, root: bytes | None) -> tuple[Edge, ...]:
        """Enough edges for a cheapest path from ``root`` (None: from nothing) to the head; at most ``MAX_EDGES``."""
        return self.history.edges_towards_head(root)

    def image_of(self, root: bytes) -> Path | None:
        """The image in memory of one of the last ``ring_versions`` published versions. Never written to again."""
        return self._ring.get(root)

    def base_images(self) -> tuple[tuple[bytes, Path], ...]:
        """Root and image on disk of the base model, once that is published; both stay."""
        found = [file for file in self._folder.glob(f"{_BASE}*") if file.suffix != durable.UNFINISHED]
        return tuple((bytes.fromhex(file.name.removeprefix(_BASE)), file) for file in found)

    # --- starting again ----------------------------------------------------------------------------------------------
    async def restore(self, announced: Sequence[Head]) -> None:
        """Rebuild history and images from disk, given every version that the ledger says was announced.

        With no usable trace of the newest of them on disk the history stays empty: then publish a base again, under
        the next version. HostError when memory or disk fail, ChildFailed when the worker dies.
        """
        async with self._turn:
            self.history = rebuild(announced, [self._sealed(name) for name in self._complete()])
            newest = max((head.version for head in announced), default=0)
            is_whole = self.head.version == newest
            if newest and not (is_whole and await self._ring.fill(self.history, count=self._ring_versions)):
                log.error("the published weights of version %d cannot be made from disk", newest)
                self.history = History()
                self._ring.keep(())
            await self._tidy()

    # --- publishing --------------------------------------------------------------------------------------------------
    async def publish_base(self, image: Path, *, version: int, step: int = 0) -> PolicyHeader:
        """Publish a whole image as an anchor and make it the head: the base model, or a new beginning.

        The file must lie still: it becomes the anchor's payload (another name, or a copy on another disk).

        Raises:
            HostError: disk or memory have no room. ChildFailed: the worker died. Nothing is published then.
        """
        async with self._turn:
            found = await self._workshop.digest(image, chunk_bytes=self._anchor_chunk_bytes)
            anchor = await self._seal(found, image, version=version, step=step, parent=None, kind="anchor")
            await self._ring.copy(self.store.payload_path(anchor.name), found.root, tensors=found.tensors)
            fault_point("publish.manifest_durable")
            await trio.to_thread.run_sync(self._keep_base, anchor)
            head = Head(version=version, step=step, root=found.root)
            self._publish(Entry(head=head, patch=None, anchor=anchor))
            await self._tidy()
            return anchor.header()

    async def prepare(self, new_image: Path, *, version: int, step: int) -> Prepared | None:
        """Make ``version`` durable: the patch from the head to ``new_image``. None when not one bit differs.

        Takes the file ``new_image`` over (moved into ``ram``, or deleted where nothing changed); after an exception
        it is where it was. ``version`` must be above every version ever reserved. A version that was prepared before
        and never announced is given up.

        Raises:
            HostError: the disk has no room. ChildFailed: the worker died. The head stays what it was.
        """
        async with self._turn:
            self._give_up_pending()
            await self._maintain()
            old = self._ring.get(self.head.root)
            assert old is not None
            outgoing = self._folder / "outgoing.patch"
            found = await self._workshop.encode(
                old=old, new=new_image, payload=outgoing, chunk_bytes=self._patch_chunk_bytes
            )
            if not found.payload_bytes:
                new_image.unlink()
                return None
            fault_point("publish.encoded")
            patch = await self._seal(found, outgoing, version=version, step=step, parent=self.head.root, kind="patch")
            outgoing.unlink()
            fault_point("publish.manifest_durable")
            image = await self._ring.take(new_image, found.root)
            head = Head(version=version, step=step, root=found.root)
            entry = Entry(head=head, patch=patch, anchor=None)
            self._pending = Prepared(header=patch.header(), entry=entry, image=image)
            return self._pending

    def announced(self, prepared: Prepared) -> None:
        """The ledger has it: from now on it is the head, its image is in the ring and the oldest one leaves."""
        assert prepared is self._pending
        self._pending = None
        self._publish(prepared.entry)

    async def maintain(self) -> None:
        """Write anchors and shortcuts that are due, and delete what need not be kept. Call it after each announcement.

        Otherwise :meth:`prepare` does it first, and the next version waits for it. Failures are logged; an anchor is
        tried again.
        """
        async with self._turn:
            await self._maintain()

    # --- pieces ------------------------------------------------------------------------------------------------------
    async def _maintain(self) -> None:
        head = self.head
        for position in self.history.anchor_positions():
            anchor = self.history.entries[position].anchor
            if anchor is not None and not self.store.is_complete(anchor.name):  # found damaged when it was read
                self.history.drop_anchor(position)
        is_due = not self.history.anchor_positions() or self.history.versions_since_anchor() >= self._anchor_every
        image = self._ring.get(head.root)
        if image is not None:
            try:
                if is_due:
                    await self._write_anchor(head, image)
                    await self._write_cumulative(head, image)
                await self._write_skips(head, image)
            except (HostError, ChildFailed) as error:
                log.warning("an anchor or shortcut to version %d is not written: %s", head.version, error)
        await self._tidy()

    async def _write_anchor(self, head: Head, image: Path) -> None:
        outgoing = self._folder / "outgoing.anchor"
        await self._workshop.snapshot(image, outgoing)
        found = await self._workshop.digest(outgoing, chunk_bytes=self._anchor_chunk_bytes)
        if found.root != head.root:
            raise HostError("the disk does not hold what was written to it")
        fault_point("publish.anchor_written")
        anchor = await self._seal(found, outgoing, version=head.version, step=head.step, parent=None, kind="anchor")
        outgoing.unlink()
        self.history.add(anchor)
        log.info("version %d has an anchor", head.version)

    async def _write_cumulative(self, head: Head, image: Path) -> None:
        """The patch from the base model's image to ``image``, if that is known and something else."""
        for root, base in self.base_images():
            if root != head.root:
                await self._write_shortcut(head, base, root, image, kind="cumulative")

    async def _write_skips(self, head: Head, image: Path) -> None:
        """For each stride the patch that leads over so many versions to ``image``, once there are that many."""
        here = len(self.history.entries) - 1
        for stride, root in self._skip_from.items():
            position, start = self.history.position(root), self._ring.get(root)
            if position is None or start is None:
                self._skip_from[stride] = head.root
            elif here - position >= stride:
                self._skip_from[stride] = head.root  # whatever becomes of this one
                if root != head.root:
                    await self._write_shortcut(head, start, root, image, kind="skip")

    async def _write_shortcut(self, head: Head, start: Path, parent: bytes, image: Path, *, kind: EdgeKind) -> None:
        outgoing = self._folder / f"outgoing.{kind}"
        found = await self._workshop.encode(old=start, new=image, payload=outgoing, chunk_bytes=self._patch_chunk_bytes)
        if not found.payload_bytes:
            return
        shortcut = await self._seal(found, outgoing, version=head.version, step=head.step, parent=parent, kind=kind)
        outgoing.unlink()
        self.history.add(shortcut)
        log.info("version %d has a %s patch of %.1f MB", head.version, kind, found.payload_bytes / 1e6)

    def _keep_base(self, anchor: Sealed) -> None:
        """The first image ever published is the base model: its file stays, for cumulative patches."""
        if not self.base_images():
            durable.take_file(
                self.store.payload_path(anchor.name), self._folder / f"{_BASE}{anchor.manifest.root.hex()}"
            )

    async def _seal(
        self, found: Digests, payload: Path, *, version: int, step: int, parent: bytes | None, kind: EdgeKind
    ) -> Sealed:
        """Describe a payload and publish it to the store; without a ``parent`` it is an anchor's."""
        manifest = Manifest(
            run=self._run,
            version=version,
            step=step,
            kind=kind,
            parent=parent,
            root=found.root,
            codec=RAW_CODEC if parent is None else CONTEXT_CODEC,
            layout=self._layout.digest,
            chunk_bytes=self._anchor_chunk_bytes if parent is None else self._patch_chunk_bytes,
            payload_bytes=found.payload_bytes,
            chunks=found.chunks,
            tensors=found.tensors,
        )
        return await self._add(manifest, payload)

    async def _add(self, manifest: Manifest, payload: Path) -> Sealed:
        """Sign a manifest and make it durable behind its payload."""
        envelope = seal(manifest.encode(), run=self._run, kind="manifest", identity=self._identity).encode()
        name = manifest_name(envelope)
        self._pin(name)
        try:
            await trio.to_thread.run_sync(lambda: self.store.add_manifest(name, envelope, payload=payload))
        except (Refused, OSError) as error:
            raise HostError(f"version {manifest.version} cannot be written: {error}") from error
        return Sealed(name=name, manifest=manifest, envelope_bytes=len(envelope))

    def _publish(self, entry: Entry) -> None:
        self.history.append(entry)
        self._ring.add(entry.head.root)
        recent = {entry.head.root for entry in self.history.entries[-self._ring_versions :]}
        self._ring.keep(recent | set(self._skip_from.values()))

    async def _tidy(self) -> None:
        """Delete from disk what is no part of the history any more, or never became one."""
        self.history.trim(keep_versions=self._keep_versions, keep_anchors=ANCHORS_KEPT)
        names = set(self.history.names)
        if self._pending is not None:
            names.add(self._pending.header.manifest)
        for name in names:
            self._pin(name)
        for name in self._pins.keys() - names:
            self._pins.pop(name).close()
        await trio.to_thread.run_sync(self.store.retain, names)

    def _give_up_pending(self) -> None:
        if self._pending is not None:
            self._ring.give_up(self._pending.entry.head.root)
        self._pending = None

    def _pin(self, name: bytes) -> None:
        if name not in self._pins:
            self._pins[name] = ExitStack()
            self._pins[name].enter_context(self.store.pin(name))

    def _complete(self) -> list[bytes]:
        return [name for name in self.store.names() if self.store.is_complete(name)]

    def _sealed(self, name: bytes) -> Sealed:
        manifest, envelope = self.store.manifest(name), self.store.envelope(name)
        assert manifest is not None
        assert envelope is not None
        return Sealed(name=name, manifest=manifest, envelope_bytes=len(envelope))
