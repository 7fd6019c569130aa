"""The nodes of a run as the learner knows them: who was admitted, how fast each is, and how it stands.

Speed is measured from accepted work alone, so what a node claims buys nothing: the allowance of samples that it may
hold is twice what it has shown it can deliver within one lease, starting at one group.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from rollmesh_learner.standing import Record, StandingRules, as_message
from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import short
from rollmesh_protocol.messages import Hello, LeaseRequest, Standing

SMOOTHING: Final = 0.3
"""Weight of the newest measurement of a node's speed."""
ALLOWANCE_LEASES: Final = 2.0
"""Samples a node may hold, as a multiple of what it delivers within one lease's duration."""
DURATION_MARGIN: Final = 4.0
"""A lease stands this many times as long as its work should take: a game may start on the volunteer's PC."""


@dataclass
class Node:
    """One admitted node. Times are seconds of the learner's monotonic clock; None where it never happened."""

    peer: str
    hello: Hello
    record: Record
    last_seen: float
    version_held: int = 0
    root_held: bytes | None = None
    waiting_for: str = ""
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    accepted_tokens: int = 0
    last_result_at: float = 0.0
    last_accepted_at: float | None = None
    recent_margins: list[tuple[int, int, int]] = field(default_factory=list)
    """Of the last audited rollouts: (tokens, margins over 0.5, margins over 1)."""

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
        busy_s = max(now - max(issued_at, self.last_result_at), 1e-3)
        weight = SMOOTHING if self.samples_per_s else 1.0
        self.samples_per_s += weight * (samples / busy_s - self.samples_per_s)
        self.tokens_per_s += weight * (tokens / busy_s - self.tokens_per_s)
        self.accepted_tokens += tokens
        self.last_result_at = now
        self.last_accepted_at = now
        self.last_seen = now

    def failed_to_return(self) -> None:
        """A lease ran out: the node gets less work."""
        self.samples_per_s /= 2
        self.tokens_per_s /= 2

    def allowance(self, *, duration_s: float, samples_per_group: int) -> int:
        """How many samples it may hold at a time."""
        return max(samples_per_group, int(ALLOWANCE_LEASES * self.samples_per_s * duration_s))

    def lease_duration(self, *, tokens: int, least_s: float, most_s: float) -> float:
        """For how long an order of ``tokens`` more tokens stands, in seconds. An unknown node gets the most."""
        if not self.tokens_per_s:
            return most_s
        return min(most_s, max(least_s, DURATION_MARGIN * tokens / self.tokens_per_s))


class Nodes:
    """Everyone who was admitted since the learner started, and the standing of everyone before."""

    def __init__(self, known: dict[str, Record], *, max_nodes: int, rules: StandingRules) -> None:
        self._records = known
        self._nodes: dict[str, Node] = {}
        self._max_nodes = max_nodes
        self.rules = rules

    def all(self) -> list[Node]:
        """Every node seen since the start, in order of arrival."""
        return list(self._nodes.values())

    def admit(self, peer: str, hello: Hello, *, now: float) -> Node:
        """Take ``peer`` in, or refuse it: ``node.quarantined`` or ``run.full``."""
        record = self.record_of(peer)
        if record.is_quarantined:
            raise Refused("node.quarantined", f"this node is out of the run: {record.quarantined_for}")
        node = self._nodes.get(peer)
        if node is not None:
            node.hello = hello
            node.last_seen = now
            return node
        if len(self._nodes) >= self._max_nodes:
            self._forget_gone(now)
        if len(self._nodes) >= self._max_nodes:
            raise Refused("run.full")
        node = Node(peer, hello, record, last_seen=now)
        self._nodes[peer] = node
        return node

    def admitted(self, peer: str) -> Node:
        """The node that ``peer`` is, or ``node.not_admitted`` or ``node.quarantined``."""
        node = self._nodes.get(peer)
        if node is None:
            raise Refused("node.not_admitted")
        if node.record.is_quarantined:
            raise Refused("node.quarantined", f"this node is out of the run: {node.record.quarantined_for}")
        return node

    def get(self, peer: str) -> Node | None:
        """The node that ``peer`` is, whatever its standing."""
        return self._nodes.get(peer)

    def is_admitted(self, peer: str) -> bool:
        """True for a node in the run."""
        node = self._nodes.get(peer)
        return node is not None and not node.record.is_quarantined

    def record_of(self, peer: str) -> Record:
        """The standing of ``peer``; an empty one for a stranger."""
        node = self._nodes.get(peer)
        return node.record if node else self._records.get(peer, Record())

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

    def silent(self, now: float) -> list[Node]:
        """Nodes that were not heard of for so long that their leases go to others."""
        return [node for node in self._nodes.values() if now - node.last_seen >= limits.DEAD_AFTER_S]

    def _forget_gone(self, now: float) -> None:
        for node in self.silent(now):
            self._records[node.peer] = replace(node.record)
            del self._nodes[node.peer]
