"""The learner's own loop: assemble a batch, train on it, checkpoint, publish. The durable order is kept here.

Each of these is durable before the next: batch assigned to step s in the ledger -> train -> checkpoint -> steps up to
the checkpoint final -> version number reserved -> chunks and manifest on disk -> announced. Publishing step s + 1 runs
beside the training of the next step; a second publication waits for the first.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from rollmesh_learner import rows
from rollmesh_learner.audit.auditor import Auditor
from rollmesh_learner.book import Book
from rollmesh_learner.groups import Group
from rollmesh_learner.ledger import Ledger, number
from rollmesh_learner.publisher import Publisher
from rollmesh_learner.training.client import StepOutcome, TrainerClient
from rollmesh_learner.versions import Versions
from rollmesh_peer.faults import fault_point
from rollmesh_protocol.errors import ChildFailed, HostError
from rollmesh_protocol.messages import Head
from rollmesh_protocol.staleness import age

_log = logging.getLogger("rollmesh.learner.steps")

_PUBLISH_AGAIN_S: Final = 2.0
_LOOK_S: Final = 0.5
"""The batch is looked at whenever something was scored or audited, and this often besides."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """When to publish, to save, and to stop. ``steps`` optimiser steps make the run."""

    steps: int
    publish_every: int
    checkpoint_every: int


@dataclass
class Clock:
    """Where the trainer's time went, in seconds, since this process started."""

    waited_s: float = 0.0
    worked_s: float = 0.0
    first_batch_s: float = 0.0

    @property
    def bubble_fraction(self) -> float:
        """The share of time that the trainer waited for admissible rollouts; the wait for the first batch is apart."""
        total = self.waited_s + self.worked_s
        return self.waited_s / total if total else 0.0


