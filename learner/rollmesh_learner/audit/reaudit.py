"""Consumed work of a node that turned out to cheat: audited after the fact, to know what training took in.

Nothing is undone here, and no standing changes: the node is out already. What fails is counted by the step that
consumed it, in the ledger too (a row of ``audits`` with the verdict ``hard`` whose rollout was consumed). First comes
what was drawn by weights in memory, the newest first; then older versions, the oldest first because its patches are
the next to be deleted: the image of each is made again once (:mod:`rollmesh_learner.publishing.archive`), for all
rollouts that need it. Work of steps that a rollback has undone is void and is left out; so is a step that is undone
while its work waits here.

Every rollout is accounted for: what cannot be looked at again is counted with the reason, and told when the last of its
node is done with. That is: weights that are gone, damaged, or without room; rollouts of several versions, of which more
than one is no longer in memory; all but the :data:`MOST` newest of a node; and those at which the auditor fails.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rollmesh_learner.audit.cases import Case
from rollmesh_learner.audit.pieces import are_kept, roots_of
from rollmesh_learner.publishing.archive import GONE, NO_ROOM, Archive
from rollmesh_learner.records.audits import consuming_step, num_unaudited_consumed, unaudited_consumed
from rollmesh_learner.records.ledger import Ledger
from rollmesh_learner.work.groups import RolloutKey
from rollmesh_protocol.identity import short
from rollmesh_protocol.verdicts.margins import Verdict

_log = logging.getLogger("rollmesh.learner.audit")

MOST: Final = 512
"""Rollouts of one node that are looked at again."""
SEVERAL: Final = "several versions drew them, of which more than one is no longer in memory"
OLDEST: Final = f"only the newest {MOST} are looked at"
FAILED: Final = "the auditor fails at them"


@dataclass
class _Account:
    """What became of the consumed work of one node, so far."""

    waiting: int = 0
    checked: int = 0
    failed: Counter[int] = field(default_factory=Counter)
    """By step."""
    left_out: Counter[str] = field(default_factory=Counter)
    """By reason."""


class Reaudits:
    """What of consumed work waits to be looked at again, and what was found. ``bad`` goes on from the ledger's.

    ``image_of`` tells what is in memory, the one image of the ``archive`` included. Without an archive older versions
    are out of reach.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        image_of: Callable[[bytes], Path | None],
        bad: dict[int, int],
        archive: Archive | None = None,
    ) -> None:
        self._ledger = ledger
        self._image_of = image_of
        self._archive = archive
        self._wanted: list[str] = []
        self._steps: dict[RolloutKey, int] = {}
        """Of those that are neither judged nor left out."""
        self._accounts: dict[str, _Account] = {}
        self.cases: dict[RolloutKey, Case] = {}
        """Those that wait, the newest of each node first."""
        self.bad: Counter[int] = Counter(bad)
        """Step -> rollouts that it consumed and that failed."""
        self.left_out = 0
        """Rollouts that could not be looked at again, since the learner started."""

    def look_back(self, node: str) -> None:
        """``node`` was put out of the run: its consumed work is to be looked at."""
        self._wanted.append(node)

    def undo(self, step: int) -> None:
        """The steps from ``step`` on are undone: what they consumed counts no more."""
        for key in [key for key, consumed in self._steps.items() if consumed >= step]:
            del self._steps[key]
        for undone in [undone for undone in self.bad if undone >= step]:
            del self.bad[undone]

    async def load(self) -> None:
        """Put the consumed work of the nodes asked for into :attr:`cases`. Call it while none of them is audited."""
        for key in self.cases.keys() - self._steps.keys():  # judged in a batch that failed, or undone
            self.settle(key)
        while self._wanted:
            await self._load(self._wanted[0])
            self._wanted.pop(0)
        older = self._archive.root if self._archive is not None else None
        if older is not None and not any(older in roots_of(case) for case in self.at_hand()):
            assert self._archive is not None
            await self._archive.clear()

    def at_hand(self) -> list[Case]:
        """Those whose weights are in memory."""
        return [case for case in self.cases.values() if are_kept(case, self._image_of)]

    async def reach_back(self) -> bool:
        """Nothing is at hand: put the oldest weights that are wanted into memory, or learn why that cannot be.

        One attempt at one image. False when nothing waits any more.
        """
        wanted = self._by_lacking_version()
        if not wanted:
            return False
        version, root = oldest = min(wanted)
        _log.info("the weights of version %d are made again for %d consumed rollouts", version, len(wanted[oldest]))
        why = await self._archive.make(root) if self._archive is not None else GONE
        if why == NO_ROOM:  # for none of them
            self._leave_out([case for cases in wanted.values() for case in cases], why)
        elif why:
            self._leave_out(wanted[oldest], why)
        return True

    async def count_consumed(self, key: RolloutKey) -> None:
        """A rollout failed; where a step has consumed it, count it with that step."""
        step = await consuming_step(self._ledger, key)
        if step is not None:
            self.bad[step] += 1
            _log.warning("a rollout that failed was consumed by step %d", step)

    def judged(self, case: Case, verdict: Verdict) -> None:
        """The verdict on one of them."""
        step = self._steps.pop(case.rollout.key, None)
        if step is None:  # undone while it was audited
            return
        account = self._accounts[case.rollout.node]
        account.checked += 1
        if verdict == "hard":
            self.bad[step] += 1
            account.failed[step] += 1

    def settle(self, key: RolloutKey) -> None:
        """It is done with, whatever came of it. The last one of a node is when its account is told."""
        case = self.cases.pop(key, None)
        if case is None:
            return
        node = case.rollout.node
        account = self._accounts[node]
        if self._steps.pop(key, None) is not None:
            self._count_left_out(account, FAILED)
        account.waiting -= 1
        if not account.waiting:
            _tell(node, self._accounts.pop(node))

    async def _load(self, node: str) -> None:
        found = await unaudited_consumed(self._ledger, node, most=MOST)
        beyond = await num_unaudited_consumed(self._ledger, node) - len(found)
        fresh = [each for each in found if each[0].key not in self.cases]
        if not fresh:
            return
        account = self._accounts.setdefault(node, _Account())
        for rollout, prompt, step in fresh:
            self.cases[rollout.key] = Case(rollout, prompt)
            self._steps[rollout.key] = step
        account.waiting += len(fresh)
        if beyond > 0:
            self._count_left_out(account, OLDEST, count=beyond)

    def _by_lacking_version(self) -> dict[tuple[int, bytes], list[Case]]:
        """Those that wait, by number and root of the one version that is not in memory. Others are left out."""
        wanted: dict[tuple[int, bytes], list[Case]] = {}
        several = []
        for case in self.cases.values():
            lacking = {part.root: part.version for part in case.rollout.stretches if self._image_of(part.root) is None}
            if len(lacking) == 1:
                ((root, version),) = lacking.items()
                wanted.setdefault((version, root), []).append(case)
            elif lacking:
                several.append(case)
        self._leave_out(several, SEVERAL)
        return wanted

    def _leave_out(self, cases: list[Case], why: str) -> None:
        for case in cases:
            if self._steps.pop(case.rollout.key, None) is not None:  # else it was undone meanwhile
                self._count_left_out(self._accounts[case.rollout.node], why)
            self.settle(case.rollout.key)

    def _count_left_out(self, account: _Account, why: str, *, count: int = 1) -> None:
        account.left_out[why] += count
        self.left_out += count


def _tell(node: str, account: _Account) -> None:
    if not account.checked and not account.left_out:  # all of it was undone
        return
    _log.log(
        logging.WARNING if account.failed or account.left_out else logging.INFO,
        "of %d consumed rollouts of %s that were audited again, %d failed%s%s",
        account.checked, short(node), account.failed.total(), in_words(account.failed), _unseen(account.left_out),
    )  # fmt: skip


def in_words(failed: Counter[int]) -> str:
    """Which steps took in how many; empty when none did."""
    if not failed:
        return ""
    return ": " + ", ".join(f"{failed[step]} in step {step}" for step in sorted(failed))


def _unseen(left_out: Counter[str]) -> str:
    """How many could not be audited again, and why; empty when all were."""
    if not left_out:
        return ""
    reasons = ", ".join(f"{count} as {why}" for why, count in sorted(left_out.items()))
    return f"; {left_out.total()} could not be: {reasons}"
