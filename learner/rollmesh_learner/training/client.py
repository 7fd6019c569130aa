"""The daemon's side of the trainer: asks the child to train, export and checkpoint, and knows when it was replaced.

The trainer child holds the masters and the optimiser state in its memory. When it dies, the supervisor starts another
from the newest checkpoint; everything since is lost, which shows as a new :attr:`TrainerClient.life`. The caller then
rewinds its book before it goes on. The invariant: what is asked of one life is never done by another, which holds other
weights.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from rollmesh_learner.work.groups import Group, RolloutKey, StoredRollout
from rollmesh_peer.children.frames import Body
from rollmesh_peer.children.process import Child, ChildSpec
from rollmesh_peer.children.supervisor import Supervisor
from rollmesh_peer.faults import fault_point
from rollmesh_peer.weights.durable import disk_errors
from rollmesh_protocol.errors import ChildFailed

_OPEN_S: Final = 1800.0
_TRAIN_S: Final = 7200.0
"""A step of a large model on few GPUs takes half an hour; a hung trainer is still found within two."""
_SAVE_S: Final = 1800.0
_CHECKPOINT: Final = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one training step did. ``suspects`` are rollouts whose claimed log-probabilities failed layer L4."""

    updated: bool
    metrics: Mapping[str, float]
    suspects: tuple[RolloutKey, ...]


