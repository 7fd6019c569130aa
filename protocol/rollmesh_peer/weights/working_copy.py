"""The image itself, and what its worker can do to it: advance it, undo that, or make it anew from the disk.

It does not know what is held: the keeper decides what an outcome means, and lets nobody look meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.kept_state import Named
from rollmesh_peer.weights.lineage import Link, Origin
from rollmesh_peer.weights.worker_calls import RestoreAnswer, Step, step_of
from rollmesh_peer.weights.workshop import Workshop
from rollmesh_protocol.errors import ChildFailed, HostError, Refused, RollmeshError


@dataclass(frozen=True)
class Outcome:
    """``failure`` None: the image is where the path leads, verified. Else it is as before, unless ``is_torn``."""

    failure: RollmeshError | None
    is_torn: bool


class WorkingCopy:
    """The file ``image``, which only the worker behind ``workshop`` writes into."""

    def __init__(self, image: Path, *, store: EdgeStore, workshop: Workshop) -> None:
        self.image: Final = image
        self._store = store
        self._workshop = workshop

    async def advance(self, held: Named | None, path: Sequence[Link]) -> Outcome:
        """Apply ``path`` to the image, which is ``held`` (None: nothing; then the path begins with an anchor)."""
        steps = self._steps(path)
        try:
            if held is not None:
                answer = await self._workshop.apply(self.image, before=held.tensors, steps=steps)
                if answer.outcome == "applied":
                    return Outcome(None, is_torn=False)
                return Outcome(Refused(answer.code, answer.detail), is_torn=answer.outcome == "broken")
            anchor, *patches = steps
            made = await self._workshop.restore(
                self.image, snapshot=Path(anchor.payload), tensors=anchor.tensors, steps=patches
            )
        except (ChildFailed, HostError) as error:
            return Outcome(error, is_torn=True)
        if made.applied == len(patches):
            return Outcome(None, is_torn=False)
        return Outcome(Refused("patch.root", made.detail), is_torn=True)

    async def make(self, origin: Origin) -> RestoreAnswer:
        """Make the image anew, as far along the origin's patches as everything is good."""
        return await self._workshop.restore(
            self.image, snapshot=origin.file, tensors=origin.start.tensors, steps=self._steps(origin.patches)
        )

    async def save(self, path: Path) -> None:
        """Copy the image to the disk, durable before it has its name."""
        await self._workshop.snapshot(self.image, path)

    def _steps(self, path: Sequence[Link]) -> list[Step]:
        return [step_of(manifest, self._store.payload_path(name)) for name, manifest in path]
