"""The owner of a daemon's working copy of the weights: one verified image, and how to make it again.

The invariant: whoever reads sees an image whose root was verified, and it does not change while it is read. Weights
advance along signed edges only; a version counts once every tensor's digest was compared with the manifest, and then
it is written down. After a restart the image is made anew from what is on disk, a snapshot (or an anchor) and the chain
of patches after it; where the image itself is on a disk it is taken up as it is, once what was cut off is undone and
every digest compared. Anything that does not fit is undone or made anew from there, and the edge that was to blame is
not taken again.

Not here: fetching (follower, swarm), choosing a way (rollmesh_protocol.edges), the arithmetic (worker).
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from rollmesh_peer.faults import fault_point
from rollmesh_peer.weights import durable
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.gate import Gate
from rollmesh_peer.weights.image_file import kept_names
from rollmesh_peer.weights.kept_state import Named, SnapshotPolicy
from rollmesh_peer.weights.lineage import Lineage, Link, Origin, named
from rollmesh_peer.weights.ram import open_place
from rollmesh_peer.weights.worker_calls import AheadAnswer
from rollmesh_peer.weights.working_copy import WorkingCopy
from rollmesh_peer.weights.workshop import Workshop
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed, HostError, LinkLost, Refused, RollmeshError
from rollmesh_protocol.layout import Layout

log = logging.getLogger("rollmesh.weights")

READERS_S: Final = 960.0
"""How long new weights wait for an engine that loads the old ones: longer than any load may take, so rarely reached."""
WRITERS_S: Final = 1800.0
"""How long an engine waits for weights that are being made: a restart of a large model reads a whole snapshot."""
IMAGE: Final = "working.image"


@dataclass(frozen=True)
class View:
    """Verified weights that do not change while the view is held."""

    image: Path
    root: bytes
    version: int
    step: int
    sums: bytes
    """Their reload sums, where :meth:`Keeper.measure` found them; else empty."""


class Keeper:
    """Made by :func:`open_keeper`. Its changing methods take turns; properties never wait."""

    def __init__(
        self,
        lineage: Lineage,
        *,
        image: Path,
        is_on_disk: bool,
        store: EdgeStore,
        workshop: Workshop,
        policy: SnapshotPolicy,
        clock: Callable[[], float],
    ) -> None:
        self.image: Final = image
        """Where the working copy lies: a file that children map, to be read only inside :meth:`reading`."""
        self.highest: int = 0
        """The highest version ever verified here, kept over restarts."""
        self._held: Named | None = None
        self._lineage = lineage
        self._store = store
        self._workshop = workshop
        self._copy = WorkingCopy(image, is_on_disk=is_on_disk, store=store, workshop=workshop)
        self._policy = policy
        self._clock = clock
        self._gate = Gate("the weights")
        self._turn = trio.Lock()
        self._changed = trio.Event()
        self._refused: set[bytes] = set()
        self._sums: tuple[bytes, bytes] | None = None
        """A root and its sums."""

    # --- what is held ------------------------------------------------------------------------------------------------
    @property
    def root(self) -> bytes | None:
        """The root of the weights held, verified; None while there are none."""
        return self._held.root if self._held else None

    @property
    def version(self) -> int:
        """The newest name of the weights held; 0 for a base model that no version has named, or for none."""
        return self._held.version if self._held else 0

    @property
    def step(self) -> int:
        """The optimiser step of the weights held."""
        return self._held.step if self._held else 0

    @property
    def is_quarantined(self) -> bool:
        """True while the weights held are older than the newest that were verified here: something broke on disk."""
        return self.version < self.highest

    def is_refused(self, name: bytes) -> bool:
        """True for an edge that gave wrong weights before: plan around it."""
        return name in self._refused

    @asynccontextmanager
    async def reading(self, *, deadline_s: float = WRITERS_S) -> AsyncIterator[View]:
        """Hold the weights as they are.

        LinkLost when there are none within ``deadline_s``, HostError when they are still being changed then.
        """
        until = trio.current_time() + deadline_s
        while True:
            async with self._gate.reading(deadline_s=max(0.0, until - trio.current_time())):
                if self._held is not None:
                    yield self._view(self._held)
                    return
            with trio.move_on_at(until):
                await self._changed.wait()
                continue
            raise LinkLost(f"no verified weights after {deadline_s:g} s")

    async def wait_changed(self, root: bytes | None) -> View:
        """Wait until verified weights with another root than ``root`` are held; to be read inside :meth:`reading`."""
        while self._held is None or self._held.root == root:
            await self._changed.wait()
        return self._view(self._held)

    async def measure(self) -> None:
        """Find the reload sums of the weights held, so that whoever loads them need not read the image for them.

        What fails costs no more than that.
        """
        async with self._turn:  # the image changes in a turn only
            held = self._held
            if held is None or (self._sums is not None and self._sums[0] == held.root):
                return
            try:
                self._sums = held.root, await self._workshop.sums(self.image)
            except (ChildFailed, HostError) as error:
                log.warning("the weights were not summed before they are loaded: %s", error)

    # --- how it changes ----------------------------------------------------------------------------------------------
    async def restore(self) -> None:
        """Make the image from what is on disk; ``root`` stays None when nothing there is good.

        HostError when the image cannot be written, ChildFailed when the worker died.
        """
        async with self._turn, self._gate.writing(deadline_s=READERS_S):
            await self._restore()

    async def adopt_base(
        self, image: Path, *, expected_root: bytes | None = None, version: int = 0, step: int = 0
    ) -> bytes:
        """Begin with a base model's image, which nobody may write into any more; it becomes the snapshot. Its root.

        Raises:
            Refused: ``patch.root`` when it is not the model that ``expected_root`` names; nothing has changed then.
            HostError: the disk or the memory has no room.
            ChildFailed: the worker died.
        """
        async with self._turn:
            found = await self._workshop.digest(image, chunk_bytes=limits.MAX_CHUNK_BYTES)
            if expected_root is not None and found.root != expected_root:
                raise Refused("patch.root", "the base model at hand has other bits than the one that the run names")
            snapshot = Named(root=found.root, version=version, step=step, tensors=found.tensors)
            await trio.to_thread.run_sync(durable.take_file, image, self._lineage.snapshot_file(snapshot))
            async with self._gate.writing(deadline_s=READERS_S):
                self._hold(None)
                if not await self._try(self._lineage.from_snapshot(snapshot)):
                    raise HostError(f"the base model {image} changed while it was copied")
                await self._write_down()
        return found.root

    async def advance(self, path: Sequence[Link]) -> None:
        """Take these edges (name, manifest), whose payloads are complete in the store, one after the other.

        Give the whole path, up to a version above ``highest`` (or equal to it while quarantined). On return the last
        edge's weights are held, verified and written down.

        Raises:
            Refused: ``manifest.parent`` or ``manifest.version`` when the path does not lead on from here,
                ``request.unknown`` when a payload is missing; ``patch.invalid``, ``patch.root`` or ``chunk.digest``
                when a payload is wrong: then the weights are those before the wrong edge, or made anew from disk.
            HostError: readers do not leave, or disk or memory failed.
            ChildFailed: the worker died; the weights were made anew from disk.
        """
        async with self._turn:
            path = self._checked(path)
            async with self._gate.writing(deadline_s=READERS_S):
                failure = await self._apply(path)
                if isinstance(failure, Refused) and len(path) > 1 and path[0][1].parent in (None, self.root):
                    failure = await self._apply_one_by_one(path)
            if failure is not None:
                raise failure
            await self._snapshot_if_due()

    async def prepare(self, link: Link) -> AheadAnswer | None:
        """Have blocks of a patch decoded while it is being fetched, which makes :meth:`advance` shorter later on.

        One short call, which changes nothing; None where there is nothing to do: the keeper is at work, the payload is
        complete, or the patch does not begin at the weights held.

        Raises:
            Refused: ``request.unknown`` when the store has dropped the edge.
            HostError, ChildFailed: nothing is decoded; :meth:`advance` will see to it.
        """
        name, manifest = link
        if self._turn.locked() or self._held is None or manifest.parent != self._held.root:
            return None
        if self._store.is_complete(name):
            return None
        async with self._turn:  # free, so nobody else comes first; and the image changes in a turn only
            return await self._copy.prepare(self._held, link)

    async def confirm(self, *, root: bytes, version: int, step: int) -> bool:
        """A signed header calls ``root`` by this version: True when that is held now, under this name or a newer one.

        The version is taken over if it is newer than all before, so a base or an old root published again is named.
        """
        async with self._turn:
            if self._held is None or self._held.root != root:
                return False
            if version > self.highest or (version == self.highest and self.is_quarantined):
                self._hold(self._held.model_copy(update={"version": version, "step": step}))
                await self._write_down()
            return True

    # --- applying (the gate is held) ---------------------------------------------------------------------------------
    def _checked(self, path: Sequence[Link]) -> Sequence[Link]:
        """The part of ``path`` that matters (from its last anchor on), or :class:`Refused`."""
        if not path:
            raise Refused("manifest.parent", "an empty way leads nowhere")
        anchors = [index for index, (_, manifest) in enumerate(path) if manifest.parent is None]
        path = path[anchors[-1] if anchors else 0 :]
        last = path[-1][1].version
        if last < self.highest or (last == self.highest and not self.is_quarantined):
            raise Refused("manifest.version", f"version {last} is not newer than version {self.highest}")
        at = self.root
        for name, manifest in path:
            if manifest.parent not in (None, at):
                raise Refused("manifest.parent")
            if not self._store.is_complete(name):
                raise Refused("request.unknown", f"the payload of version {manifest.version} is not complete")
            at = manifest.root
        return path

    async def _apply(self, path: Sequence[Link]) -> RollmeshError | None:
        """Apply edges and verify where they lead; None when all is well, else why not."""
        with ExitStack() as pins:
            for name, _ in path:
                pins.enter_context(self._store.pin(name))
            outcome = await self._copy.advance(self._held, path)
            if outcome.failure is None:
                await self._accept(path)
                return None
        log.warning("version %d is not taken: %s", path[-1][1].version, outcome.failure)
        if isinstance(outcome.failure, Refused) and len(path) == 1:
            self._refused.add(path[0][0])
        if outcome.is_torn and not (self._held is not None and await self._copy.recover(self._held)):
            await self._restore()
        return outcome.failure

    async def _apply_one_by_one(self, path: Sequence[Link]) -> RollmeshError | None:
        """Find out which edge is to blame; what comes before it is good and is taken."""
        for link in path:
            failure = await self._apply((link,))
            if failure is not None:
                return failure
        return None

    async def _accept(self, path: Sequence[Link]) -> None:
        """The image is what the last edge promises: from now on that is what is held."""
        fault_point("keeper.verified")
        self._lineage.extend(path)
        self._hold(named(path[-1][1]))
        is_written = await self._write_down()
        fault_point("keeper.written_down")
        if await self._copy.settle() and not is_written:
            await self._write_down()  # the undo log may have been what filled the disk
        log.debug("the weights are version %d, step %d", self.version, self.step)

    def _hold(self, held: Named | None) -> None:
        self._held = held
        self.highest = max(self.highest, self.version)
        self._changed.set()
        self._changed = trio.Event()

    # --- restoring (the gate is held) --------------------------------------------------------------------------------
    async def _restore(self) -> None:
        self._hold(None)
        state = await trio.to_thread.run_sync(self._lineage.read)
        if state is not None:
            self.highest = max(self.highest, state.highest)
        trouble: HostError | None = None
        for origin in self._lineage.origins(state):
            try:
                if not await self._try(origin):
                    continue
            except HostError as error:  # this file cannot be read, or the image cannot be written: try the next one
                log.warning("%s", error)
                trouble = error
                continue
            assert self._held is not None
            if state is not None and state.root == self.root:
                self._hold(self._held.model_copy(update={"version": state.version, "step": state.step}))
            await self._write_down()
            log.info("the weights on disk are version %d, step %d", self.version, self.step)
            return
        self._lineage.set(None, ())
        log.info("no weights on disk yet" if state is None else "no weights on disk are good")
        if trouble is not None:
            raise trouble

    async def _try(self, origin: Origin) -> bool:
        """Make the image from ``origin``, as far along its patches as everything is good, unless it is made already."""
        patches = origin.patches
        if not await self._copy.recover(origin.end):
            answer = await self._copy.make(origin)
            if answer.applied < 0:
                log.warning("%s is damaged: %s", origin.file.name, answer.detail)
                return False
            if answer.applied < len(patches):
                log.warning("the chain is good for %d of %d patches: %s", answer.applied, len(patches), answer.detail)
            patches = patches[: answer.applied]
        if origin.anchor is not None:
            self._lineage.set(None, (origin.anchor, *patches))
        else:
            self._lineage.set(origin.start, patches)
        self._hold(named(patches[-1][1]) if patches else origin.start)
        return True

    # --- small things ------------------------------------------------------------------------------------------------
    def _view(self, held: Named) -> View:
        sums = self._sums[1] if self._sums is not None and self._sums[0] == held.root else b""
        return View(self.image, held.root, held.version, held.step, sums)

    async def _write_down(self) -> bool:
        """Make the present state durable. A disk that fails costs a restart some progress, and no weights now."""
        try:
            with durable.disk_errors("the state of the weights cannot be written"):
                await trio.to_thread.run_sync(lambda: self._lineage.write(self._held, highest=self.highest))
        except HostError as error:
            log.warning("%s; a restart will begin further back", error)
            return False
        return True

    async def _snapshot_if_due(self) -> None:
        """Replace a long chain by a snapshot. A disk that fails costs nothing: the chain grows on."""
        now = self._clock()
        if self._held is None or not self._lineage.is_snapshot_due(self._policy, now=now):
            return
        held, length = self._held, len(self._lineage.chain)
        try:
            async with self._gate.reading(deadline_s=READERS_S):
                await self._copy.save(self._lineage.snapshot_file(held))
        except (HostError, ChildFailed) as error:
            log.warning("no snapshot is made: %s", error)
            return
        fault_point("keeper.snapshot_durable")
        self._lineage.budget = self._lineage.budget.at(now).spend(self._workshop.layout.image_bytes)
        self._lineage.set(held, ())
        await self._write_down()
        log.info("a snapshot of version %d replaces a chain of %d edges", held.version, length)


@asynccontextmanager
async def open_keeper(
    folder: Path,
    *,
    ram_folder: Path | None,
    layout: Layout,
    store: EdgeStore,
    workshop: Workshop,
    policy: SnapshotPolicy | None = None,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[Keeper]:
    """A keeper whose snapshots and state are in ``folder`` and whose image is in ``ram_folder`` (None: on disk).

    Call :meth:`Keeper.restore` next. The image is gone when the block is left, unless it is on disk.

    Raises:
        HostError: neither memory nor disk has room for an image, or another process uses the folder.
    """
    lineage = await trio.to_thread.run_sync(lambda: Lineage(folder, layout=layout, store=store))
    with ExitStack() as stack:
        opening = open_place(folder, ram_folder=ram_folder, needed_bytes=layout.image_bytes, kept=kept_names(IMAGE))
        place = await trio.to_thread.run_sync(stack.enter_context, opening)
        try:
            yield Keeper(
                lineage,
                image=place.folder / IMAGE,
                is_on_disk=not place.is_memory,
                store=store,
                workshop=workshop,
                policy=policy or SnapshotPolicy(),
                clock=clock,
            )
        finally:
            lineage.set(None, ())
