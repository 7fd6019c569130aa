"""Watches the steps of a run through its tripwires, and remembers how often it had to go back.

Invariant: what it knows is what the ledger says; it is read again (:meth:`Watch.reload`) whenever the book goes back.
The stepper does what follows from a trip, in its durable order; whether a step is good is decided in
:mod:`rollmesh_learner.training.tripwires`.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from rollmesh_learner.records import rollbacks
from rollmesh_learner.records.ledger import Ledger
from rollmesh_learner.records.rollbacks import Rollback
from rollmesh_learner.training.tripwires import Bounds, Line, Trip, judge, where_to

_log = logging.getLogger("rollmesh.learner.watch")


@dataclass(frozen=True, kw_only=True)
class WatchRules:
    """How the operator wants a run to be watched."""

    enabled: bool
    bounds: Bounds
    most_rollbacks: int
    rollback_steps: int
    checkpoint_every: int


class Watch:
    """The tripwires of one run."""

    def __init__(self, rules: WatchRules, *, ledger: Ledger) -> None:
        self._rules: Final = rules
        self._ledger = ledger
        self._good: deque[Line] = deque(maxlen=rules.bounds.window)
        self.rollbacks: tuple[Rollback, ...] = ()
        """All of the run, oldest first."""

    async def reload(self) -> None:
        """Learn from the ledger which steps are good, and where the run went back."""
        found = await self._ledger.fetch(
            "SELECT metrics FROM steps WHERE state IN ('trained', 'final') AND metrics IS NOT NULL"
            " ORDER BY step DESC LIMIT ?",
            self._rules.bounds.window,
        )
        self._good.clear()
        self._good.extend(json.loads(str(text)) for (text,) in reversed(found))
        self.rollbacks = await rollbacks.all_rollbacks(self._ledger)

    def judge(self, line: Line) -> Trip | None:
        """The wire that a step trips, before anything of it is durable; None when it is good or nobody watches."""
        return judge(line, history=self._good, bounds=self._rules.bounds) if self._rules.enabled else None

    def accept(self, line: Line) -> None:
        """A good step: later ones are compared with it."""
        self._good.append(line)

    def notes(self, step: int) -> list[dict[str, object]]:
        """The rollbacks that ``step`` begins again from, for its line in metrics.jsonl."""
        return [rollback.as_record() for rollback in self.rollbacks if rollback.to_step == step]

    async def record(self, trip: Trip, *, saved: Collection[int]) -> Rollback:
        """Decide where to go back to, and write it down: from here on the steps in between do not count."""
        tried = {rollback.to_step for rollback in self._lately(trip.step)}
        to_step = where_to(saved, trip=trip, tried=tried, checkpoint_every=self._rules.checkpoint_every)
        rollback = await rollbacks.begin(self._ledger, trip, to_step=to_step, wall_time=time.time())
        self.rollbacks = (*self.rollbacks, rollback)
        _log.error("%s", rollback)
        return rollback

    def hopeless(self, step: int) -> str:
        """Why the run must not go on from ``step`` by itself, in a sentence; empty while it may."""
        lately = self._lately(step)
        if len(lately) <= self._rules.most_rollbacks:
            return ""
        return (
            f"{len(lately)} rollbacks within {self._rules.rollback_steps} steps are more than"
            f" tripwires.most_rollbacks = {self._rules.most_rollbacks} (the last: {lately[-1]}): change what is wrong,"
            " such as training.lr, and raise most_rollbacks to go on"
        )

    @property
    def last(self) -> str:
        """The last rollback in words; empty when there was none."""
        return str(self.rollbacks[-1]) if self.rollbacks else ""

    def _lately(self, step: int) -> list[Rollback]:
        first = step - self._rules.rollback_steps
        return [rollback for rollback in self.rollbacks if rollback.tripped_step > first]