class TrainerClient:
    """Owns the trainer child. Run :meth:`run` in a nursery."""

    def __init__(self, spec: ChildSpec, *, opening: Body, checkpoints: Path, kept: int, reach: int = 0) -> None:
        self._opening = opening
        self._checkpoints = checkpoints
        self._kept = kept
        self._reach = reach
        self._supervisor = Supervisor(spec, self._prepare)
        self.life = 0
        """Counts the trainers that were opened; a change means that steps may be lost."""
        self.opened_from: Path | None = None
        """The checkpoint that the present trainer was opened from; None for the base model."""
        self.opened_at_step = 0
        """The step of the checkpoint that the present trainer was opened from."""
        self.opened: Body = {}
        """What the trainer said when it opened: layout, parameters, vocabulary."""

    @property
    def state(self) -> str:
        """A sentence for ``status``."""
        return f"trainer: {self._supervisor.state}"

    async def run(self) -> None:
        """Keep the child alive until cancelled."""
        await self._supervisor.run()

    @property
    def is_alive(self) -> bool:
        """True while there is an opened trainer."""
        return self._supervisor.child is not None

    async def wait_accepted(self) -> None:
        """Wait for the first trainer that could be opened.

        Raises:
            UsageError, Refused, HostError, ChildFailed: the trainer says that it cannot open what it was told to.
        """
        await self._supervisor.wait_accepted(deadline_s=_OPEN_S)

    async def restart(self) -> None:
        """End the trainer, whose weights are nobody's any more; another one opens the newest checkpoint."""
        await self._supervisor.stop()
        self._supervisor.start()

    async def stop(self) -> None:
        """End the trainer, whose weights nobody may have; none is opened before :meth:`restart`."""
        await self._supervisor.stop()

    @property
    def newest(self) -> Path | None:
        """The checkpoint that the next trainer opens; None for the base model."""
        return newest_checkpoint(self._checkpoints)

    def saved_steps(self) -> list[int]:
        """The steps of the checkpoints there are, oldest first."""
        return [_step_of(folder) for folder in _complete(self._checkpoints)]

    async def discard_beyond(self, step: int) -> None:
        """Delete the checkpoints of steps after ``step``."""
        await discard_beyond(self._checkpoints, step)

    async def wait_ready(self) -> int:
        """Wait for a live, opened trainer; returns its :attr:`life`."""
        async with self._supervisor.use(deadline_s=_OPEN_S):
            return self.life

    async def train(self, step: int, groups: Sequence[Group], *, life: int) -> StepOutcome:
        """One optimiser step from weights of ``step`` on whole groups."""
        rollouts = [(group, s.rollout) for group in groups for s in group.samples if s.rollout is not None]
        keys = {_name(rollout): rollout.key for _, rollout in rollouts}
        body: Body = {"step": step, "rollouts": [_record(group, rollout) for group, rollout in rollouts]}
        async with self._of(life) as child:
            answer = await child.call("train", body, deadline_s=_TRAIN_S)
        metrics = answer.get("metrics")
        checks = answer.get("mismatches")
        if not isinstance(metrics, dict) or not isinstance(checks, list | tuple):
            raise ChildFailed("the trainer answered without metrics")
        return StepOutcome(
            updated=answer.get("updated") is True,
            metrics={str(k): float(v) for k, v in metrics.items() if isinstance(v, int | float)},
            suspects=tuple(keys[str(check["id"])] for check in checks if check["verdict"] == "audit"),
        )

    async def export(self, path: Path, *, life: int) -> None:
        """Write the bf16 image of the present weights to ``path``. HostError: there is no room for it."""
        async with self._of(life) as child:
            await child.call("export", {"path": str(path)}, deadline_s=_SAVE_S)

    async def checkpoint(self, step: int, *, carry: Body, life: int) -> Path:
        """Make everything durable; the folder appears whole or not at all. Old checkpoints go.

        What stays: the newest ``kept``, and all back to one that is ``reach`` steps older than the newest.

        HostError: there is no room for it.
        """
        folder = self._checkpoints / f"step-{step:08d}"
        async with self._of(life) as child:
            await child.call("checkpoint", {"folder": str(folder), "carry": carry}, deadline_s=_SAVE_S)
        await trio.to_thread.run_sync(self._prune)
        return folder

    @asynccontextmanager
    async def _of(self, life: int) -> AsyncIterator[Child]:
        async with self._supervisor.use() as child:
            if self.life != life:
                raise ChildFailed("the trainer was replaced, and its weights with it")
            yield child

    async def _prepare(self, child: Child) -> None:
        newest = await trio.to_thread.run_sync(newest_checkpoint, self._checkpoints)
        body = self._opening | {"checkpoint": str(newest) if newest else None}
        self.opened = await child.call("open", body, deadline_s=_OPEN_S)
        step = self.opened.get("step")
        if not isinstance(step, int):
            raise ChildFailed("the trainer opened without telling its step")
        self.opened_at_step = step
        self.opened_from = newest
        self.life += 1

    def _prune(self) -> None:
        for folder in _old(_complete(self._checkpoints), kept=self._kept, reach=self._reach):
            shutil.rmtree(folder, ignore_errors=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None. Unfinished ones have other names."""
    found = _complete(folder)
    return found[-1] if found else None


async def discard_beyond(folder: Path, step: int) -> None:
    """Delete the checkpoints in ``folder`` of steps after ``step``, the newest first.

    Raises:
        HostError: one of them cannot be deleted.
    """
    for checkpoint in reversed([path for path in _complete(folder) if _step_of(path) > step]):
        with disk_errors(f"the checkpoint {checkpoint.name} cannot be deleted"):
            await trio.to_thread.run_sync(shutil.rmtree, checkpoint)
        fault_point("rollback.discarding")


def _old(found: list[Path], *, kept: int, reach: int) -> list[Path]:
    """Those of the checkpoints ``found`` that need not be kept."""
    if not found:
        return []
    newest = _step_of(found[-1])
    old_enough = [place for place, path in enumerate(found) if _step_of(path) <= newest - reach]
    return found[: min(len(found) - kept, old_enough[-1])] if old_enough and len(found) > kept else []


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _complete(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir())


def _name(rollout: StoredRollout) -> str:
    return f"{rollout.lease_id.hex()}/{rollout.sample}"


def _record(group: Group, rollout: StoredRollout) -> Body:
    exact = rollout.exact_logprobs
    return {
        "id": _name(rollout),
        "group": str(group.group_id),
        "prompt": group.prompt.prompt,
        "tokens": rollout.tokens,
        "mu": exact if exact is not None else rollout.logprobs,
        "exact": exact is not None,
        "reward": rollout.reward,
    }
