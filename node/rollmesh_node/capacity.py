"""How much work a node asks for: what its engine takes side by side, and how fast it was seen to be. Pure values.

With n samples in flight a lease takes some ``cost_s * n`` seconds: exact for an engine that works on one sample after
the other or is full, an upper bound below that. So nothing is taken that could not be finished in time, and a first
measure with few samples in flight is only too careful, which the next one mends.

Not here: which leases there are (``decisions``). Times are seconds of the caller's monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from rollmesh_protocol import limits

AHEAD: Final = 1.5
"""Samples in hand as a multiple of the engine's capacity: what waits is there when a place becomes free."""
SAFE_SHARE: Final = 0.8
"""Share of a lease's duration into which its generation must fit by our own measure."""
SMOOTHING: Final = 0.3
"""Weight of the newest measure in a mean."""
RATE_S: Final = 2.0
"""Least time at work over which a rate is taken."""
FIRST_LEASE_S: Final = 10.0
"""Expected duration of a lease before any has been timed."""
_LEAST_S: Final = 1e-3
"""Below this a clock says nothing."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What the engine and its owner allow: samples side by side, groups in hand, and the run's group size."""

    batch_samples: int
    groups: int
    group_samples: int


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment in the life of the engine: when, and the sample-seconds in flight up to then."""

    at: float
    area: float


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The engine's speed as it was seen so far."""

    at: float | None = None
    area: float = 0.0
    """Samples in flight, integrated over time."""
    busy_s: float = 0.0
    """Time with work in flight since the last rate."""
    tokens: int = 0
    """Drawn in that time."""
    tokens_per_s: float = 0.0
    """Of the engine while it has work; 0 before it is known."""
    cost_s: float | None = None
    """Duration of a lease over the samples in flight meanwhile; None before the first."""

    def until(self, now: float, *, in_flight: int) -> Pace:
        """The pace at ``now``, when so many samples have been in flight since the last time."""
        passed = max(0.0, now - self.at) if self.at is not None else 0.0
        busy_s = self.busy_s + (passed if in_flight else 0.0)
        return replace(self, at=now, area=self.area + in_flight * passed, busy_s=busy_s)

    def drew(self, tokens: int) -> Pace:
        """So many more tokens were drawn. A rate is taken only when there are any: they may come in lumps."""
        drawn = replace(self, tokens=self.tokens + tokens)
        if not tokens or drawn.busy_s < RATE_S:
            return drawn
        rate = drawn.tokens / drawn.busy_s
        return replace(drawn, tokens=0, busy_s=0.0, tokens_per_s=_mean(self.tokens_per_s or None, rate))

    @property
    def mark(self) -> Mark:
        """Now, for a lease that enters the engine."""
        return Mark(at=self.at or 0.0, area=self.area)

    def made(self, since: Mark) -> Pace:
        """A lease that entered at ``since`` has just been made."""
        took_s = max((self.at or 0.0) - since.at, _LEAST_S)
        mean = max((self.area - since.area) / took_s, 1.0)
        return replace(self, cost_s=_mean(self.cost_s, took_s / mean))

    def expected_s(self, in_flight: int) -> float:
        """Duration of a lease while so many samples are in flight."""
        return FIRST_LEASE_S if self.cost_s is None else self.cost_s * max(1, in_flight)


def wanted_groups(capacity: Capacity, pace: Pace, *, in_hand: int, groups: int, duration_s: float) -> int:
    """Groups to ask for with ``in_hand`` samples (of ``groups`` groups) in the engine or waiting for it.

    Nothing until what is in hand is no more than the engine takes side by side; then up to :data:`AHEAD` times that,
    within what fits into the duration of a lease; always one group when there is nothing in hand.
    """
    if in_hand > capacity.batch_samples:
        return 0
    wanted = math.ceil((AHEAD * capacity.batch_samples - in_hand) / capacity.group_samples)
    if pace.cost_s:
        in_time = SAFE_SHARE * duration_s / pace.cost_s
        wanted = min(wanted, math.floor((in_time - in_hand) / capacity.group_samples))
    if not in_hand:
        wanted = max(1, wanted)
    return max(0, min(wanted, capacity.groups - groups, limits.MAX_GROUPS_PER_REQUEST))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