class Stepper:
    """Runs the steps of a run to its end."""

    def __init__(
        self,
        plan: StepPlan,
        *,
        book: Book,
        ledger: Ledger,
        trainer: TrainerClient,
        publisher: Publisher,
        versions: Versions,
        auditor: Auditor,
        exports: Path,
        metrics_file: Path,
        rewind: Callable[[int], Awaitable[None]],
    ) -> None:
        self._plan = plan
        self._book = book
        self._ledger = ledger
        self._trainer = trainer
        self._publisher = publisher
        self._versions = versions
        self._auditor = auditor
        self._exports = exports
        self._metrics_file = metrics_file
        self._rewind = rewind
        self._progress = trio.Event()
        self._publishing = trio.Lock()
        self._life = 0
        self._saved_step = 0
        self._is_stopping = False
        self.clock = Clock()
        self.state = "starting"
        self.trouble = ""
        """What keeps a version from being published right now, in words."""
        self.mean_reward: float | None = None
        self.checkpoint: Path | None = None

    def wake(self) -> None:
        """Something was scored or audited: the batch may be ready."""
        self._progress.set()

    def stop(self) -> None:
        """End after the step under way, with a checkpoint of it."""
        self._is_stopping = True
        self.wake()

    async def run(self) -> bool:
        """Train until the last step is durable (True), or until :meth:`stop` (False). Trainers that die are survived.

        The book must stand at the step that the trainer was opened at.
        """
        self._life = await self._trainer.wait_ready()
        self._saved_step = self._trainer.opened_at_step
        self.checkpoint = self._trainer.opened_from
        async with trio.open_nursery() as nursery:
            while not self._is_stopping and (self._book.next_step < self._plan.steps or self._is_behind):
                try:
                    await self._one_step(nursery)
                except ChildFailed as error:
                    _log.warning("step %d was lost: %s", self._book.next_step, error.detail)
                    await self._recover()
            if self._is_stopping and self._book.next_step > self._saved_step and not self._is_behind:
                await self._save(self._book.next_step)
            self.state = "finishing the last publication"
        is_complete = self._book.next_step >= self._plan.steps
        self.state = "the run is complete" if is_complete else "stopped"
        return is_complete

    @property
    def _is_behind(self) -> bool:
        """True when the trainer died and came back from a checkpoint that the book has not gone back to yet."""
        return self._life != self._trainer.life

    async def _one_step(self, nursery: trio.Nursery) -> None:
        step = self._book.next_step
        started = trio.current_time()
        if not await self._wait_for_batch():
            return
        waited_s = trio.current_time() - started
        groups, statements = self._book.assemble(wall_time=time.time())
        await self._ledger.commit(*statements)
        fault_point("step.assigned")
        self.state = f"training step {step}"
        started = trio.current_time()
        outcome = await self._trainer.train(step, groups)
        trained_s = trio.current_time() - started
        fault_point("step.trained")
        await self._note(step, groups, outcome, waited_s=waited_s, trained_s=trained_s)
        for key in outcome.suspects:
            self._suspect(groups, key)
        is_last = step + 1 == self._plan.steps
        if (step + 1) % self._plan.checkpoint_every == 0 or is_last:
            await self._save(step + 1)
        if (step + 1) % self._plan.publish_every == 0 or is_last:
            await self._publish_beside(step + 1, nursery, updated=outcome.updated)
        if step:
            self.clock.waited_s += waited_s
            self.clock.worked_s += trio.current_time() - started
        else:
            self.clock.first_batch_s = waited_s

    async def _wait_for_batch(self) -> bool:
        """Wait until the next batch is complete; False when the run is to stop instead."""
        while not self._is_stopping:
            if self._is_behind:
                raise ChildFailed("the trainer was replaced between two steps")
            stale = self._book.drop_stale()
            if stale:
                await self._ledger.commit(*stale)
            if self._book.batch_is_ready():
                return True
            self.state = self._book.waits_for()
            self._progress = trio.Event()
            with trio.move_on_after(_LOOK_S):
                await self._progress.wait()
        return False

    async def _save(self, step: int) -> None:
        self.state = f"saving a checkpoint of step {step}"
        self.checkpoint = await self._trainer.checkpoint(step, carry={"next_group": self._book.next_group})
        fault_point("step.checkpointed")
        await self._ledger.commit(*rows.steps_final(step))
        self._saved_step = step
        fault_point("step.final")

    async def _recover(self) -> None:
        self.state = "waiting for the trainer to come back from its checkpoint"
        self._life = await self._trainer.wait_ready()
        self._saved_step = self._trainer.opened_at_step
        async with self._publishing:
            pass  # what is being published now is a version that the rewind must know of
        await self._rewind(self._saved_step)

    # --- publishing --------------------------------------------------------------------------------------------------
    async def publish_now(self, step: int) -> None:
        """Publish the trainer's present weights, those of ``step``, and wait until they are out."""
        async with self._publishing:
            image = self._image(step)
            await self._trainer.export(image)
            await self._publish(image, step)

    async def _publish_beside(self, step: int, nursery: trio.Nursery, *, updated: bool) -> None:
        """Export now, before the next step changes the weights; encode and announce beside that step."""
        self.state = f"publishing the weights of step {step}"
        async with self._publishing:
            if not updated and self._versions.head.step == step - 1:
                self._move_head(step)
                return
            image = self._image(step)
            await self._trainer.export(image)
        nursery.start_soon(self._publish_in_turn, image, step, self._life)

    async def _publish_in_turn(self, image: Path, step: int, life: int) -> None:
        async with self._publishing:
            if life == self._life:  # else the step was lost meanwhile, and its weights with it
                await self._publish(image, step)
            else:
                image.unlink(missing_ok=True)

    async def _publish(self, image: Path, step: int) -> None:
        """Make the weights in ``image`` the next version. A full disk or a dead worker delays it, and says so."""
        while True:
            ((highest,),) = await self._ledger.fetch("SELECT coalesce(max(version), 0) FROM versions")
            version = number(highest) + 1
            await self._ledger.commit(rows.reserve_version(version, step=step, wall_time=time.time()))
            fault_point("version.reserved")
            try:
                prepared = await self._publisher.prepare(image, version=version, step=step)
            except (ChildFailed, HostError) as error:
                self.trouble = f"version {version} is not published yet: {error.detail}"
                _log.warning("%s; trying again in %g s", self.trouble, _PUBLISH_AGAIN_S)
                await trio.sleep(_PUBLISH_AGAIN_S)
                continue
            self.trouble = ""
            break
        if prepared is None:
            self._move_head(step)
            return
        await self._ledger.commit(rows.version_published(prepared.header))
        fault_point("version.durable")
        self._publisher.announced(prepared)
        self._versions.publish(Head(version=version, step=step, root=prepared.header.root))
        await self._publisher.maintain()

    def _move_head(self, step: int) -> None:
        """Not one weight changed: the published version stays, and counts as the weights of ``step``."""
        head = self._versions.head
        if head.version == 0:
            head = self._publisher.head
        self._versions.publish(Head(version=head.version, step=step, root=head.root))

    def _image(self, step: int) -> Path:
        return self._exports / f"step-{step:08d}.new"

    # --- accounts ----------------------------------------------------------------------------------------------------
    async def _note(
        self, step: int, groups: list[Group], outcome: StepOutcome, *, waited_s: float, trained_s: float
    ) -> None:
        rollouts = [s.rollout for group in groups for s in group.samples if s.rollout is not None]
        rewards = [rollout.reward or 0.0 for rollout in rollouts]
        ages = [age(consuming_step=step, weights_step=rollout.step) for rollout in rollouts]
        self.mean_reward = sum(rewards) / len(rewards)
        line = {
            "step": step,
            "reward": self.mean_reward,
            "updated": outcome.updated,
            "age_mean": sum(ages) / len(ages),
            "age_max": max(ages),
            "tokens_mean": sum(rollout.num_tokens for rollout in rollouts) / len(rollouts),
            "nodes": len({rollout.node for rollout in rollouts}),
            "waited_s": waited_s,
            "trained_s": trained_s,
            "suspects": len(outcome.suspects),
            "wall_time": time.time(),
            **outcome.metrics,
        }
        text = json.dumps(line)
        await self._ledger.commit(rows.step_trained(step, text))
        await trio.to_thread.run_sync(_append, self._metrics_file, text)
        _log.info("step %d: reward %.3f, age %.1f, waited %.1f s, trained %.1f s", step, self.mean_reward,
                  line["age_mean"], waited_s, trained_s)  # fmt: skip

    def _suspect(self, groups: list[Group], key: tuple[bytes, int]) -> None:
        for group in groups:
            rollout = group.samples[key[1]].rollout if key[1] < len(group.samples) else None
            if rollout is not None and rollout.key == key and rollout.exact_logprobs is None:
                self._auditor.suspect(rollout, prompt=group.prompt.prompt)


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
