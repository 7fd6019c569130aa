"""The nodes of a run as the learner knows them: who was admitted, how fast each is, and how it stands.

Speed is measured from accepted work alone, so what a node claims buys nothing: the allowance of samples that it may
hold is twice what it has shown it can deliver within one lease, starting at one group. Leases that run out shrink it
back towards that, and whoever lets one run out after the other, or gives them back late, gets nothing for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

from rollmesh_learner.members.standing import Record, StandingRules, as_message
from rollmesh_peer.mesh.rates import TokenBucket
from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import short
from rollmesh_protocol.messages import Hello, LeaseRequest, Standing

STRAYS_PER_S: Final = 0.5
STRAYS_BURST: Final = 64.0
"""Results for leases that the learner does not know which a node may hand in: each costs a look into the ledger, and an
honest node has them only after the learner went back to a checkpoint."""
MEMORY_S: Final = 120.0
"""Seconds of work after which what a node did before counts for a third of what it does now."""
LEAST_BUSY_S: Final = 1.0
"""No speed is measured over less: the results of one batch come all at once, and the first may be a lucky one."""
REST_FIRST_S: Final = 30.0
REST_MOST_S: Final = 3600.0
"""Pause before the next lease of a node whose leases ran out twice in a row; doubled each time, up to the second."""
ALLOWANCE_LEASES: Final = 2.0
"""Samples a node may hold, as a multiple of what it delivers within one lease's duration."""
DURATION_MARGIN: Final = 4.0
"""A lease stands this many times as long as its work should take: a game may start on the volunteer's PC."""
NEWCOMER_MARGIN: Final = 16.0
"""An unknown node's first leases stand this many times as long as the typical node takes for one."""
LEASE_WEIGHT: Final = 0.3
"""Of the newest lease in the mean of how long leases take."""


@dataclass
class Node:
    """One admitted node. Times are seconds of the learner's monotonic clock; None where it never happened."""

    peer: str
    hello: Hello
    record: Record
    last_seen: float
    block: str = ""
    """The block of addresses that it comes from (/24, /48); empty for loopback and names."""
    version_held: int = 0
    root_held: bytes | None = None
    waiting_for: str = ""
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    lease_s: float = 0.0
    """From a lease to its result: a mean in which the newest count most."""
    accepted_tokens: int = 0
    last_result_at: float = 0.0
    last_accepted_at: float | None = None
    moved_past: int = 0
    """The newest version for which it gave leases back because it had newer weights."""
    failures: int = 0
    """Times that leases ran out since a result was accepted."""
    failed_at: float = 0.0
    recent_margins: list[tuple[int, int, int]] = field(default_factory=list)
    """Of the last audited rollouts: (tokens, margins over 0.5, margins over 1)."""
    strays: TokenBucket | None = None
    _samples: float = 0.0
    _tokens: float = 0.0
    _busy_s: float = 0.0
    """What was accepted and the seconds that it took, the newest counting most."""

    @property
    def name(self) -> str:
        """What people call it."""
        return self.hello.name or short(self.peer)

    def heard(self, request: LeaseRequest, *, now: float) -> None:
        """A heartbeat or a request for work."""
        self.last_seen = now
        self.version_held = request.version_held
        self.root_held = request.root_held
        self.waiting_for = request.waiting_for

    def delivered(self, *, samples: int, tokens: int, issued_at: float, now: float) -> None:
        """``samples`` were accepted; the time they took runs from the lease or from the result before it."""
        took_s = max(0.0, now - max(issued_at, self.last_result_at))
        kept = math.exp(-took_s / MEMORY_S)
        self._busy_s = kept * self._busy_s + took_s
        self._samples = kept * self._samples + samples
        self._tokens = kept * self._tokens + tokens
        self._measure()
        lease_s = max(0.0, now - issued_at)
        self.lease_s += LEASE_WEIGHT * (lease_s - self.lease_s) if self.lease_s else lease_s
        self.accepted_tokens += tokens
        self.failures = 0
        self.last_result_at = now
        self.last_accepted_at = now
        self.last_seen = now

    def may_stray(self, *, now: float) -> bool:
        """Count a result for a lease that is not in the book; False when these are too many."""
        if self.strays is None:
            self.strays = TokenBucket(rate=STRAYS_PER_S, burst=STRAYS_BURST, now=now)
        return self.strays.take(now)

    def failed_to_return(self, *, now: float) -> None:
        """Leases ran out: the node gets less work. Those that run out at the same ``now`` count once."""
        if self.failures and self.failed_at == now:
            return
        self.failures += 1
        self.failed_at = now
        self._samples /= 2
        self._tokens /= 2
        self._measure()

    def allowance(self, *, duration_s: float, samples_per_group: int, now: float) -> int:
        """How many samples it may hold at a time; none while it rests."""
        if self.failures > 1:
            rest_s = min(REST_MOST_S, REST_FIRST_S * 2.0 ** min(self.failures - 2, 30))
            if now < self.failed_at + rest_s:
                return 0
        return max(samples_per_group, int(ALLOWANCE_LEASES * self.samples_per_s * duration_s))

    def lease_duration(self, *, tokens: int, least_s: float, most_s: float, typical_s: float = 0.0) -> float:
        """For how long an order of ``tokens`` more tokens stands, in seconds.

        An unknown node gets much more than ``typical_s``, what others take for a lease; the most where that is 0.
        """
        if not self.tokens_per_s:
            return min(most_s, max(least_s, NEWCOMER_MARGIN * typical_s)) if typical_s else most_s
        return min(most_s, max(least_s, DURATION_MARGIN * tokens / self.tokens_per_s))

    def _measure(self) -> None:
        busy_s = max(self._busy_s, LEAST_BUSY_S)
        self.samples_per_s = self._samples / busy_s
        self.tokens_per_s = self._tokens / busy_s


