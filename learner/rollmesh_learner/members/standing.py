"""A node's record and what follows from it (layer L6): a table of named offences and a pure state machine.

A node is new until some of its rollouts have passed an audit, then on probation until more have, then in full
standing; each state has its own audit rate. No good record offsets a hard offence: it ends in quarantine. A soft one
halves the record, so that the node is audited more again, and several in a row without anything accepted between them
end in quarantine too.

Time: what soft offences weigh towards quarantine fades with a half-life, and a good record is worth less once nothing
was accepted of its node for long: whoever has the key then may be somebody else. Quarantine never fades. Times are
seconds of the wall clock, so that they outlive the process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from rollmesh_protocol import messages

State = Literal["new", "probation", "full", "quarantined"]
Severity = Literal["none", "soft", "hard"]

SOFT_IN_A_ROW: Final = 8
"""Refused results without one accepted between them, after which a node is out: a broken node wastes leases too."""
DRIFT: Final = "result.drift"
DRIFTS_OUT: Final = 3
"""Windows of audited tokens that lay outside honest noise, after which a node is out, whatever was accepted between
them: who cheats a little hands in nothing that is refused."""
_ROUNDING: Final = 0.5
"""Offences within an hour or two of each other have faded a little: eight of them are still eight."""

OFFENCES: Final[dict[str, Severity]] = {
    "lease.reused": "hard",
    "result.sampling": "hard",
    DRIFT: "soft",
    "result.schema": "soft",
    "result.signature": "soft",
    "result.prompt": "soft",
    "result.samples": "soft",
    "result.length": "soft",
    "result.finish": "soft",
    "result.tokens": "soft",
    "result.logprob": "soft",
    "result.root": "soft",
    "lease.other_node": "soft",
    "lease.unknown": "none",
    "lease.expired": "none",
    "result.stale": "none",
}
"""What each refused result says about its sender. Late work is no offence; a second answer to one lease is."""


@dataclass(frozen=True, kw_only=True)
class StandingRules:
    """Where the states begin, in rollouts that passed an audit, and the share that is audited in each."""

    new_rollouts: int
    probation_rollouts: int
    rate_new: float
    rate_probation: float
    rate_steady: float
    soft_half_life_s: float = 86_400.0
    """After so long a soft offence weighs half as much towards quarantine."""
    away_s: float = 7 * 86_400.0
    """A node of which nothing was accepted for longer is on probation again."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One node's history in numbers. ``passed`` counts rollouts that passed an audit, halved by soft offences."""

    accepted: int = 0
    rejected: int = 0
    audited: int = 0
    passed: int = 0
    soft_in_a_row: float = 0.0
    """Soft offences since a result was accepted, each worth less the longer ago it was; as of ``soft_at``."""
    soft_at: float = 0.0
    drifts: float = 0.0
    """Times that its margins drifted, fading alike; accepted work does not clear them."""
    worked_at: float = 0.0
    """When a result was last accepted; 0 where it is not known."""
    quarantined_for: str = ""

    @property
    def is_quarantined(self) -> bool:
        """True for a node that is out of the run."""
        return bool(self.quarantined_for)

    def accept(self, rollouts: int, *, now: float = 0.0) -> Record:
        """After ``rollouts`` more were accepted at ``now``."""
        return replace(self, accepted=self.accepted + rollouts, soft_in_a_row=0.0, worked_at=max(now, self.worked_at))

    def audit(self, *, passed: bool) -> Record:
        """After one more rollout was audited."""
        return replace(self, audited=self.audited + 1, passed=self.passed + int(passed))

    def offend(
        self, code: str, *, rollouts: int, detail: str = "", now: float = 0.0, half_life_s: float = math.inf
    ) -> Record:
        """After ``rollouts`` were refused with ``code`` at ``now``."""
        severity = OFFENCES.get(code, "soft")
        worse = replace(self, rejected=self.rejected + rollouts)
        if severity == "none":
            return worse
        faded = 0.5 ** (max(0.0, now - self.soft_at) / half_life_s)
        in_a_row = faded * self.soft_in_a_row + 1
        drifts = faded * self.drifts + (code == DRIFT)
        worse = replace(
            worse, passed=self.passed // 2, soft_in_a_row=in_a_row, drifts=drifts, soft_at=max(now, self.soft_at)
        )
        if severity == "hard" or in_a_row > SOFT_IN_A_ROW - _ROUNDING or drifts > DRIFTS_OUT - _ROUNDING:
            reason = f"{code}: {detail}" if detail else code
            return replace(worse, quarantined_for=self.quarantined_for or reason[:500])
        return worse


def state_of(record: Record, rules: StandingRules) -> State:
    """Where the record puts a node."""
    if record.is_quarantined:
        return "quarantined"
    if record.passed < rules.new_rollouts:
        return "new"
    return "probation" if record.passed < rules.probation_rollouts else "full"


def after_absence(record: Record, rules: StandingRules, *, now: float) -> Record:
    """The record of a node that is heard of at ``now``: after a long absence, full standing has to be earned again."""
    if not record.worked_at or now - record.worked_at <= rules.away_s:
        return record
    return replace(record, passed=min(record.passed, rules.new_rollouts), worked_at=now)


def is_steady(record: Record, rules: StandingRules) -> bool:
    """True in full standing: no cap, no throttle, and few audits."""
    return state_of(record, rules) == "full"


def audit_rate(record: Record, rules: StandingRules) -> float:
    """The share of a node's rollouts to audit."""
    rates = {"new": rules.rate_new, "probation": rules.rate_probation, "full": rules.rate_steady, "quarantined": 1.0}
    return rates[state_of(record, rules)]


def as_message(record: Record, rules: StandingRules) -> messages.Standing:
    """What the node and ``status`` are shown."""
    return messages.Standing(
        state=state_of(record, rules),
        accepted=record.accepted,
        rejected=record.rejected,
        audited=record.audited,
        reason=record.quarantined_for,
    )
