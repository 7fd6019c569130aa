"""Private copies of weights that a keeper holds, made by another process, whether the keeper's daemon runs or not.

The invariant: nothing of the keeper's is locked or changed, and a copy has exactly the root that was asked for. What
the keeper last wrote down says which roots can be had: its snapshot, and every version along its chain. The newest is
copied from the working copy, where that is there and does not change meanwhile; everything else is made again from the
disk. A file that the daemon deletes under our hands is an error, never wrong weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from blake3 import blake3

from rollmesh_peer.folders import private_folder
from rollmesh_peer.weights import durable
from rollmesh_peer.weights.edge_store import MANIFEST
from rollmesh_peer.weights.image_file import mapped
from rollmesh_peer.weights.keeper import IMAGE
from rollmesh_peer.weights.kept_state import STATE_BYTES, KeptState, Named
from rollmesh_peer.weights.lineage import SNAPSHOTS, STATE, named
from rollmesh_peer.weights.payload import WHOLE
from rollmesh_peer.weights.ram import DISK_FOLDER, locked, place_in_memory
from rollmesh_peer.weights.worker_calls import step_of
from rollmesh_peer.weights.workshop import open_workshop
from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError, RollmeshError
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.manifest import Manifest, open_manifest
from rollmesh_protocol.messages import RunCard

COPY: Final = "copy.image"
_LOCK: Final = "lock"


@dataclass(frozen=True)
class Way:
    """How the weights on disk can be made: a whole file that holds ``start``, and patches with their payloads."""

    file: Path
    start: Named
    patches: tuple[tuple[Manifest, Path], ...]
    held: bytes | None
    """The root that the keeper holds, called ``version``: an old root may have got a new name."""
    version: int

    @property
    def roots(self) -> dict[bytes, int]:
        """The versions that can be had, by root; oldest first, and the last is what the keeper holds."""
        found = {self.start.root: self.start.version}
        found |= {manifest.root: manifest.version for manifest, _ in self.patches}
        return found | {self.held: self.version} if self.held in found else found


def find_way(weights: Path, edges: Path, *, card: RunCard) -> Way | None:
    """What a keeper with the folder ``weights`` and its store in ``edges`` last wrote down. Reads only."""
    try:
        state = KeptState.decode((weights / STATE).read_bytes(), limit=STATE_BYTES)
    except (OSError, RollmeshError):
        return None
    if state.layout != card.layout.digest:
        return None
    chain = _chain(state, edges, card=card)
    if state.snapshot is not None:
        file, start = weights / SNAPSHOTS / f"{state.snapshot.root.hex()}.image", state.snapshot
    elif chain:
        (anchor, file), chain = chain[0], chain[1:]
        start = named(anchor)
    else:
        return None
    way = Way(file, start, tuple(chain), state.root, state.version)
    return way if file.is_file() else None


@contextlib.asynccontextmanager
async def open_copies(folder: Path, *, way: Way, layout: Layout, working: tuple[Path, ...]) -> AsyncIterator[Copies]:
    """A private place for one copy at a time in ``folder``; it is gone when the block is left.

    ``working`` are the files where the keeper's working copy may lie: see :func:`working_files`.

    Raises:
        HostError: the disk has no room, with the numbers; or another process makes copies there.
    """
    private_folder(folder)
    with locked(folder / _LOCK, wait=False):
        _empty(folder)  # what a killed process left
        free = durable.free_bytes(folder)
        if free < layout.image_bytes:
            raise HostError(
                f"a copy of the weights takes {layout.image_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free on "
                f"the disk of {folder}"
            )
        try:
            yield Copies(folder / COPY, way=way, layout=layout, working=working)
        finally:
            _empty(folder)


class Copies:
    """Made by :func:`open_copies`."""

    def __init__(self, file: Path, *, way: Way, layout: Layout, working: tuple[Path, ...]) -> None:
        self.file = file
        self._way = way
        self._layout = layout
        self._working = working

    async def make(self, root: bytes) -> Path:
        """The file that holds the weights ``root`` (one of the way's) until the next call.

        Raises:
            HostError: they cannot be had, for the disk failed or the daemon removed a file.
            ChildFailed: the weights worker died.
        """
        self.file.unlink(missing_ok=True)
        if root == list(self._way.roots)[-1]:
            for working in self._working:
                if await trio.to_thread.run_sync(self._is_copied, working, root):
                    return self.file
        patches = list(self._way.patches)
        while patches and patches[-1][0].root != root:
            patches.pop()
        async with open_workshop(self._layout) as workshop:
            answer = await workshop.restore(
                self.file,
                snapshot=self._way.file,
                tensors=self._way.start.tensors,
                steps=[step_of(manifest, payload) for manifest, payload in patches],
                is_on_disk=True,
            )
        if answer.applied < len(patches):
            raise HostError(f"the weights on disk cannot be made again: {answer.detail}")
        return self.file

    def _is_copied(self, working: Path, root: bytes) -> bool:
        """True when the file has these very weights after copying: it may change meanwhile, or be gone."""
        with contextlib.suppress(OSError, HostError):
            if working.stat().st_size == self._layout.image_bytes:
                # Never shared: a full disk would then end the daemon's own writes into it.
                durable.copy_bytes(working, self.file, may_share=False)
                return image_root(self.file, layout=self._layout) == root
        return False


def working_files(weights: Path, *, ram_folder: Path | None) -> tuple[Path, ...]:
    """Where the working copy of the keeper with this folder lies, if it is there: in memory or on the disk."""
    on_disk = weights / DISK_FOLDER / IMAGE
    return (on_disk,) if ram_folder is None else (place_in_memory(weights, ram_folder=ram_folder) / IMAGE, on_disk)


def image_root(image: Path, *, layout: Layout) -> bytes:
    """The root of the weights in a file; HostError when it is not as long as the layout says. Blocks."""
    with mapped(image, length=layout.image_bytes) as view:
        digests = []
        for spec, offset in zip(layout.tensors, layout.offsets, strict=True):
            with view[offset : offset + spec.tensor_bytes] as tensor:
                digests.append(blake3(tensor, max_threads=blake3.AUTO).digest())
    return layout.root(tuple(digests))


def _chain(state: KeptState, edges: Path, *, card: RunCard) -> list[tuple[Manifest, Path]]:
    """The state's chain up to the first edge that is missing or does not fit."""
    found: list[tuple[Manifest, Path]] = []
    at = state.snapshot.root if state.snapshot is not None else None
    for name in state.chain:
        payload = edges / f"{name.hex()}{WHOLE}"
        try:
            with (edges / f"{name.hex()}{MANIFEST}").open("rb") as file:
                envelope = file.read(limits.MANIFEST_BYTES)
            manifest = open_manifest(envelope, name=name, run=card.run, learner=card.learner, layout=card.layout)
        except (OSError, RollmeshError):
            break
        if manifest.parent != at or not payload.is_file():
            break
        found.append((manifest, payload))
        at = manifest.root
    return found


def _empty(folder: Path) -> None:
    for file in folder.iterdir():
        if file.name != _LOCK:
            file.unlink(missing_ok=True)
