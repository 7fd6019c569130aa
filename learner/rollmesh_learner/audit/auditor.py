"""The audit loop (layer L5): rollouts drawn for audit are recomputed under the exact weights that they name.

The recomputation happens in a child process; the verdict is pure (:mod:`rollmesh_protocol.verdicts.margins`). One that
several versions drew is recomputed piece by piece (:mod:`.pieces`), and judged as a whole. A rollout
drawn for audit is consumed only after it passed. A hard failure ends in quarantine: everything of that node which is
not consumed yet is void. A rollout that cannot be recomputed, whatever is wrong with it, is not used and holds up no
other: after a failure rollouts are audited one by one, and one that keeps failing is given up. When nothing else waits,
what was consumed of a node that is out is looked at again (:mod:`.reaudit`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import trio
from numpy.typing import NDArray

from rollmesh_learner.audit import pieces
from rollmesh_learner.audit.cases import Case
from rollmesh_learner.audit.claims import Claims
from rollmesh_learner.audit.margin_book import MarginBook, read_margins
from rollmesh_learner.audit.reaudit import Reaudits
from rollmesh_learner.members.discipline import Discipline
from rollmesh_learner.members.nodes import Nodes
from rollmesh_learner.records import rows
from rollmesh_learner.records.ledger import Ledger, Statement
from rollmesh_learner.work.book import Book
from rollmesh_learner.work.groups import RolloutKey, StoredRollout
from rollmesh_peer.children.failure import CLOSED, DIED, KILLED, LATE, START
from rollmesh_peer.children.frames import Body
from rollmesh_peer.children.supervisor import Supervisor
from rollmesh_peer.faults import fault_point
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.identity import short
from rollmesh_protocol.verdicts.margins import (
    AuditFigures,
    Thresholds,
    Verdict,
    count_margins,
    judge_rollout,
    judge_window,
    keep_recent,
)

_log = logging.getLogger("rollmesh.learner.audit")

_AUDIT_S: Final = 600.0
_MOST_AT_ONCE: Final = 64
_AGAIN_S: Final = 0.2
_MOST_TRIES: Final = 3
"""Failures of one rollout by itself after which it is given up: the child says that it cannot do it ..."""
_MOST_DEATHS: Final = 10
"""... or dies of it, which more often is somebody else's doing."""
MOST_SUSPECTS: Final = 32
"""Of one node that wait."""
_DEATHS: Final = frozenset({DIED, KILLED, LATE, START, CLOSED})


@dataclass(frozen=True)
class _Recomputed:
    """What the child found of one rollout: margins [t] and log-probabilities under the exact weights [t], nats."""

    case: Case
    margins: NDArray[np.float32]
    exact: NDArray[np.float32]


@dataclass(frozen=True)
class _Found:
    """What an audit found of one rollout, and what it means."""

    case: Case
    exact: NDArray[np.float32]
    figures: AuditFigures
    verdict: Verdict
    why: str


