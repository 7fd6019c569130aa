"""Tells a hung engine from a slow one: by whether its numbers move, never by how long a piece of work takes. Pure.

An engine that has work in flight sends beats with the tokens and steps it has made. It is hung when neither has moved
for a bound that grows with the longest pause that this engine has come back from, so that a slow machine is never
taken for a stuck one. The first movement after a start has a longer grace: kernels are compiled and graphs captured.
An engine without work is never hung. Times are seconds of the caller's monotonic clock.
"""

from __future__ import annotations

import math
from typing import Final

HUNG_S: Final = 120.0
"""Without a token or a step: a prefill of 32,000 tokens takes less on any GPU, a step of 64 rows on any CPU."""
COLD_S: Final = 900.0
"""The same before the first movement: vLLM compiles and captures for minutes, and longer on a cold disk."""
PATIENCE: Final = 5.0
"""The bound is at least so many times the longest pause that this engine has come back from."""


class Progress:
    """One engine process, from its start to its end."""

    def __init__(self, now: float, *, hung_s: float = HUNG_S, cold_s: float = COLD_S) -> None:
        self._hung_s = hung_s
        self._cold_s = cold_s
        self._moved_at = now
        self._longest_s = 0.0
        self._numbers = 0, 0
        self._is_warm = False
        self._is_busy = False

    def given(self, now: float) -> None:
        """Work was given to the engine: from now on it has to move."""
        if not self._is_busy:
            self._is_busy, self._moved_at = True, now

    def heard(self, now: float, *, in_flight: int, tokens: int, steps: int) -> None:
        """A beat: samples in flight, and totals since the process began."""
        numbers = tokens, steps
        if numbers != self._numbers:
            self.moved(now)
        self._numbers = numbers
        if not in_flight:
            self.rested()
        else:
            self.given(now)

    def moved(self, now: float) -> None:
        """Something came of the work, a finished rollout for instance."""
        if self._is_busy:
            if self._is_warm:
                self._longest_s = max(self._longest_s, now - self._moved_at)
            self._is_warm = True
        self._moved_at = now

    def rested(self) -> None:
        """The engine has no work, or is not asked to work: a swap, the end of a stream."""
        self._is_busy = False

    @property
    def bound_s(self) -> float:
        """How long it may stand still now."""
        return max(self._hung_s, PATIENCE * self._longest_s) if self._is_warm else self._cold_s

    @property
    def due(self) -> float:
        """When it is hung if nothing moves until then."""
        return self._moved_at + self.bound_s if self._is_busy else math.inf

    def words(self, now: float) -> str:
        """Continues the sentence "the engine process ..."."""
        return f"hung: no progress for {now - self._moved_at:.0f} s"