class Nodes:
    """Everyone who was admitted since the learner started, and the standing of everyone before."""

    def __init__(
        self,
        known: dict[str, Record],
        *,
        max_nodes: int,
        rules: StandingRules,
        margins: dict[str, list[tuple[int, int, int]]] | None = None,
    ) -> None:
        self._records = known
        self._margins = margins or {}
        """:attr:`Node.recent_margins` of those who are not here."""
        self._nodes: dict[str, Node] = {}
        self._max_nodes = max_nodes
        self.rules = rules

    def all(self) -> list[Node]:
        """Every node seen since the start, in order of arrival."""
        return list(self._nodes.values())

    def check_place(self, peer: str, *, now: float) -> None:
        """Refuse a peer for which there is no place: ``node.quarantined`` or ``run.full``."""
        record = self.record_of(peer)
        if record.is_quarantined:
            raise Refused("node.quarantined", f"this node is out of the run: {record.quarantined_for}")
        if peer not in self._nodes and len(self._nodes) >= self._max_nodes:
            self._forget_gone(now)
            if len(self._nodes) >= self._max_nodes:
                raise Refused("run.full")

    def admit(self, peer: str, hello: Hello, *, now: float) -> Node:
        """Take ``peer`` in, or refuse it as :meth:`check_place` does."""
        self.check_place(peer, now=now)
        node = self._nodes.get(peer)
        if node is None:
            node = self._nodes[peer] = Node(peer, hello, self.record_of(peer), last_seen=now)
            node.recent_margins = self._margins.pop(peer, [])
        node.hello = hello
        node.last_seen = now
        return node

    def admitted(self, peer: str) -> Node:
        """The node that ``peer`` is, or ``node.not_admitted`` or ``node.quarantined``."""
        node = self._nodes.get(peer)
        if node is None:
            raise Refused("node.not_admitted")
        if node.record.is_quarantined:
            raise Refused("node.quarantined", f"this node is out of the run: {node.record.quarantined_for}")
        return node

    def is_known(self, peer: str) -> bool:
        """True for everyone who was ever admitted."""
        return peer in self._nodes or peer in self._records

    def get(self, peer: str) -> Node | None:
        """The node that ``peer`` is, whatever its standing."""
        return self._nodes.get(peer)

    def is_admitted(self, peer: str) -> bool:
        """True for a node in the run."""
        node = self._nodes.get(peer)
        return node is not None and not node.record.is_quarantined

    def rank(self, peer: str) -> int:
        """Whose requests come first under a flood: 2 for nodes whose work was accepted, 1 for others in the run."""
        node = self._nodes.get(peer)
        if node is None or node.record.is_quarantined:
            return 0
        return 2 if node.record.accepted else 1

    def record_of(self, peer: str) -> Record:
        """The standing of ``peer``; an empty one for a stranger."""
        node = self._nodes.get(peer)
        return node.record if node else self._records.get(peer, Record())

    def name_of(self, peer: str) -> str:
        """What people call ``peer``."""
        node = self._nodes.get(peer)
        return node.name if node else short(peer)

    def standing_of(self, peer: str) -> Standing:
        """The standing of ``peer`` as others are shown it."""
        return as_message(self.record_of(peer), self.rules)

    def set_record(self, peer: str, record: Record) -> None:
        """The standing of ``peer`` changed."""
        self._records[peer] = record
        node = self._nodes.get(peer)
        if node:
            node.record = record

    def quarantined(self) -> list[str]:
        """Every peer that is out of the run."""
        return [peer for peer, record in self._records.items() if record.is_quarantined]

    def active(self, now: float) -> list[Node]:
        """Workers in the run that were heard of lately."""
        return [
            node
            for node in self._nodes.values()
            if node.hello.role == "worker"
            and not node.record.is_quarantined
            and now - node.last_seen < limits.DEAD_AFTER_S
        ]

    def online(self, now: float) -> dict[str, str]:
        """Names by peer of all who are in the run, workers and seeds, and were heard of lately."""
        return {
            node.peer: node.name
            for node in self._nodes.values()
            if not node.record.is_quarantined and now - node.last_seen < limits.DEAD_AFTER_S
        }

    def silent(self, now: float) -> list[Node]:
        """Nodes that were not heard of for so long that their leases go to others."""
        return [node for node in self._nodes.values() if now - node.last_seen >= limits.DEAD_AFTER_S]

    def _forget_gone(self, now: float) -> None:
        for node in self.silent(now):
            self._records[node.peer] = replace(node.record)
            self._margins[node.peer] = node.recent_margins
            del self._nodes[node.peer]
