"""A sequential test for what no single rollout shows: weights that are almost the right ones. Pure numpy.

Each audited rollout of n tokens adds ``x = exponent * (sum of min(margin, clip) - reference * n)`` to a node's score,
which starts at 0 and never falls below it (CUSUM: E. S. Page, Biometrika 41, 1954); at ``alarm`` the node's margins
have drifted, and the score starts again.

Why it holds its rate: ``exponent`` is the largest theta for which honest rollouts have E[exp(x)] <= 1, as far as their
own scores tell (sample mean and its standard error, one side 95 %; an extra rollout with one clipped token; each cell
by itself). Then exp(x) is an e-value, and from any start the product of them ever reaches exp(alarm) with probability
exp(-alarm) at most (J. Ville 1939; the Lundberg inequality of the walk). A score of ``alarm`` means that some start
among N rollouts did, so P(false alarm within N rollouts) <= N exp(-alarm) (G. Lorden, Ann. Math. Stat. 42, 1971;
e-detectors: Shin, Ramdas and Rinaldo, 2023). ``alarm`` = log(N / rate). Whole rollouts are added, so tokens
of one rollout may depend on each other in any way; rollouts must not.

Invariant: the score of a node is a function of the rollouts audited since it last was 0, whatever was restarted
meanwhile: :class:`DriftState` is all there is to keep. Not here: what follows from an alarm (the learner's audit).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollmesh_protocol.verdicts.envelope import (
    CELL_TOKENS,
    CONFIDENCE_Z,
    HARD_RULES,
    LIFE_ROLLOUTS,
    RATE,
    Margins,
    tail_bound,
)

CLIP_RATE: Final = 1e-3
"""Of honest tokens, so many lie above the clip: a few large margins are the business of the other rules."""
RATIO: Final = 1.5
"""The reference is this multiple of the honest mean: half-way to margins twice as large, which it finds fastest."""
LEAST_REFERENCE: Final = 1e-4
LEAST_CLIP: Final = 0.05
"""Nats; where a machine agrees with itself to the bit."""
LEAST_EXPONENT: Final = 1e-3
MOST_EXPONENT: Final = 200.0
"""Per nat. Where not even the least one fits, the sample is too small to say anything and the test never alarms."""
_HALVINGS: Final = 60


@dataclass(frozen=True, kw_only=True)
class DriftTest:
    """What honest work was found to be; nats, and 1/nats for the exponent."""

    clip: float
    reference: float
    exponent: float
    alarm: float = math.log(LIFE_ROLLOUTS * HARD_RULES / RATE)
    """A false alarm within the life of a node has at most its rule's part of the rate."""


@dataclass(frozen=True, kw_only=True)
class DriftState:
    """What is kept of a node."""

    score: float = 0.0
    tokens: int = 0
    """Audited since the score last was 0."""
    alarms: int = 0


def advance(state: DriftState, margins: Margins, test: DriftTest) -> tuple[DriftState, bool]:
    """The state after one more audited rollout, and whether it raises the alarm. Margins that are not finite do."""
    score = state.score + test.exponent * excess(margins, clip=test.clip, reference=test.reference)
    if not score < test.alarm:
        return DriftState(alarms=state.alarms + 1), True
    if score <= 0:
        return replace(state, score=0.0, tokens=0), False
    return replace(state, score=score, tokens=state.tokens + len(margins)), False


def excess(margins: Margins, *, clip: float, reference: float) -> float:
    """The sum of a rollout's clipped margins beyond the reference, nats."""
    return float(np.minimum(margins, clip).sum(dtype=np.float64)) - reference * len(margins)


def fit_drift(cells: Sequence[Sequence[Margins]]) -> DriftTest:
    """The test for nodes that work like these cells; ``cells[i][j]`` are the margins of rollout j of cell i.

    Clip and reference are those of the worst cell, of those with CELL_TOKENS tokens and of all together. Raises
    ``ValueError`` for an empty cell.
    """
    if not cells or not all(cells):
        raise ValueError("a cell without rollouts says nothing")
    kinds = [[one for cell in cells for one in cell], *(cell for cell in cells if sum(map(len, cell)) >= CELL_TOKENS)]
    tokens = [np.concatenate(kind) for kind in kinds]
    clip = max(LEAST_CLIP, *(tail_bound(cell, CLIP_RATE) for cell in tokens))
    honest = max(float(np.minimum(cell, clip).mean(dtype=np.float64)) for cell in tokens)
    reference = max(LEAST_REFERENCE, RATIO * honest)
    scores = [np.array([excess(m, clip=clip, reference=reference) for m in kind]) for kind in kinds]
    return DriftTest(clip=clip, reference=reference, exponent=_exponent(scores, extra=clip - reference))


def _exponent(judged: Sequence[NDArray[np.float64]], *, extra: float) -> float:
    """The largest theta with E[exp(theta x)] <= 1: for all (the first) with confidence, for each cell by its mean."""
    pooled = np.append(judged[0], extra)

    def fits(theta: float) -> bool:
        values = np.exp(theta * pooled)
        error = float(values.std(ddof=1)) / math.sqrt(values.size)
        if float(values.mean()) + CONFIDENCE_Z * error > 1:
            return False
        return all(float(np.exp(theta * cell).mean()) <= 1 for cell in judged)

    low, high = 0.0, LEAST_EXPONENT
    while high < MOST_EXPONENT and fits(high):
        low, high = high, high * 2
    if not low:
        return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
