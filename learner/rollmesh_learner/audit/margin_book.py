"""What is remembered of each node's margins beyond one rollout: the score of its drift, and counts for its class.

Only a calibrated run has one (see :mod:`.calibration`). The first alarm of a node's drift is a soft
offence, for the engine may be one that nobody has measured; the second is a hard one.

Invariants: what is remembered of a node is written down with each audit and read at the start, so a restart of the
learner forgives nothing; a node's limits are the run's envelope, tightened by what unrelated nodes of the class that it
declares were seen to hold: no declaration loosens anything.

Not here: the formulas (:mod:`rollmesh_protocol.verdicts`), and what follows from a verdict (:mod:`.auditor`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollmesh_learner.members.nodes import Node
from rollmesh_learner.records import rows
from rollmesh_learner.records.ledger import Ledger, Statement, blob
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.messages import EngineInfo
from rollmesh_protocol.verdicts import envelope
from rollmesh_protocol.verdicts.drift import DriftState, DriftTest, advance
from rollmesh_protocol.verdicts.margins import Thresholds, Verdict

ALARMS_ALLOWED: Final = 1
CLASS_EVERY: Final = 64
"""Audits of a class between two times that its thresholds are derived."""
_PREFIX: Final = "margins/"


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """One node. ``origin`` is its block of addresses, empty where that is not known; nodes of one origin are related.

    Counts begin anew when the declared engine changes; the drift's score does not.
    """

    drift: DriftState = field(default_factory=DriftState)
    kind: str = ""
    origin: str = ""
    counts: envelope.Counts = envelope.NO_COUNTS

    def encode(self) -> bytes:
        """For the ledger."""
        drift = [self.drift.score, self.drift.tokens, self.drift.alarms]
        return json.dumps({"drift": drift, "kind": self.kind, "origin": self.origin, "counts": self.counts}).encode()

    @classmethod
    def decode(cls, text: bytes) -> Remembered:
        """What :meth:`encode` wrote."""
        fields = json.loads(text)
        score, tokens, alarms = fields["drift"]
        return cls(
            drift=DriftState(score=score, tokens=tokens, alarms=alarms),
            kind=fields["kind"],
            origin=fields["origin"],
            counts=tuple(fields["counts"]),
        )


class MarginBook:
    """The memory of all nodes of a run; ``longest`` is the run's longest completion, in tokens."""

    def __init__(
        self, drift: DriftTest, *, thresholds: Thresholds, longest: int, known: Mapping[str, Remembered] | None = None
    ) -> None:
        self._drift = drift
        self._envelope = thresholds
        self._longest = longest
        self._nodes = dict(known or {})
        self._classes: dict[str, Thresholds] = {}
        self._since: dict[str, int] = {}
        for kind in {node.kind for node in self._nodes.values()}:
            self._learn(kind)

    def limits_of(self, node: Node | None) -> Thresholds:
        """Where honest noise ends for this node: the envelope, or what its class was seen to hold inside it."""
        kind = class_of(node.hello.engine) if node is not None else ""
        return envelope.tighten(self._envelope, self._classes.get(kind, self._envelope))

    def add(self, peer: str, margins: NDArray[np.float32], *, node: Node | None) -> tuple[Verdict, str]:
        """One more audited rollout, which passed by itself: the verdict on the node's drift, and why."""
        known = self._nodes.get(peer, Remembered())
        kind = class_of(node.hello.engine) if node is not None else known.kind
        counts = envelope.NO_COUNTS if kind != known.kind else known.counts
        before = known.drift
        drift, is_alarm = advance(before, margins, self._drift)
        self._nodes[peer] = replace(
            known,
            drift=drift,
            kind=kind,
            origin=node.block if node is not None else known.origin,
            counts=envelope.count(counts, margins),
        )
        self._since[kind] = self._since.get(kind, 0) + 1
        if self._since[kind] >= CLASS_EVERY:
            self._learn(kind)
        if not is_alarm:
            return "pass", ""
        tokens = before.tokens + len(margins)
        why = f"its margins have drifted above those of honest work, over {tokens} audited tokens"
        return ("soft" if drift.alarms <= ALARMS_ALLOWED else "hard"), why

    def statement(self, peer: str) -> Statement:
        """Write down what is remembered of ``peer``."""
        return rows.put_meta(_PREFIX + peer, self._nodes.get(peer, Remembered()).encode())

    def _learn(self, kind: str) -> None:
        self._since[kind] = 0
        members = {p: (node.origin, node.counts) for p, node in self._nodes.items() if node.kind == kind}
        learned = envelope.learn_class(members, envelope=self._envelope, longest=self._longest) if kind else None
        if learned is None:
            self._classes.pop(kind, None)
        else:
            self._classes[kind] = learned


async def load_remembered(ledger: Ledger) -> dict[str, Remembered]:
    """What the ledger knows of every node, by peer."""
    found = await ledger.fetch("SELECT name, value FROM meta WHERE name GLOB ?", _PREFIX + "*")
    return {str(name).removeprefix(_PREFIX): Remembered.decode(blob(value)) for name, value in found}


def class_of(engine: EngineInfo | None) -> str:
    """The class that a node declares; empty where it has no engine."""
    return f"{engine.backend} {engine.dtype} on {engine.device}" if engine is not None else ""


def read_margins(value: object, *, tokens: int) -> NDArray[np.float32]:
    """The margins of one rollout in an auditor's answer (float32, little-endian)."""
    if not isinstance(value, bytes) or len(value) != 4 * tokens:
        raise ChildFailed("the auditor's margins do not fit the rollout")
    return np.frombuffer(value, dtype="<f4")
