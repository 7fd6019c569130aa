"""The image itself, and what its worker can do to it: advance it, undo that, or make it anew from the disk.

In memory, what a killed worker leaves is lost. On a disk it is not: a change goes under an undo log, which stays until
:meth:`WorkingCopy.settle`, and an image is made beside the one that it replaces; so the old one can be had again until
the new one is written down, and a restart has not to write all of it anew.

It does not know what is held: the keeper decides what an outcome means, and lets nobody look meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from rollmesh_peer.weights import durable
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.image_file import undo_path
from rollmesh_peer.weights.kept_state import Named
from rollmesh_peer.weights.lineage import Link, Origin
from rollmesh_peer.weights.worker_calls import AheadAnswer, ApplyAnswer, RestoreAnswer, Step, step_of
from rollmesh_peer.weights.workshop import Workshop
from rollmesh_protocol.errors import ChildFailed, HostError, Refused, RollmeshError

log = logging.getLogger("rollmesh.weights")


@dataclass(frozen=True)
class Outcome:
    """``failure`` None: the image is where the path leads, verified. Else it is as before, unless ``is_torn``."""

    failure: RollmeshError | None
    is_torn: bool


class WorkingCopy:
    """The file ``image``, which only the worker behind ``workshop`` writes into."""

    def __init__(self, image: Path, *, is_on_disk: bool, store: EdgeStore, workshop: Workshop) -> None:
        self.image: Final = image
        self._is_on_disk = is_on_disk
        self._store = store
        self._workshop = workshop

    async def advance(self, held: Named | None, path: Sequence[Link]) -> Outcome:
        """Apply ``path`` to the image, which is ``held`` (None: nothing; then the path begins with an anchor)."""
        steps = self._steps(path)
        is_beside = self._is_on_disk and held is not None and steps[0].is_anchor
        try:
            if held is not None and not is_beside:
                answer = await self._workshop.apply(
                    self.image, before=held.tensors, steps=steps, is_on_disk=self._is_on_disk
                )
                if answer.outcome == "applied":
                    return Outcome(None, is_torn=False)
                return Outcome(self._failure(answer), is_torn=answer.outcome == "broken")
            anchor, *patches = steps
            made = await self._workshop.restore(
                self.image,
                snapshot=Path(anchor.payload),
                tensors=anchor.tensors,
                steps=patches,
                is_on_disk=self._is_on_disk,
                keeps_old=is_beside,
            )
        except (ChildFailed, HostError) as error:
            return Outcome(error, is_torn=True)
        if made.applied == len(patches):
            return Outcome(None, is_torn=False)
        return Outcome(Refused("patch.root", made.detail), is_torn=not is_beside)

    async def prepare(self, held: Named, link: Link) -> AheadAnswer:
        """Have blocks of a patch from ``held`` decoded, from the chunks that are there. ChildFailed, HostError."""
        name, manifest = link
        return await self._workshop.ahead(
            self.image,
            before=held.tensors,
            manifest=manifest,
            part=self._store.part_path(name),
            held=self._store.held(name),
        )

    async def settle(self) -> bool:
        """What the image is now is written down: forget how it was before. True where that made room on the disk."""
        if not self._is_on_disk:
            return False
        try:
            return await trio.to_thread.run_sync(durable.remove_file, undo_path(self.image))
        except HostError as error:  # it is of no harm: it begins at weights that nobody will ask for
            log.warning("%s", error)
            return False

    async def recover(self, named: Named) -> bool:
        """Take up ``named`` in the image that is there, if it is on a disk and has these weights, or had them last."""
        if not self._is_on_disk:
            return False
        try:
            answer = await self._workshop.recover(self.image, tensors=named.tensors)
        except (ChildFailed, HostError) as error:
            log.warning("the image on disk cannot be used: %s", error)
            return False
        if answer.detail:
            log.info("the image on disk is not version %d: %s", named.version, answer.detail)
        return answer.is_good

    async def make(self, origin: Origin) -> RestoreAnswer:
        """Make the image anew, as far along the origin's patches as everything is good."""
        return await self._workshop.restore(
            self.image,
            snapshot=origin.file,
            tensors=origin.start.tensors,
            steps=self._steps(origin.patches),
            is_on_disk=self._is_on_disk,
        )

    async def save(self, path: Path) -> None:
        """Copy the image to the disk, durable before it has its name."""
        await self._workshop.snapshot(self.image, path, is_on_disk=self._is_on_disk)

    def _failure(self, answer: ApplyAnswer) -> RollmeshError:
        """Why the image is not where the path leads; on a disk that can also be for want of room."""
        if self._is_on_disk and answer.code == HostError.default_code:
            return HostError(answer.detail)
        return Refused(answer.code, answer.detail)

    def _steps(self, path: Sequence[Link]) -> list[Step]:
        return [step_of(manifest, self._store.payload_path(name)) for name, manifest in path]
