"""From margins of honest work to thresholds: the global envelope, the classes inside it, and delta. Pure numpy.

Invariants: a threshold holds the stated rate with 95 % confidence for what was measured, so more of the same data
tightens it; it is wider than the default only where honest work itself lies beyond the default, never because little
was measured; the envelope of several cells (arithmetic x batch) is that of the worst one; a class of engines is learned
from at least three unrelated nodes, by the median over them, and only ever tightens: declaring one gains nothing.

Sources. Tails: peaks over a threshold with an exponential law of excesses (J. Pickands, Ann. Stat. 3, 1975, of shape
zero), which real margins fall below. Counts: P(Binomial(n, p) >= c) <= C(n, c) p^c <= (n p)^c / c!, the union bound,
for tokens that exceed independently; the slack of the envelope is there for those that do not.

Not here: what a margin is and what verdicts there are (:mod:`.margins`), drifts below these thresholds
(:mod:`.drift`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollmesh_protocol.verdicts.margins import Thresholds

Margins = NDArray[np.float32]
"""Of the tokens of one rollout or of many: >= 0, nats."""

RATE: Final = 1e-3
"""Probability that an honest node is put out of the run by mistake within its life ..."""
LIFE_ROLLOUTS: Final = 10_000
"""... of so many audited rollouts, by all rules together."""
HARD_RULES: Final = 4
"""One token, several in one rollout, the window, the drift: they share the rate equally."""
HARD_RATE: Final = RATE / LIFE_ROLLOUTS / HARD_RULES
"""Per audited rollout and rule."""
SOFT_RATE: Final = 1e-5
"""The same of the soft rule, whose mistakes cost a node some more audits."""
SLACK: Final = 1.25
"""The envelope is so much wider than what was measured: other devices round differently."""
CONFIDENCE_Z: Final = 1.645
"""Standard normal deviate of 95 %, one side."""
TAIL_SHARE: Final = 0.1
"""Of the margins above zero, the largest tenth is taken for the tail."""
LEAST_PEAKS: Final = 10
CELL_TOKENS: Final = 3000
"""A cell with fewer tokens says too little by itself: it is judged together with the others only."""
LEAST_LOW: Final = 0.1
LEAST_HIGH: Final = 0.2
LEAST_ANY: Final = 0.5
"""Nats. No threshold is lower, however exactly a machine agrees with itself: nodes are other machines."""

CLASS_NODES: Final = 3
"""Unrelated nodes from which a class is learned, at the least."""
CLASS_TOKENS: Final = 10_000
"""Audited tokens of each of them."""
LEAST_OF_ENVELOPE: Final = 0.5
"""A class tightens no margin further: three liars who round as the auditor does must not strangle the others."""
BINS: Final = 96
"""Of a node's counts: one for zero, the others equally wide in the logarithm."""
_EDGES: Final = np.concatenate([np.zeros(1), np.geomspace(1e-3, 32.0, BINS - 2), np.array([np.inf])])
_UPPER: Final = np.concatenate([_EDGES[:-1], np.array([64.0])])
"""The largest margin of each bin: what is read out of counts is never too small."""
DELTA_SHARE: Final = 0.999
DELTA_TOKENS: Final = 10_000
"""Of a cell with fewer, the upper end of that percentile is the largest gap there is."""


def token_rate(rate: float, *, count: int, tokens: int) -> float:
    """The largest p such that ``count`` of ``tokens`` tokens, each exceeding with p, do with at most ``rate``."""
    return min(1.0, math.pow(rate * math.factorial(count), 1 / count) / tokens)


def tail_bound(margins: Margins, rate: float, *, z: float = CONFIDENCE_Z) -> float:
    """A margin that a token of this kind exceeds with probability ``rate`` at most (95 % confidence), in nats.

    ``z`` is the confidence as a normal deviate: 0 for what is as likely too small as too large.

    Beyond the u of which the largest tenth of the margins above zero are the excesses: u + b log(p_u / rate), b the
    mean excess, with b and p_u at the upper end of their intervals. Never below the largest margin seen when less than
    one is expected above it. 0 where no margin is above zero.
    """
    positive = np.sort(margins[margins > 0].astype(np.float64))
    if not positive.size:
        return 0.0
    peaks = min(positive.size, max(LEAST_PEAKS, round(TAIL_SHARE * positive.size)))
    floor = float(positive[-peaks - 1]) if peaks < positive.size else 0.0
    more = _gamma_quantile(peaks + 1, z) / peaks
    share = min(1.0, peaks / margins.size * more)
    if rate >= share:
        return float(np.quantile(margins, max(0.0, 1 - rate / more)))
    excess = float(np.sum(positive[-peaks:] - floor)) / _gamma_quantile(peaks, -z)
    bound = floor + excess * math.log(share / rate)
    return max(bound, float(positive[-1])) if rate * margins.size < 1 else bound


