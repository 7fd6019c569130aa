"""Which share of a batch each node may have now: standing, and who is at work (layer L7).

A node counts as at work while it holds leases or has lately delivered, and its last leases did not run out; it counts
with the speed that it has shown. So who only promises, or stops, is soon no reason to cap the others, and a cap can
delay a run but not stop it. Besides, what is to come to the auditor, for the throttle.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from rollmesh_learner.members.nodes import Node, Nodes
from rollmesh_learner.members.standing import audit_rate, is_steady
from rollmesh_learner.work.book import Book
from rollmesh_learner.work.caps import effective_nodes, share_of_batch
from rollmesh_learner.work.throttle import AuditLoad

LATELY_S: Final = 60.0
"""For so long after its last accepted result a node without leases is at work."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The nodes at work, and those that might be soon."""

    working: int = 0
    unknown: int = 0
    """Nodes that have delivered nothing yet, and do not rest."""
    typical_lease_s: float = 0.0
    """From lease to result, of the median node at work; 0 where there is none."""

    @property
    def sharers(self) -> int:
        """Nodes for which work is kept: all at work, and a quarter as many unknown ones, who may want none."""
        return self.working + min(self.unknown, max(1, self.working // 4) if self.working else self.unknown)


class Shares:
    """Asked for every lease and every batch; what it knows of others is at most a second old."""

    def __init__(self, nodes: Nodes, book: Book, *, cap: float, queue: int) -> None:
        self._nodes = nodes
        self._book = book
        self._cap = cap
        self._queue = queue
        self._share = 1.0
        self._pace = Pace()
        self._looked_at = -1.0

    def share_of(self, node: str, *, now: float) -> float:
        """The largest share of a batch that ``node`` may have."""
        if is_steady(self._nodes.record_of(node), self._nodes.rules):
            return 1.0
        self._look(now)
        return self._share

    def pace(self, *, now: float) -> Pace:
        """How the nodes at work are doing."""
        self._look(now)
        return self._pace

    def _look(self, now: float) -> None:
        if 0.0 <= now - self._looked_at < 1.0:
            return
        self._looked_at = now
        active = self._nodes.active(now)
        working = at_work(active, holders=self._held().keys(), now=now)
        self._share = share_of_batch(cap=self._cap, nodes=effective_nodes([node.samples_per_s for node in working]))
        self._pace = Pace(
            working=len(working),
            unknown=sum(1 for node in active if not node.samples_per_s and node.failures < 2),
            typical_lease_s=statistics.median(node.lease_s for node in working) if working else 0.0,
        )

    def load(self, *, now: float) -> AuditLoad:
        """What waits for the auditor, and what of nodes below full standing will.

        Leases count where their node has delivered before and let none run out since: who only holds leases must not
        keep the others from work. One that never delivered has one group at most.
        """
        rules = self._nodes.rules
        early = [n for n in self._nodes.all() if not n.record.is_quarantined and not is_steady(n.record, rules)]
        held = self._held()
        scoring = Counter(rollout.node for rollout in self._book.pending("scoring"))
        expected = 0.0
        for node in early:
            coming = held[node.peer] if node.samples_per_s > 0 and not node.failures else 0
            expected += audit_rate(node.record, rules) * (coming + scoring[node.peer])
        return AuditLoad(
            waiting=sum(1 for _ in self._book.pending("auditing")),
            expected=expected,
            most=self._queue,
            sharers=len({node.peer for node in early} & {node.peer for node in self._nodes.active(now)}),
        )

    def _held(self) -> Counter[str]:
        held: Counter[str] = Counter()
        for lease in self._book.leases.values():
            if lease.state == "open":
                held[lease.node] += len(lease.indices)
        return held


def at_work(nodes: list[Node], *, holders: Collection[str], now: float) -> list[Node]:
    """Those of ``nodes`` that are at work."""
    return [
        node
        for node in nodes
        if node.samples_per_s > 0
        and not node.failures
        and (node.peer in holders or (node.last_accepted_at is not None and now - node.last_accepted_at <= LATELY_S))
    ]
