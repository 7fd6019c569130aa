"""From the margins of honest rollouts to a calibration: pure, and the same for the command and for the bench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollmesh_learner.audit.calibration import CellFigures
from rollmesh_protocol.verdicts.drift import DriftTest, fit_drift
from rollmesh_protocol.verdicts.envelope import DELTA_TOKENS, delta_of, envelope_of, judged
from rollmesh_protocol.verdicts.margins import Thresholds

LEAST_DELTA: Final = 0.05
"""Nats. A machine that agrees with itself to the bit says nothing of others."""

Values = NDArray[np.float32]


@dataclass(kw_only=True)
class CellData:
    """The honest rollouts of one cell so far; one float32 array of its tokens' values for each."""

    dtype: str
    batch: int
    margins: list[Values] = field(default_factory=list)
    gaps: list[Values] = field(default_factory=list)
    exact: list[Values] = field(default_factory=list)
    """Log-probabilities under the exact weights."""
    prompt_tokens: int = 0

    def figures(self) -> CellFigures:
        """What a person may want to know of the cell."""
        margins, gaps = np.concatenate(self.margins), np.concatenate(self.gaps)
        return CellFigures(
            dtype=self.dtype,
            batch=self.batch,
            rollouts=len(self.margins),
            tokens=margins.size,
            prompt_tokens=self.prompt_tokens,
            nats_per_token=round(-float(np.concatenate(self.exact).mean()), 4),
            exact_share=round(float((margins == 0).mean()), 5),
            mean_margin=round(float(margins.mean()), 6),
            largest_margin=round(float(margins.max()), 4),
            gap_median=round(float(np.median(gaps)), 5),
            gap_p999=round(float(np.quantile(gaps, 0.999)), 5),
        )


@dataclass(frozen=True, kw_only=True)
class Derived:
    """What follows from honest work."""

    thresholds: Thresholds
    drift: DriftTest
    delta: float


def derive(cells: Sequence[CellData], *, rules: Thresholds, longest: int) -> Derived:
    """The envelope, the drift test and delta; the counts and the window are those of ``rules``."""
    gaps = [np.concatenate(cell.gaps) for cell in cells]
    return Derived(
        thresholds=envelope_of([np.concatenate(cell.margins) for cell in cells], rules=rules, longest=longest),
        drift=fit_drift([cell.margins for cell in cells]),
        delta=max(LEAST_DELTA, *map(delta_of, judged(gaps, least=DELTA_TOKENS))),
    )