def _gamma_quantile(shape: int, z: float) -> float:
    """The quantile of Gamma(shape, 1) at the normal deviate ``z`` (E. Wilson and M. Hilferty, PNAS 17, 1931)."""
    return shape * (1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))) ** 3


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How often a token of honest work may exceed each margin, so that the rules hold their rates."""

    low: float
    high: float
    any: float

    @classmethod
    def of(cls, rules: Thresholds, *, longest: int) -> Rates:
        """For the counts and windows of ``rules`` and completions of up to ``longest`` tokens."""
        window = rules.window_tokens
        low = math.floor(rules.low_share * window) + 1
        high = math.floor(rules.high_share * window) + 1
        return cls(
            low=token_rate(SOFT_RATE, count=low, tokens=window),
            high=min(
                token_rate(HARD_RATE, count=high, tokens=window),
                token_rate(HARD_RATE, count=rules.high_in_one, tokens=longest),
            ),
            any=token_rate(HARD_RATE, count=1, tokens=longest),
        )


def thresholds_of(margins: Margins, *, rules: Thresholds, longest: int, z: float = CONFIDENCE_Z) -> Thresholds:
    """Where the noise of these margins ends; counts, shares and window are those of ``rules``. No slack."""
    rates = Rates.of(rules, longest=longest)
    low = tail_bound(margins, rates.low, z=z)
    high = max(low, tail_bound(margins, rates.high, z=z))
    return replace(rules, low_margin=low, high_margin=high, any_margin=max(high, tail_bound(margins, rates.any, z=z)))


def judged(cells: Sequence[Margins], *, least: int = CELL_TOKENS) -> list[Margins]:
    """All cells as one, and each by itself that has ``least`` tokens. ``ValueError`` for an empty cell.

    ``cells``: a value for each token of each cell, one array for each.
    """
    if not cells or not all(cell.size for cell in cells):
        raise ValueError("a cell without tokens says nothing")
    return [np.concatenate(cells), *(cell for cell in cells if cell.size >= least)]


def envelope_of(cells: Sequence[Margins], *, rules: Thresholds, longest: int) -> Thresholds:
    """The thresholds within which all cells lie (:func:`judged`), with :data:`SLACK` and not below the least ones.

    The margins of ``rules`` are the widest, one by one, as long as the cells do not lie beyond them: what they show,
    without confidence or slack, and not what cannot be excluded because little was measured.
    """
    kinds = judged(cells)
    sure = [thresholds_of(kind, rules=rules, longest=longest) for kind in kinds]
    seen = [thresholds_of(kind, rules=rules, longest=longest, z=0.0) for kind in kinds]

    def margin(name: str) -> float:
        default: float = getattr(rules, name)
        wide: float = SLACK * max(getattr(one, name) for one in sure)
        return wide if max(getattr(one, name) for one in seen) > default else min(wide, default)

    low, high, any_margin = (margin(name) for name in ("low_margin", "high_margin", "any_margin"))
    return _no_less(replace(rules, low_margin=low, high_margin=high, any_margin=any_margin))


def tighten(envelope: Thresholds, others: Thresholds) -> Thresholds:
    """The smaller of each margin, with everything else of ``envelope``: never looser than it."""
    return replace(
        envelope,
        low_margin=min(envelope.low_margin, others.low_margin),
        high_margin=min(envelope.high_margin, others.high_margin),
        any_margin=min(envelope.any_margin, others.any_margin),
    )


def delta_of(gaps: NDArray[np.float32]) -> float:
    """The 99.9th percentile of |claimed - own log-probability| of honest tokens, nats: the loss clamps claims to it.

    At the upper end of its 95 % interval, by the order statistic. Raises ``ValueError`` for no gaps.
    """
    if not gaps.size:
        raise ValueError("there are no log-probabilities")
    above = (1 - DELTA_SHARE) * gaps.size
    rank = math.floor(above - CONFIDENCE_Z * math.sqrt(above))
    return float(np.sort(gaps)[-1 - max(0, rank)])


# --- classes of engines ----------------------------------------------------------------------------------------------
Counts = tuple[int, ...]
"""How many of a node's audited tokens fell into each of the :data:`BINS` bins of margins."""

NO_COUNTS: Final[Counts] = (0,) * BINS


def count(before: Counts, margins: Margins) -> Counts:
    """``before`` and the margins of one more rollout."""
    bins = np.searchsorted(_EDGES, margins, side="left")
    return tuple((np.asarray(before) + np.bincount(np.minimum(bins, BINS - 1), minlength=BINS)).tolist())


def learn_class(nodes: Mapping[str, tuple[str, Counts]], *, envelope: Thresholds, longest: int) -> Thresholds | None:
    """The thresholds of a class, inside the envelope; None while too little is known.

    ``nodes``: for each node that says to be of the class, where it comes from (nodes of one origin count once, the one
    with the most tokens) and its counts. Nodes outside the envelope teach nothing, and of the others the median does:
    a minority that drifts moves it no further than the next honest node.
    """
    by_origin: dict[str, Counts] = {}
    for origin, counts in nodes.values():
        if sum(counts) >= CLASS_TOKENS and sum(counts) > sum(by_origin.get(origin, NO_COUNTS)):
            by_origin[origin] = counts
    found = [thresholds_of(_margins_of(counts), rules=envelope, longest=longest) for counts in by_origin.values()]
    inside = [one for one in found if one.any_margin <= envelope.any_margin and one.low_margin <= envelope.low_margin]
    if len(inside) < CLASS_NODES:
        return None
    least = LEAST_OF_ENVELOPE
    learned = replace(
        envelope,
        low_margin=max(least * envelope.low_margin, SLACK * float(np.median([one.low_margin for one in inside]))),
        high_margin=max(least * envelope.high_margin, SLACK * float(np.median([one.high_margin for one in inside]))),
        any_margin=max(least * envelope.any_margin, SLACK * float(np.median([one.any_margin for one in inside]))),
    )
    return tighten(envelope, _no_less(learned))


def _margins_of(counts: Counts) -> Margins:
    return np.repeat(_UPPER, counts).astype(np.float32)


def _no_less(found: Thresholds) -> Thresholds:
    low = max(LEAST_LOW, found.low_margin)
    high = max(LEAST_HIGH, low, found.high_margin)
    return replace(found, low_margin=low, high_margin=high, any_margin=max(LEAST_ANY, high, found.any_margin))
