"""How a run judges sampling, in one value: what the learner writes into the run card, and a node reads out of it.

Invariant: what is read is what was written, so a node's own check decides as the learner would. Not here: the decisions
themselves (:mod:`.margins`, :mod:`.drift`, :mod:`.logprobs`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from rollmesh_protocol.messages import Checks, DriftCheck, LogprobChecks, MarginChecks
from rollmesh_protocol.verdicts.drift import DriftTest
from rollmesh_protocol.verdicts.logprobs import LogprobLimits
from rollmesh_protocol.verdicts.margins import Thresholds


@dataclass(frozen=True, kw_only=True)
class Judging:
    """The limits of one run. ``drift`` is None where it has no calibration."""

    thresholds: Thresholds = field(default_factory=Thresholds)
    drift: DriftTest | None = None
    logprobs: LogprobLimits = field(default_factory=LogprobLimits)

    @classmethod
    def read(cls, checks: Checks | None) -> Judging:
        """What a run card says; the defaults where it says nothing."""
        if checks is None:
            return cls()
        return cls(
            thresholds=Thresholds(**checks.margins.model_dump()),
            drift=DriftTest(**checks.drift.model_dump()) if checks.drift is not None else None,
            logprobs=LogprobLimits(**checks.logprobs.model_dump()),
        )

    @property
    def as_checks(self) -> Checks:
        """For a run card. Raises pydantic's ``ValidationError`` for limits that no run can have."""
        return Checks(
            margins=MarginChecks(**asdict(self.thresholds)),
            drift=DriftCheck(**asdict(self.drift)) if self.drift is not None else None,
            logprobs=LogprobChecks(**asdict(self.logprobs)),
        )

    @property
    def origin(self) -> str:
        """Where the limits come from, in words."""
        if self.drift is not None:
            return "this run's calibration"
        is_default = self == Judging()
        return "defaults: the run has no calibration" if is_default else "set for this run, which has no calibration"
