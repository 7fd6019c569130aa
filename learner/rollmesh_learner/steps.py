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
from typing import Final, TypeVar

import trio

from rollmesh_learner.audit.auditor import Auditor
from rollmesh_learner.publishing.publisher import Prepared, Publisher
from rollmesh_learner.publishing.versions import Versions
from rollmesh_learner.records import rollbacks, rows
from rollmesh_learner.records.ledger import Ledger, number
from rollmesh_learner.records.metrics import MetricsFile
from rollmesh_learner.training.client import StepOutcome, TrainerClient
from rollmesh_learner.training.tripwires import Line, Trip
from rollmesh_learner.watch import Watch
from rollmesh_learner.work.book import Book
from rollmesh_learner.work.groups import Group
from rollmesh_peer.children.frames import Body
from rollmesh_peer.faults import fault_point
from rollmesh_protocol.errors import ChildFailed, HostError
from rollmesh_protocol.messages import Head
from rollmesh_protocol.staleness import age

_log = logging.getLogger("rollmesh.learner.steps")

T = TypeVar("T")

_AGAIN_S: Final = 2.0
"""Between two tries of what this machine or a child could not do."""
_NOBODYS_LIFE: Final = 0
"""No trainer has it: theirs count from 1."""
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
        watch: Watch,
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
        self._watch = watch
        self._exports = exports
        self._metrics = MetricsFile(metrics_file, ledger=ledger)
        self._rewind = rewind
        self._progress = trio.Event()
        self._publishing = trio.Lock()
        self._life = 0
        self._saved_step = 0
        self.clock = Clock()
        self._stop_asked = trio.Event()
        self._troubles: dict[str, str] = {}
        self.state = "starting"
        self.mean_reward: float | None = None
        self.checkpoint: Path | None = None
        self.given_up = ""
        """Why the run must not go on by itself, in a sentence; empty while it may."""

    @property
    def last_rollback(self) -> str:
        """Which wire tripped last and what followed, in words; empty when none ever did."""
        return self._watch.last

    @property
    def num_rollbacks(self) -> int:
        """How often the run went back to older weights because a wire tripped."""
        return len(self._watch.rollbacks)

    @property
    def trouble(self) -> str:
        """What this machine cannot do right now, and is tried again, in words."""
        return "; ".join(self._troubles.values())

    def wake(self) -> None:
        """Something was scored or audited: the batch may be ready."""
        self._progress.set()

    def stop(self) -> None:
        """End after the step under way, with a checkpoint of it."""
        self._stop_asked.set()
        self.wake()

    async def settle(self) -> None:
        """Wait for a trainer, and bring the book to the step that it was opened at. Before :meth:`run`."""
        while True:
            self.state = "waiting for the trainer to come back from its checkpoint"
            try:
                self._life = await self._trainer.wait_ready()
                self._saved_step = self._trainer.opened_at_step
                self.checkpoint = self._trainer.opened_from
                async with self._publishing:
                    pass  # what is being published now is a version that the rewind must know of
                await self._rewind(self._saved_step)
                await self._watch.reload()
                await self._metrics.rewrite()
            except ChildFailed as error:
                _log.warning("the trainer is not back yet: %s", error.detail)
                await self._pause()
            else:
                return

    async def run(self) -> bool:
        """Train until the last step is durable (True), or until :meth:`stop` (False). Trainers that die are survived.

        Raises:
            HostError: after :meth:`stop`, when this machine cannot save what there is.
        """
        async with trio.open_nursery() as nursery:
            self._stop_if_hopeless()
            while not self._is_stopping and (self._book.next_step < self._plan.steps or self._is_behind):
                try:
                    await self._one_step(nursery)
                except ChildFailed as error:
                    _log.warning("what was trained after step %d is lost: %s", self._saved_step, error.detail)
                    await self._recover()
            if self._is_stopping:
                await self._save_before_leaving()
            self.state = "finishing the last publication"
        is_complete = self._book.next_step >= self._plan.steps
        self.state = "the run is complete" if is_complete else self.given_up or "stopped"
        return is_complete

    @property
    def _is_stopping(self) -> bool:
        return self._stop_asked.is_set()

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
        outcome = await self._trainer.train(step, groups, life=self._life)
        trained_s = trio.current_time() - started
        fault_point("step.trained")
        line = self._account(step, groups, outcome, waited_s=waited_s, trained_s=trained_s)
        for key in outcome.suspects:
            self._suspect(groups, key)
        trip = self._watch.judge(line)
        if trip is not None:
            await self._roll_back(trip)
            return
        await self._note(step, line)
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

    async def _roll_back(self, trip: Trip) -> None:
        """Nothing of the step that tripped is published or saved; what came before it is undone to a good checkpoint.

        Each of these is durable before the next: the rollback and all that it voids, in one transaction -> later
        checkpoints deleted -> the ledger knows that they are. The rest is what follows on any loss: a trainer opens
        the newest checkpoint, the book goes back to it, and its weights are published again under a new version.
        """
        self.state = f"going back to good weights: step {trip.step} tripped a wire ({trip.wire}: {trip.sentence})"
        fault_point("rollback.tripped")
        self._life = _NOBODYS_LIFE
        await self._trainer.stop()
        async with self._publishing:  # what is being published is given up, or is a version that must be undone
            self._book.suspend()
            rollback = await self._watch.record(trip, saved=self._trainer.saved_steps())
        self._book.tally.void += rollback.voided
        fault_point("rollback.recorded")
        await self._insist("the rollback", lambda: rollbacks.finish(self._ledger, self._trainer.discard_beyond))
        self._saved_step, self.checkpoint = rollback.to_step, self._trainer.newest
        await self._trainer.restart()
        if not self._is_stopping:
            await self.settle()
            self._stop_if_hopeless()

    def _stop_if_hopeless(self) -> None:
        self.given_up = self._watch.hopeless(self._book.next_step)
        if self.given_up:
            _log.error("the run stops: %s", self.given_up)
            self.stop()

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
        carry: Body = {"next_group": self._book.next_group}
        self.checkpoint = await self._insist(
            f"the checkpoint of step {step}", lambda: self._trainer.checkpoint(step, carry=carry, life=self._life)
        )
        fault_point("step.checkpointed")
        await self._ledger.commit(*rows.steps_final(step))
        self._saved_step = step
        fault_point("step.final")

    async def _save_before_leaving(self) -> None:
        if self._book.next_step <= self._saved_step or self._is_behind:
            return
        try:
            await self._save(self._book.next_step)
        except ChildFailed as error:
            _log.warning("what was trained after step %d is not saved: %s", self._saved_step, error.detail)

    async def _recover(self) -> None:
        if self._trainer.is_alive and not self._is_behind:  # it refused, and nobody can say what it holds now
            await self._pause()
            await self._trainer.restart()
        if not self._is_stopping:
            await self.settle()

    async def _insist(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """The result of ``call``, repeated while this machine cannot do it (a full disk), and saying so.

        Raises:
            HostError: that of ``call``, once the learner is to stop.
        """
        while True:
            try:
                result = await call()
            except HostError as error:
                if self._is_stopping:
                    raise
                self._complain(what, f"{what} waits: {error.detail}")
                await self._pause()
            else:
                self._troubles.pop(what, None)
                return result

    def _complain(self, what: str, trouble: str) -> None:
        if self._troubles.get(what) != trouble:
            _log.warning("%s; trying again every %g s", trouble, _AGAIN_S)
        self._troubles[what] = trouble

    async def _pause(self) -> None:
        with trio.move_on_after(_AGAIN_S):
            await self._stop_asked.wait()

    # --- publishing --------------------------------------------------------------------------------------------------
    async def publish_now(self, step: int) -> None:
        """Publish the trainer's present weights, those of ``step``, and wait until they are out."""
        async with self._publishing:
            await self._publish(await self._export(step), step, life=self._life)

    async def _publish_beside(self, step: int, nursery: trio.Nursery, *, updated: bool) -> None:
        """Export now, before the next step changes the weights; encode and announce beside that step."""
        self.state = f"publishing the weights of step {step}"
        async with self._publishing:
            if not updated and self._versions.head.step == step - 1:
                self._move_head(step)
                return
            image = await self._export(step)
        nursery.start_soon(self._publish_in_turn, image, step, self._life)

    async def _publish_in_turn(self, image: Path, step: int, life: int) -> None:
        async with self._publishing:
            await self._publish(image, step, life=life)

    async def _export(self, step: int) -> Path:
        image = self._exports / f"step-{step:08d}-of-life-{self._life}.new"
        await self._insist(f"the export of step {step}", lambda: self._trainer.export(image, life=self._life))
        return image

    async def _publish(self, image: Path, step: int, *, life: int) -> None:
        """Make the weights in ``image`` the next version. A full disk or a dead worker delays it, and says so.

        It is given up when the trainer of that life is gone, and the step with it; and when a learner that cannot
        publish is to stop: the next start publishes what it then has.
        """
        what = f"the publication of step {step}"
        tries = 0
        while life == self._life and not (tries and self._is_stopping):
            tries += 1
            version = await self._reserve(step)
            fault_point("version.reserved")
            try:
                prepared = await self._publisher.prepare(image, version=version, step=step)
            except (ChildFailed, HostError) as error:
                self._complain(what, f"{what} waits: {error.detail}")
                await self._pause()
            else:
                await self._bring_out(prepared, step)
                break
        else:
            image.unlink(missing_ok=True)
        self._troubles.pop(what, None)

    async def _bring_out(self, prepared: Prepared | None, step: int) -> None:
        if prepared is None:
            self._move_head(step)
            return
        await self._ledger.commit(rows.version_published(prepared.header))
        fault_point("version.durable")
        self._publisher.announced(prepared)
        self._versions.publish(prepared.entry.head)
        await self._publisher.maintain()

    async def _reserve(self, step: int) -> int:
        ((highest,),) = await self._ledger.fetch("SELECT coalesce(max(version), 0) FROM versions")
        version = number(highest) + 1
        await self._ledger.commit(rows.reserve_version(version, step=step, wall_time=time.time()))
        return version

    def _move_head(self, step: int) -> None:
        """Not one weight changed: the version published last stays, and counts as the weights of ``step``."""
        head = self._publisher.head
        self._versions.publish(Head(version=head.version, step=step, root=head.root))

    # --- accounts ----------------------------------------------------------------------------------------------------
    def _account(
        self, step: int, groups: list[Group], outcome: StepOutcome, *, waited_s: float, trained_s: float
    ) -> dict[str, object]:
        rollouts = [s.rollout for group in groups for s in group.samples if s.rollout is not None]
        rewards = [rollout.reward or 0.0 for rollout in rollouts]
        ages = [age(consuming_step=step, weights_step=rollout.step) for rollout in rollouts]
        self.mean_reward = sum(rewards) / len(rewards)
        return {
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

    async def _note(self, step: int, line: Line) -> None:
        """A good step."""
        notes = self._watch.notes(step)
        text = json.dumps({**line, "rollbacks": notes} if notes else line)
        await self._ledger.commit(rows.step_trained(step, text))
        await self._metrics.add(text)
        self._watch.accept(line)
        _log.info("step %d: reward %.3f, age %.1f, waited %.1f s, trained %.1f s", step, line["reward"],
                  line["age_mean"], line["waited_s"], line["trained_s"])  # fmt: skip

    def _suspect(self, groups: list[Group], key: tuple[bytes, int]) -> None:
        for group in groups:
            rollout = group.samples[key[1]].rollout if key[1] < len(group.samples) else None
            if rollout is not None and rollout.key == key and rollout.exact_logprobs is None:
                self._auditor.suspect(rollout, prompt=group.prompt.prompt)
