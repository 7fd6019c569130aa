"""Rollbacks in the ledger: which wire tripped, where the run went back to, and what was voided.

A rollback is decided by one transaction, :func:`begin`: from then on nothing of the steps that were undone counts,
whatever dies. Only then the checkpoints that hold those steps go (:func:`finish` says when they have); a start that
finds a rollback unfinished lets them go before a trainer may open one. Bringing the book back and publishing the old
weights again is :mod:`rollmesh_learner.records.restore`'s, as after any loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from rollmesh_learner.records import rows
from rollmesh_learner.records.ledger import Ledger, Statement, number
from rollmesh_learner.training.tripwires import Trip
from rollmesh_peer.faults import fault_point

_UNDONE: Final = (
    "(state IN ('assigned', 'consumed') AND trained_step >= ?1)"
    f" OR (state IN ('scoring', 'auditing', 'ready') AND {rows.MADE_BEYOND})"
)
"""Rollouts trained on in steps that are undone, and those made by the weights of such steps."""


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """One rollback, from the step whose account tripped a wire to the step of an older checkpoint."""

    number: int
    tripped_step: int
    to_step: int
    voided: int
    """Rollouts."""
    wire: str
    value: float | None
    """None where it is not a number."""
    bound: float
    sentence: str

    def as_record(self) -> dict[str, object]:
        """Plain values, for metrics.jsonl and the summary."""
        return {
            "from_step": self.tripped_step,
            "to_step": self.to_step,
            "wire": self.wire,
            "value": self.value,
            "bound": self.bound,
            "sentence": self.sentence,
            "voided": self.voided,
        }

    def __str__(self) -> str:
        return (
            f"step {self.tripped_step} tripped a wire ({self.wire}: {self.sentence}), the run went back to step"
            f" {self.to_step}, and {self.voided} rollouts are void"
        )


async def begin(ledger: Ledger, trip: Trip, *, to_step: int, wall_time: float) -> Rollback:
    """Undo the steps from ``to_step`` on, in one transaction. The book must be suspended: nothing else may change."""
    ((voided,),) = await ledger.fetch(f"SELECT count(*) FROM rollouts WHERE {_UNDONE}", to_step)  # noqa: S608
    ((newest,),) = await ledger.fetch("SELECT coalesce(max(number), 0) FROM rollbacks")
    rollback = Rollback(
        number=number(newest) + 1,
        tripped_step=trip.step,
        to_step=to_step,
        voided=number(voided),
        wire=trip.wire,
        value=trip.value if math.isfinite(trip.value) else None,
        bound=trip.bound,
        sentence=trip.sentence,
    )
    await ledger.commit(_insert(rollback, wall_time=wall_time), *_undo(rollback))
    return rollback


async def finish(ledger: Ledger, discard_beyond: Callable[[int], Awaitable[None]]) -> None:
    """Let the checkpoints go that unfinished rollbacks undid; ``discard_beyond`` deletes those of later steps."""
    ((to_step,),) = await ledger.fetch("SELECT min(to_step) FROM rollbacks WHERE state = 'begun'")
    if to_step is None:
        return
    await discard_beyond(number(to_step))
    fault_point("rollback.discarded")
    await ledger.commit(Statement("UPDATE rollbacks SET state = 'done'"))
    fault_point("rollback.done")


async def all_rollbacks(ledger: Ledger) -> tuple[Rollback, ...]:
    """Every rollback of the run, oldest first."""
    found = await ledger.fetch("SELECT number, tripped_step, to_step, voided, detail FROM rollbacks ORDER BY number")
    return tuple(
        Rollback(
            number=number(nth),
            tripped_step=number(tripped),
            to_step=number(to),
            voided=number(voided),
            **json.loads(str(detail)),
        )
        for nth, tripped, to, voided, detail in found
    )


def _insert(rollback: Rollback, *, wall_time: float) -> Statement:
    detail = {
        "wire": rollback.wire,
        "value": rollback.value,
        "bound": rollback.bound,
        "sentence": rollback.sentence,
    }
    return Statement(
        "INSERT INTO rollbacks (number, tripped_step, to_step, voided, detail, at, state)"
        " VALUES (?, ?, ?, ?, ?, ?, 'begun')",
        (
            rollback.number, rollback.tripped_step, rollback.to_step, rollback.voided, json.dumps(detail), wall_time,
        ),
    )  # fmt: skip


def _undo(rollback: Rollback) -> list[Statement]:
    step = rollback.to_step
    return [
        Statement(f"UPDATE rollouts SET state = 'void' WHERE {_UNDONE}", (step,)),  # noqa: S608 - a constant
        Statement(
            "UPDATE groups SET state = 'dropped', why = ? WHERE step >= ? AND state IN ('assigned', 'consumed')",
            (f"rolled back to step {step}", step),
        ),
        Statement("UPDATE steps SET state = 'rolled_back' WHERE step >= ?", (step,)),
    ]
