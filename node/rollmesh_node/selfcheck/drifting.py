"""A node's own work under the run's sequential test for drift: what it has found, and what it will find. Pure.

The alarm is the learner's (:func:`~rollmesh_protocol.verdicts.drift.advance`, over whole rollouts in order, from a
score of 0). Before it: ``evidence``, the sum of all rollouts' parts, never set back to 0. Of honest rollouts exp of
each part has a mean of at most 1, so exp(evidence) has too, and by Markov's inequality an honest node comes to
:data:`SURE` with a probability of exp(-SURE) at most. That holds for tasks as those of the calibration; on prompts
without a meaning honest margins were no larger (SmolLM2: 0.0020 nats a token, and 0.0016 to 0.0022 on its tasks).

Not here: what the drift comes from (:mod:`.findings`, :mod:`.advice`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollmesh_protocol.verdicts.drift import RATIO, DriftState, DriftTest, advance, excess

SURE: Final = math.log(1000)
"""A selfcheck of an honest node speaks of a drift once in a thousand times at most, for each kind of work."""

FAR_TOKENS: Final = 1e9
"""No node has so many audited tokens in its life."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """What the test makes of some rollouts. ``mean``, ``honest`` and ``reference``: nats a token, margins clipped."""

    tokens: int
    mean: float
    honest: float
    """The worst that the run's calibration saw of honest work."""
    reference: float
    score: float
    """The highest that it came to."""
    alarm: float
    alarms: int
    evidence: float
    tokens_to_alarm: int | None
    """That such work takes on average; None where it never comes to one."""

    @property
    def is_found(self) -> bool:
        """True when the learner would have raised the alarm, or will for all that can be told."""
        return self.alarms > 0 or self.evidence >= SURE

    @property
    def words(self) -> str:
        """The drift, as a part of a sentence."""
        lies = f"its tokens lie on average {self.mean:.2g} nats from what the run's weights choose, "
        lies += f"those of honest nodes {self.honest:.2g} at most"
        if self.tokens_to_alarm is not None:
            soon = f"after some {self.tokens_to_alarm:,} audited tokens the learner sees a drift"
            return f"{lies}: {soon}, and at the second one it puts the node out"
        return f"{lies}: over a part of these tokens the learner would have seen a drift"

    @property
    def figures(self) -> str:
        """The same in figures."""
        alarms = f", {self.alarms} alarms" if self.alarms > 1 else ", alarm" if self.alarms else ""
        return (
            f"{self.mean:.2g} nats a token, of honest nodes at most {self.honest:.2g}; "
            f"score {self.score:.1f} of {self.alarm:.1f}{alarms}"
        )


def drift_of(margins: Sequence[NDArray[np.float32]], test: DriftTest) -> Drift:
    """``margins``: [tokens] of each rollout, in order; at least one rollout."""
    state, score = DriftState(), 0.0
    for one in margins:
        state, is_alarm = advance(state, one, test)
        score = test.alarm if is_alarm else max(score, state.score)
    tokens = sum(map(len, margins))
    beyond = sum(excess(one, clip=test.clip, reference=test.reference) for one in margins)
    rate = test.exponent * beyond / tokens
    needed = test.alarm / rate if rate > 0 else math.inf
    return Drift(
        tokens=tokens,
        mean=beyond / tokens + test.reference,
        honest=test.reference / RATIO,
        reference=test.reference,
        score=score,
        alarm=test.alarm,
        alarms=state.alarms,
        evidence=test.exponent * beyond,
        tokens_to_alarm=math.ceil(needed) if needed < FAR_TOKENS else None,
    )
