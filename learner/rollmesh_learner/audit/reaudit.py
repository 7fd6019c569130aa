"""Consumed work of a node that turned out to cheat: audited after the fact, to know what training took in.

Nothing is undone here, and no standing changes: the node is out already. What fails is counted by the step that
consumed it, in the ledger too (a row of ``audits`` with the verdict ``hard`` whose rollout was consumed). Only rollouts
whose weights are still kept can be recomputed; the newest come first, and no more than :data:`MOST` of a node.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rollmesh_learner.audit.cases import Case
from rollmesh_learner.audit.pieces import are_kept
from rollmesh_learner.records.audits import consuming_step, unaudited_consumed
from rollmesh_learner.records.ledger import Ledger
from rollmesh_learner.work.groups import RolloutKey
from rollmesh_protocol.identity import short
from rollmesh_protocol.verdicts.margins import Verdict

_log = logging.getLogger("rollmesh.learner.audit")

MOST: Final = 512
"""Rollouts of one node that are looked at again."""


class Reaudits:
    """What of consumed work waits to be looked at again, and what was found. ``bad`` goes on from the ledger's."""

    def __init__(self, ledger: Ledger, *, image_of: Callable[[bytes], Path | None], bad: dict[int, int]) -> None:
        self._ledger = ledger
        self._image_of = image_of
        self._wanted: list[str] = []
        self._steps: dict[RolloutKey, int] = {}
        self._checked: Counter[str] = Counter()
        self._failed: dict[str, Counter[int]] = {}
        self.cases: dict[RolloutKey, Case] = {}
        """Those that wait, the newest first."""
        self.bad: Counter[int] = Counter(bad)
        """Step -> rollouts that it consumed and that failed."""

    def look_back(self, node: str) -> None:
        """``node`` was put out of the run: its consumed work is to be looked at."""
        self._wanted.append(node)

    async def load(self) -> None:
        """Put the consumed work of the nodes asked for into :attr:`cases`."""
        while self._wanted:
            node = self._wanted[0]
            for rollout, prompt, step in await unaudited_consumed(self._ledger, node, most=MOST):
                case = Case(rollout, prompt)
                if are_kept(case, self._image_of):
                    self.cases[rollout.key] = case
                    self._steps[rollout.key] = step
            self._wanted.pop(0)

    async def count_consumed(self, key: RolloutKey) -> None:
        """A rollout failed; where a step has consumed it, count it with that step."""
        step = await consuming_step(self._ledger, key)
        if step is not None:
            self.bad[step] += 1
            _log.warning("a rollout that failed was consumed by step %d", step)

    def judged(self, case: Case, verdict: Verdict) -> None:
        """The verdict on one of them."""
        step = self._steps[case.rollout.key]
        self._checked[case.rollout.node] += 1
        if verdict == "hard":
            self.bad[step] += 1
            self._failed.setdefault(case.rollout.node, Counter())[step] += 1

    def settle(self, key: RolloutKey) -> None:
        """It is done with, whatever came of it. The last one of a node is when its account is told."""
        case = self.cases.pop(key, None)
        if case is None:
            return
        del self._steps[key]
        node = case.rollout.node
        if any(other.rollout.node == node for other in self.cases.values()):
            return
        checked, failed = self._checked.pop(node, 0), self._failed.pop(node, Counter())
        _log.log(
            logging.WARNING if failed else logging.INFO,
            "of %d consumed rollouts of %s that were audited again, %d failed%s",
            checked, short(node), failed.total(), in_words(failed),
        )  # fmt: skip


def in_words(failed: Counter[int]) -> str:
    """Which steps took in how many; empty when none did."""
    if not failed:
        return ""
    return ": " + ", ".join(f"{failed[step]} in step {step}" for step in sorted(failed))
