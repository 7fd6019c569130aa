"""Are two curves the same within noise? The verdict of the curve, on figures alone. Pure.

A curve is cut into windows of 5 steps, and the last 10 steps are one more. In each, an arm has one mean for each seed.
Two arms agree in a window when

    |mean_a - mean_b| <= 2 * sqrt(v_a / n_a + v_b / n_b)

with v an arm's variance over its n seeds in that window (n - 1 in the denominator). Three seeds leave it two degrees of
freedom: among nine windows there are always some in which three seeds happen to lie together, and a standard error of
nothing. So v is never taken below the arm's own mean over all windows of 5 steps; ``own_error`` is the standard error
without that, and is reported beside it. The same rule must call the control different: lower in the last 10 steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, variance
from typing import Final

HONEST: Final = "honest"
CHEATS: Final = "cheats"
UNCHECKED: Final = "unchecked"
ARMS: Final = (HONEST, CHEATS, UNCHECKED)
WINDOW: Final = 5
LAST: Final = 10
ERRORS: Final = 2.0
LEARNT: Final = 0.2
"""By so much the honest arm must rise from the first window to the last steps, or nothing was learnt to be spoilt."""

Curve = Sequence[float | None]
"""One mean reward for each step; None where there is none."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Two arms in one window of steps, the last one included."""

    arm: str
    first: int
    last: int
    reward: float
    honest: float
    error: float | None
    """Standard error of the difference; None with fewer than two seeds in either arm."""
    own_error: float | None

    @property
    def difference(self) -> float:
        return self.reward - self.honest

    @property
    def is_within(self) -> bool | None:
        """Whether the arms agree; None where nobody can tell."""
        return None if self.error is None else abs(self.difference) <= ERRORS * self.error


def windows(steps: int) -> list[range]:
    """The windows of a run, and last its last steps."""
    return [*(range(at, min(at + WINDOW, steps)) for at in range(0, steps, WINDOW)), range(max(0, steps - LAST), steps)]


def mean_in(curve: Curve, window: range) -> float | None:
    """The mean over those steps of a window that have a value."""
    values = [value for value in curve[window.start : window.stop] if value is not None]
    return fmean(values) if values else None


def compare(arm: str, curves: Sequence[Curve], honest: Sequence[Curve], *, steps: int) -> list[Row]:
    """Each window of ``arm`` beside the honest arm; windows in which an arm has no value are left out."""
    floors = [_usual_variance(arms, steps=steps) for arms in (curves, honest)]
    rows = []
    for window in windows(steps):
        ours, theirs = (_means(arms, window) for arms in (curves, honest))
        if not ours or not theirs:
            continue
        rows.append(
            Row(
                arm=arm, first=window.start + 1, last=window.stop, reward=fmean(ours), honest=fmean(theirs),
                error=_error([ours, theirs], floors), own_error=_error([ours, theirs], [0.0, 0.0]),
            )
        )  # fmt: skip
    return rows


def judge(curves: Mapping[str, Sequence[Curve]], *, steps: int) -> tuple[list[Row], list[str]]:
    """All comparisons with the honest arm, and what is not as it must be, in words. Arms that are missing are a miss.

    ``curves`` has one curve for each seed, by arm.
    """
    misses = [f"no run of {arm}" for arm in ARMS if not curves.get(arm)]
    if not curves.get(HONEST):
        return [], misses
    rows = []
    for arm in (CHEATS, UNCHECKED):
        if curves.get(arm):
            rows += compare(arm, curves[arm], curves[HONEST], steps=steps)
    for row in rows:
        if row.error is None:
            misses.append(f"{row.arm}, steps {row.first} to {row.last}: too few seeds for a standard error")
        elif row.arm == CHEATS and not row.is_within:
            misses.append(f"cheats, steps {row.first} to {row.last}: {row.difference:+.3f} from the honest run")
    if curves.get(UNCHECKED) and not _is_spoilt([row for row in rows if row.arm == UNCHECKED]):
        misses.append("unchecked is not plainly worse in the last steps")
    return rows, misses + _unlearnt(curves[HONEST], steps=steps)


def as_json(row: Row) -> dict[str, object]:
    """Plain values, rounded to what three seeds can tell."""
    plain = asdict(row) | {"difference": row.difference, "is_within": row.is_within}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in plain.items()}


def _is_spoilt(rows: Sequence[Row]) -> bool:
    return bool(rows) and rows[-1].is_within is False and rows[-1].difference < 0


def _unlearnt(curves: Sequence[Curve], *, steps: int) -> list[str]:
    first, *_, last = (_means(curves, window) for window in windows(steps))
    gain = fmean(last) - fmean(first) if first and last else 0.0
    return [] if gain >= LEARNT else [f"the honest run learns too little to be spoilt: {gain:+.3f}"]


def _means(curves: Sequence[Curve], window: range) -> list[float]:
    return [mean for curve in curves if (mean := mean_in(curve, window)) is not None]


def _usual_variance(curves: Sequence[Curve], *, steps: int) -> float:
    """The mean over the windows of 5 steps of the variance over seeds; 0 where there is none."""
    found = [variance(means) for window in windows(steps)[:-1] if len(means := _means(curves, window)) > 1]
    return fmean(found) if found else 0.0


def _error(arms: Sequence[Sequence[float]], floors: Sequence[float]) -> float | None:
    if any(len(means) < 2 for means in arms):
        return None
    return math.sqrt(sum(max(variance(means), floor) / len(means) for means, floor in zip(arms, floors, strict=True)))
