"""The images of the last published versions, in memory, for the encoder and for auditors.

An image never changes once it is here, and leaves when newer versions have taken its place (whoever has mapped it keeps
what is mapped). After a restart the ring is made anew, forwards along patches from the newest anchor that is no newer
than the oldest image wanted; patches do not lead back. Where there is only a newer one, what lies before it is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import trio

from rollmesh_learner.publishing.published import History
from rollmesh_peer.weights import durable
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.worker_calls import Step, step_of
from rollmesh_peer.weights.workshop import Workshop
from rollmesh_protocol.errors import HostError

log = logging.getLogger("rollmesh.learner.publisher")


class Ring:
    """Images by root, as files in ``folder``."""

    def __init__(self, folder: Path, *, store: EdgeStore, workshop: Workshop) -> None:
        self._folder = folder
        self._store = store
        self._workshop = workshop
        self._images: dict[bytes, Path] = {}

    def get(self, root: bytes) -> Path | None:
        """The image of ``root``, if it is here."""
        return self._images.get(root)

    def path(self, root: bytes) -> Path:
        """Where the image of ``root`` lies, or would."""
        return self._folder / f"{root.hex()}.image"

    async def take(self, image: Path, root: bytes) -> Path:
        """Move a verified image to its place; it counts only after :meth:`add`. HostError: no room."""
        if root in self._images:
            image.unlink()
        else:
            await trio.to_thread.run_sync(_move, image, self.path(root))
        return self.path(root)

    async def copy(self, source: Path, root: bytes, *, tensors: bytes) -> None:
        """Put a copy of a whole image at its place, verified; it counts only after :meth:`add`."""
        if not await self._make(root, source, tensors, ()):
            raise HostError(f"the image {source} changed while it was published")

    def add(self, root: bytes) -> None:
        """The image at the place of ``root`` belongs to a published version now."""
        self._images[root] = self.path(root)

    def give_up(self, root: bytes) -> None:
        """The version that :meth:`take` was called for is not published."""
        if root not in self._images:
            self.path(root).unlink(missing_ok=True)

    def keep(self, roots: Collection[bytes]) -> None:
        """Let go of all images but these."""
        for root in self._images.keys() - set(roots):
            self._images.pop(root).unlink(missing_ok=True)

    async def fill(self, history: History, *, count: int) -> bool:
        """Make the images of the last ``count`` entries; False when not even the head's can be made.

        Anchors that turn out to be damaged are dropped from the history.
        """
        entries = history.entries
        first = max(0, len(entries) - count)
        positions = history.anchor_positions()
        for position in [*reversed([p for p in positions if p <= first]), *(p for p in positions if p > first)]:
            anchor = entries[position].anchor
            assert anchor is not None
            start = max(position, first)
            steps = self._steps(history, position, start)
            if not await self._make(
                entries[start].head.root, self._store.payload_path(anchor.name), anchor.manifest.tensors, steps
            ):
                history.drop_anchor(position)
                continue
            for index in range(start + 1, len(entries)):
                before = entries[index - 1]
                steps = self._steps(history, index - 1, index)
                if not await self._make(
                    entries[index].head.root, self._images[before.head.root], before.tensors or b"", steps
                ):
                    return False
            return True
        return False

    def _steps(self, history: History, start: int, end: int) -> tuple[Step, ...]:
        """The patches of the cheapest way from the entry at ``start`` to that at ``end``."""
        way = history.way(start, end)
        assert way is not None  # the line of patches is whole
        return tuple(step_of(edge.manifest, self._store.payload_path(edge.name)) for edge in way)

    async def _make(self, root: bytes, source: Path, tensors: bytes, steps: tuple[Step, ...]) -> bool:
        """The image of ``root`` from the image ``source`` along ``steps``."""
        if root in self._images:
            return True
        target = self.path(root)
        answer = await self._workshop.restore(target, snapshot=source, tensors=tensors, steps=steps)
        if answer.applied != len(steps):
            log.warning("an image of a published version cannot be made again: %s", answer.detail)
            target.unlink(missing_ok=True)
            return False
        self._images[root] = target
        return True


def _move(source: Path, target: Path) -> None:
    """A new name for the file where it is in the same memory, else a copy."""
    with durable.disk_errors(f"{target} cannot be written"):
        try:
            source.replace(target)
        except OSError:
            durable.copy_bytes(source, target)
            source.unlink()
