"""What the recomputation of some rollouts found, in figures, and the learner's verdict on them. Pure.

Whether something is wrong is decided by the functions that the learner decides with (``rollmesh_protocol.verdicts``),
over whole rollouts in the order of their making. What it is: :mod:`.findings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollmesh_node.selfcheck.drifting import Drift, drift_of
from rollmesh_protocol.verdicts.judging import Judging
from rollmesh_protocol.verdicts.logprobs import mismatch
from rollmesh_protocol.verdicts.margins import (
    Thresholds,
    Verdict,
    count_margins,
    judge_rollout,
    judge_window,
    keep_recent,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Checked:
    """One rollout, recomputed twice. Arrays are float32 [tokens]; log-probabilities and margins in nats."""

    claimed: NDArray[np.float32]
    exact: NDArray[np.float32]
    again: NDArray[np.float32]
    """``exact`` a second time."""
    margins: NDArray[np.float32]
    ends_with_stop: bool


def joined(pieces: Sequence[Checked]) -> Checked:
    """The pieces of one rollout as one, in this order."""
    return Checked(
        claimed=np.concatenate([one.claimed for one in pieces]),
        exact=np.concatenate([one.exact for one in pieces]),
        again=np.concatenate([one.again for one in pieces]),
        margins=np.concatenate([one.margins for one in pieces]),
        ends_with_stop=pieces[-1].ends_with_stop,
    )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """How the tokens of some rollouts lie."""

    rollouts: int
    tokens: int
    exact_share: float
    largest_margin: float
    low_share: float
    high_share: float
    gap_median: float
    """Of the absolute differences between claimed and recomputed log-probabilities, nats."""
    gap_p99: float
    gap_largest: float
    shift: float
    """Their mean with sign, claimed - recomputed."""
    shift_spread: float
    """Their standard deviation."""
    far_rollouts: int
    """Rollouts whose log-probabilities the learner would have audited (layer L4)."""
    repeat_gap: float
    """The largest difference between two recomputations of the same token."""
    verdict: Verdict
    """By margins; the drift speaks for itself."""
    why: str
    drift: Drift | None
    """None where the run has no such test."""

    @property
    def is_drifting(self) -> bool:
        """True when the test for drift has found something, or will."""
        return self.drift is not None and self.drift.is_found


def figures_of(checked: Sequence[Checked], judging: Judging) -> Figures | None:
    """The figures of these rollouts, in the order of their making, and the learner's verdict; None of nothing."""
    if not checked:
        return None
    margins = np.concatenate([one.margins for one in checked])
    differences = np.concatenate([one.claimed.astype(np.float64) - one.exact for one in checked])
    gaps = np.abs(differences)
    thresholds = judging.thresholds
    verdict, why = _judge(checked, thresholds)
    return Figures(
        rollouts=len(checked),
        tokens=margins.size,
        exact_share=float((margins == 0).mean()),
        largest_margin=float(margins.max()),
        low_share=float((margins > thresholds.low_margin).mean()),
        high_share=float((margins > thresholds.high_margin).mean()),
        gap_median=float(np.median(gaps)),
        gap_p99=float(np.quantile(gaps, 0.99)),
        gap_largest=float(gaps.max()),
        shift=float(differences.mean()),
        shift_spread=float(differences.std()),
        far_rollouts=sum(
            mismatch(one.claimed, own=one.exact, limits=judging.logprobs).verdict == "audit" for one in checked
        ),
        repeat_gap=max(float(np.abs(one.exact - one.again).max()) for one in checked),
        verdict=verdict,
        why=why,
        drift=_drift(checked, judging),
    )


def is_odd(checked: Sequence[Checked], judging: Judging) -> bool:
    """True when it is worth asking which other sampler would explain these tokens."""
    margins = np.concatenate([one.margins for one in checked])
    if (margins > judging.thresholds.low_margin).mean() > judging.thresholds.low_share:
        return True
    drift = _drift(checked, judging)
    return drift is not None and drift.is_found


def _drift(checked: Sequence[Checked], judging: Judging) -> Drift | None:
    return drift_of([one.margins for one in checked], judging.drift) if judging.drift is not None else None


def _judge(checked: Sequence[Checked], thresholds: Thresholds) -> tuple[Verdict, str]:
    """The worst that the learner would have said, had it audited all of these."""
    recent: list[tuple[int, int, int]] = []
    worst: tuple[Verdict, str] = ("pass", "")
    for one in checked:
        figures = count_margins(one.margins, thresholds)
        verdict, why = judge_rollout(figures, thresholds)
        if verdict == "pass":
            recent.append((figures.tokens, figures.over_low, figures.over_high))
            keep_recent(recent, thresholds)
            verdict, why = judge_window(recent, thresholds)
        if verdict == "hard":
            return verdict, why
        if verdict == "soft":
            worst = verdict, why
    return worst