class Auditor:
    """Audits what is waiting, a batch of one root at a time. :meth:`wake` it when there may be something new."""

    def __init__(
        self,
        *,
        thresholds: Thresholds,
        book: Book,
        nodes: Nodes,
        ledger: Ledger,
        discipline: Discipline,
        child: Supervisor,
        image_of: Callable[[bytes], Path | None],
        margin_book: MarginBook | None = None,
        claims: Claims | None = None,
        reaudits: Reaudits | None = None,
        audited_tokens: int = 0,
    ) -> None:
        """Without a ``margin_book`` nodes are judged by ``thresholds`` alone."""
        self._thresholds = thresholds
        self._margin_book = margin_book
        self._book = book
        self._nodes = nodes
        self._ledger = ledger
        self._discipline = discipline
        self._child = child
        self._image_of = image_of
        self._work = trio.Event()
        self._suspects: dict[RolloutKey, Case] = {}
        self._claims = claims or Claims()
        self._failures: Counter[RolloutKey] = Counter()
        """By rollout, of the audits that it was part of since the last one that succeeded."""
        self.reaudits = reaudits or Reaudits(ledger, image_of=image_of, bad={})
        self.audited_tokens = audited_tokens
        """Prompt and completion tokens that were recomputed since the run began."""
        self.done = 0
        self.failed = 0
        self.waiting_for = ""

    def wake(self) -> None:
        """There may be new rollouts in state ``auditing``."""
        self._work.set()

    def suspect(self, rollout: StoredRollout, *, prompt: bytes) -> None:
        """Audit a rollout that was consumed already: its log-probabilities were further from ours than noise is.

        Of one node no more than MOST_SUSPECTS wait: who tells nothing but stories is found out by a few of them.
        """
        if sum(case.rollout.node == rollout.node for case in self._suspects.values()) < MOST_SUSPECTS:
            self._suspects[rollout.key] = Case(rollout, prompt)
            self.wake()

    def look_back(self, node: str) -> None:
        """``node`` is out of the run: its consumed work is audited again, and what fails is counted."""
        self.reaudits.look_back(node)
        self.wake()

    async def run(self, on_audited: Callable[[], None]) -> None:
        """Audit for ever; ``on_audited`` is called after each round."""
        while True:
            self._work = trio.Event()
            await self.reaudits.load()
            batch = self._next_batch()
            if not batch:
                if not await self.reaudits.reach_back():
                    await self._work.wait()
                continue
            try:
                await self._audit(batch)
            except ChildFailed as error:
                self.waiting_for = f"audits wait: {error.detail}"
                _log.warning("%s", self.waiting_for)
                await self._cope(batch, error)
                await trio.sleep(_AGAIN_S)
                continue
            self._settled(batch)
            self.waiting_for = ""
            on_audited()

    def _next_batch(self) -> list[Case]:
        """The oldest waiting rollouts that share their weights, so that those are loaded once; then the suspects.

        Consumed work of nodes that are out comes next, where its weights are at hand; what was part of a failure comes
        last, one by one.
        """
        prompts = self._book.groups
        waiting = [Case(r, prompts[r.group_id].prompt.prompt) for r in self._book.pending("auditing")]
        found = [*waiting, *self._suspects.values(), *self.reaudits.at_hand()]
        cases = [*{case.rollout.key: case for case in found}.values()]  # a suspect may be looked at again as well
        fresh = [case for case in cases if case.rollout.key not in self._failures]
        if not fresh:
            return cases[:1]
        return pieces.together(fresh, most=_MOST_AT_ONCE)

    async def _cope(self, batch: list[Case], error: ChildFailed) -> None:
        """The child failed at ``batch``: find out by itself which rollout is to blame, and give that one up."""
        most = _MOST_DEATHS if error.code in _DEATHS else _MOST_TRIES
        for case in batch:
            self._failures[case.rollout.key] += 1
        if len(batch) == 1 and self._failures[batch[0].rollout.key] >= most:
            await self._give_up(batch, why=error.detail)
            self._settled(batch)

    def _settled(self, batch: list[Case]) -> None:
        for case in batch:
            self._suspects.pop(case.rollout.key, None)
            self.reaudits.settle(case.rollout.key)
            self._failures.pop(case.rollout.key, None)
        kept = self._suspects.keys() | self.reaudits.cases.keys()
        for key in [key for key in self._failures if not self._book.rollout(key) and key not in kept]:
            del self._failures[key]  # void or stale meanwhile

    async def _audit(self, batch: list[Case]) -> None:
        kept = [case for case in batch if pieces.are_kept(case, self._image_of)]
        if len(kept) < len(batch):
            lost = [case for case in batch if not pieces.are_kept(case, self._image_of)]
            await self._give_up(lost, why="weights that drew them are no longer kept")
        if not kept:
            return
        outcomes = await self._recompute(kept)
        fault_point("audit.recomputed")
        read = [_read(case, pieces.joined(outcomes[case.rollout.key])) for case in kept]
        found = [self._judge(one) for one in read]
        # Those that failed first: no other work of their nodes may become ready meanwhile.
        for one in sorted(found, key=lambda one: one.verdict != "hard"):
            await self._decide(one)

    async def _recompute(self, cases: list[Case]) -> dict[RolloutKey, list[Body]]:
        """What the child finds of each rollout: one outcome for each piece, in order."""
        found: dict[RolloutKey, list[Body]] = {case.rollout.key: [] for case in cases}
        async with self._child.use() as child:
            for root, some in pieces.by_root(cases).items():
                image = self._image_of(root)
                if image is None:
                    raise ChildFailed("weights were let go of while rollouts were audited under others")
                rollouts = [piece.body(key) for key, piece in enumerate(some)]
                body: Body = {"image": str(image), "rollouts": rollouts}
                answer = await child.call("audit", body, deadline_s=_AUDIT_S)
                outcomes = answer["rollouts"]
                if not isinstance(outcomes, list | tuple) or len(outcomes) != len(some):
                    raise ChildFailed("the auditor answered with the wrong number of rollouts")
                for piece, outcome in zip(some, outcomes, strict=True):
                    found[piece.case.rollout.key].append(outcome)
        return found

    async def _decide(self, found: _Found) -> None:
        """What is written down and what follows, for one rollout that was recomputed."""
        rollout = found.case.rollout
        self.done += 1
        self.audited_tokens += found.case.num_tokens
        if rollout.key in self.reaudits.cases:
            await self._ledger.commit(_insert_audit(found))
            self.reaudits.judged(found.case, found.verdict)
            return
        statements = [_insert_audit(found), *self._put_record(rollout.node, passed=found.verdict == "pass")]
        if found.verdict == "hard":
            self.failed += 1
            _log.warning("audit of %s failed: %s", short(rollout.node), found.why)
            await self._discipline.offend(
                rollout.node, "result.sampling", detail=found.why, rollouts=1, along=statements
            )
            await self.reaudits.count_consumed(rollout.key)
            return
        await self._ledger.commit(*statements, *self._book.pass_audit(rollout.key, found.exact.tobytes()))
        if found.verdict == "soft":
            await self._discipline.offend(rollout.node, "result.drift", detail=found.why, rollouts=0)
        claimed = np.frombuffer(rollout.logprobs, dtype="<f4")
        if why := self._claims.add(rollout.node, claimed, exact=found.exact):
            await self._discipline.offend(rollout.node, "result.logprob", detail=why, rollouts=0)

    def _judge(self, recomputed: _Recomputed) -> _Found:
        """The verdict: on the rollout by itself; then, but for re-audits, on what its node was seen to do lately."""
        case, margins = recomputed.case, recomputed.margins
        rollout, book = case.rollout, self._margin_book
        node = self._nodes.get(rollout.node)
        limits = book.limits_of(node) if book is not None else self._thresholds
        figures = count_margins(margins, limits)
        verdict, why = judge_rollout(figures, limits)
        if rollout.key in self.reaudits.cases:
            return _Found(case, recomputed.exact, figures, verdict, why)
        if node is not None and verdict == "pass":
            node.recent_margins.append((figures.tokens, figures.over_low, figures.over_high))
            keep_recent(node.recent_margins, limits)
            verdict, why = judge_window(node.recent_margins, limits)
            if verdict == "soft":
                node.recent_margins.clear()
        # A suspect was chosen for being odd: the drift is judged on rollouts that chance chose.
        if book is not None and verdict != "hard" and rollout.key not in self._suspects:
            drift, because = book.add(rollout.node, margins, node=node)
            if drift == "hard" or verdict == "pass":
                verdict, why = drift, because
        return _Found(case, recomputed.exact, figures, verdict, why)

    def _put_record(self, peer: str, *, passed: bool) -> list[Statement]:
        record = self._nodes.record_of(peer).audit(passed=passed)
        self._nodes.set_record(peer, record)
        put = rows.put_node(peer, name=self._nodes.name_of(peer), record=record, wall_time=time.time())
        return [put] if self._margin_book is None else [put, self._margin_book.statement(peer)]

    async def _give_up(self, batch: list[Case], *, why: str) -> None:
        """Nobody can say whether the work is honest: it is not used."""
        _log.warning("%d rollouts cannot be audited: %s", len(batch), why)
        statements: list[Statement] = []
        for case in batch:
            if self._book.rollout(case.rollout.key) is not case.rollout:
                continue
            statements += self._book.give_up(case.rollout, "orphaned", now=trio.current_time())
        await self._ledger.commit(*statements)


def _read(case: Case, outcome: Body) -> _Recomputed:
    """What the child answered for one rollout. ``ChildFailed``: it does not fit."""
    exact = outcome["exact_logprobs"]
    if not isinstance(exact, bytes) or len(exact) != len(case.rollout.logprobs):
        raise ChildFailed("the auditor's log-probabilities do not fit the rollout")
    margins = read_margins(outcome["margins"], tokens=case.rollout.num_tokens)
    return _Recomputed(case, margins, np.frombuffer(exact, dtype="<f4"))


def _insert_audit(found: _Found) -> Statement:
    rollout, figures = found.case.rollout, found.figures
    return Statement(
        "INSERT OR REPLACE INTO audits (lease_id, sample, node, verdict, tokens, over_half, over_one, over_three,"
        " largest, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            rollout.lease_id, rollout.sample, rollout.node, found.verdict, figures.tokens, figures.over_low,
            figures.over_high, figures.over_any, figures.largest, time.time(),
        ),
    )  # fmt: skip
