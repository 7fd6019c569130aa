"""The image of one older version, made again from disk when it is asked for: work may be audited long afterwards.

The ring holds the last versions. What lies before them can be made again along patches from an anchor or from the base
model, as far back as those are kept. Invariants: at most one such image exists at a time; it lies in the ring's folder,
which every start finds empty, under a name of its own; it is made only where it fits beside all that the publisher may
still put there, and shown only after it was verified; nothing that it is made from is deleted meanwhile. What turned
out to be damaged is not tried again. Not here: who needs which version, and when.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from rollmesh_learner.publishing.published import Sealed, cheapest_way
from rollmesh_learner.publishing.publisher import Publisher
from rollmesh_peer.weights.worker_calls import Step, step_of
from rollmesh_peer.weights.workshop import Workshop
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed, HostError, Refused

log = logging.getLogger("rollmesh.learner.publisher")

GONE: Final = "their weights are no longer kept"
NO_ROOM: Final = "there is no room for their weights"
DAMAGED: Final = "their weights cannot be made again"
_SUFFIX: Final = ".older"


@dataclass(frozen=True)
class _Way:
    """From a whole image on disk along patches."""

    name: bytes
    """Of the anchor's manifest; the root of the base model."""
    image: Path
    tensors: bytes | None
    """Digests of the image's tensors, joined; None where no manifest tells them."""
    patches: tuple[Sealed, ...]

    @property
    def names(self) -> tuple[bytes, ...]:
        """Of the image, then of each patch."""
        return (self.name, *(patch.name for patch in self.patches))

    @property
    def patch_bytes(self) -> int:
        """What has to be decoded."""
        return sum(patch.manifest.payload_bytes for patch in self.patches)


class Archive:
    """Makes images in ``folder``, where ``room`` tells how many bytes are free and the publisher may use so many.

    One task at a time may ask for an image. The publisher's own calls of ``workshop`` wait for one to be made at most.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        workshop: Workshop,
        folder: Path,
        room: Callable[[], int],
        publisher_bytes: int,
    ) -> None:
        self._publisher = publisher
        self._workshop = workshop
        self._folder = folder
        self._room = room
        self._publisher_bytes = publisher_bytes
        self._base_tensors: bytes | None = None
        self._damaged: set[bytes] = set()
        self.root: bytes | None = None
        """Of the one older version whose image is there."""

    def image_of(self, root: bytes) -> Path | None:
        """The image of a version of the ring, or of the older one that is there."""
        return self._publisher.image_of(root) or (self._path(root) if root == self.root else None)

    async def make(self, root: bytes) -> str:
        """Make the image of ``root`` in place of the one that there was, with one attempt; why not, or an empty text.

        An empty text without an image: something on the way was damaged, and there may be another way. Ask again.
        """
        await self.clear()
        with ExitStack() as pins:
            try:
                way = self._cheapest(root, avoided=self._damaged)
                if way is None:
                    return GONE if self._cheapest(root, avoided=()) is None else DAMAGED
                for patch in way.patches:
                    pins.enter_context(self._publisher.store.pin(patch.name))
                pins.enter_context(self._publisher.store.pin(way.name))
                if not self._has_room():
                    return NO_ROOM
                await self._restore(root, way)
            except (HostError, ChildFailed, Refused) as error:
                log.warning("the weights %s cannot be made again: %s", root.hex()[:8], error.detail)
                return DAMAGED
        return ""

    async def clear(self) -> None:
        """Remove the image that is there, if any."""
        if self.root is not None:
            path, self.root = self._path(self.root), None
            await trio.to_thread.run_sync(lambda: path.unlink(missing_ok=True))

    async def _restore(self, root: bytes, way: _Way) -> None:
        tensors = way.tensors or await self._digest_base(way)
        if tensors is None:
            return
        target = self._path(root)
        try:
            answer = await self._workshop.restore(
                target, snapshot=way.image, tensors=tensors, steps=[self._step(patch) for patch in way.patches]
            )
            if answer.applied == len(way.patches):
                self.root = root
            else:
                self._shun(way.names[answer.applied + 1], answer.detail)
        finally:
            if self.root != root:
                target.unlink(missing_ok=True)

    async def _digest_base(self, way: _Way) -> bytes | None:
        """The digests of the base model's tensors; None where the file is not what it was."""
        found = await self._workshop.digest(way.image, chunk_bytes=limits.ANCHOR_CHUNK_BYTES)
        if found.root != way.name:
            self._shun(way.name, "the base model's image has changed on the disk")
            return None
        self._base_tensors = found.tensors
        return found.tensors

    def _shun(self, name: bytes, detail: str) -> None:
        log.warning("older weights are not made from %s.. any more: %s", name.hex()[:8], detail)
        self._damaged.add(name)

    def _cheapest(self, root: bytes, *, avoided: Collection[bytes]) -> _Way | None:
        """The way to ``root`` with the fewest bytes of patches; None when none is left."""
        store = self._publisher.store
        edges = [
            edge
            for entry in self._publisher.history.entries
            for edge in entry.edges
            if edge.name not in avoided and store.is_complete(edge.name)
        ]
        ways = [
            _Way(edge.name, store.payload_path(edge.name), edge.manifest.tensors, patches)
            for edge in edges
            if edge.manifest.kind == "anchor"
            and (patches := cheapest_way(edges, start=edge.manifest.root, goal=root)) is not None
        ]
        ways += [
            _Way(base, image, self._base_tensors, patches)
            for base, image in self._publisher.base_images()
            if base not in avoided and (patches := cheapest_way(edges, start=base, goal=root)) is not None
        ]
        return min(ways, key=lambda way: way.patch_bytes, default=None)

    def _has_room(self) -> bool:
        """True where the image fits beside what is there and what the publisher has not put there yet."""
        used = 0
        for file in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                used += file.stat().st_size
        needed = self._workshop.layout.image_bytes + max(0, self._publisher_bytes - used)
        free = self._room()
        if free < needed:
            log.warning(
                "older weights are not made again: %.2f GiB are needed in %s and %.2f GiB are free",
                needed / limits.GIB, self._folder, free / limits.GIB,
            )  # fmt: skip
        return free >= needed

    def _step(self, patch: Sealed) -> Step:
        return step_of(patch.manifest, self._publisher.store.payload_path(patch.name))

    def _path(self, root: bytes) -> Path:
        return self._folder / f"{root.hex()}{_SUFFIX}"
