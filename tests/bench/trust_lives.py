"""Lives of nodes for `make bench-trust`: rollouts drawn with replacement, judged by every rule of the audit.

The rules are those of :mod:`rollmesh_protocol.verdicts`; the walk over many lives at once is written with arrays here,
and a test of the bench holds it against the functions themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from rollmesh_learner.audit.derive import Derived
from rollmesh_protocol.verdicts.drift import excess
from rollmesh_protocol.verdicts.envelope import LIFE_ROLLOUTS
from rollmesh_protocol.verdicts.margins import KEPT_WINDOWS

if TYPE_CHECKING:
    from tests.bench.trust_cells import Cases, Cell

LIVES: Final = 400
HONEST_LIVES: Final = 500
"""Of each half."""
CAP_TOKENS: Final = 40_000
"""Audited tokens after which a cheat counts as not noticed."""
ROC_TOKENS: Final = (16, 64, 256, 1024, 4096, 8192)
ROC_BLOCKS: Final = 4000
ROC_HONEST: Final = 20_000
ROC_SHOWN: Final = 256
"""Tokens of the blocks of the curves."""
RATES: Final = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the rules see of each rollout; arrays [rollouts]."""

    tokens: np.ndarray
    low: np.ndarray
    high: np.ndarray
    over_any: np.ndarray
    several: np.ndarray
    drift: np.ndarray
    """exponent * excess: what is added to the node's score."""


def score(cases: Cases, derived: Derived) -> Scores:
    limits, test = derived.thresholds, derived.drift
    high = np.array([(m > limits.high_margin).sum() for m in cases.margins])
    return Scores(
        tokens=np.array([len(m) for m in cases.margins]),
        low=np.array([(m > limits.low_margin).sum() for m in cases.margins]),
        high=high,
        over_any=np.array([(m > limits.any_margin).any() for m in cases.margins]),
        several=high >= limits.high_in_one,
        drift=np.array([test.exponent * excess(m, clip=test.clip, reference=test.reference) for m in cases.margins]),
    )


def walk(scores: Scores, lives: np.ndarray, derived: Derived) -> dict[str, np.ndarray]:
    """The place in each life [lives, rollouts] at which each rule fires first; its length where it does not."""
    limits, length = derived.thresholds, lives.shape[1]
    total = np.zeros((len(lives), length + 1))
    low, high = total.copy(), total.copy()
    np.cumsum(scores.tokens[lives], axis=1, out=total[:, 1:])
    np.cumsum(scores.low[lives], axis=1, out=low[:, 1:])
    np.cumsum(scores.high[lives], axis=1, out=high[:, 1:])
    most = KEPT_WINDOWS * limits.window_tokens
    hard, soft = np.zeros(lives.shape, dtype=bool), np.zeros(lives.shape, dtype=bool)
    for life, ends in enumerate(total):
        starts = np.maximum(0, np.searchsorted(ends, ends[1:] - most, side="right") - 1)
        tokens = ends[1:] - ends[starts]
        enough = tokens >= limits.window_tokens
        hard[life] = enough & ((high[life, 1:] - high[life, starts]) / tokens > limits.high_share)
        soft[life] = enough & ((low[life, 1:] - low[life, starts]) / tokens > limits.low_share)
    alarms = _drift_alarms(scores.drift[lives], alarm=derived.drift.alarm)
    single = (scores.over_any | scores.several)[lives]
    fired = {
        "rollout": _first(single),
        "window": np.minimum(_first(hard), _first(soft)),
        "window_hard": _first(hard),
        "drift": alarms[0],
        "drift_twice": alarms[1],
    }
    fired["first"] = np.minimum.reduce([fired["rollout"], fired["window"], fired["drift"]])
    fired["out"] = np.minimum.reduce([fired["rollout"], fired["window_hard"], fired["drift_twice"]])
    return fired


def _drift_alarms(steps: np.ndarray, *, alarm: float) -> tuple[np.ndarray, np.ndarray]:
    """Where the first and the second alarm of each life are."""
    lives, length = steps.shape
    now, count = np.zeros(lives), np.zeros(lives, dtype=int)
    at = np.full((2, lives), length)
    for place in range(length):
        now = np.maximum(0, now + steps[:, place])
        fired = now >= alarm
        for number in (0, 1):
            at[number, fired & (count == number)] = place
        count += fired
        now[fired] = 0
    return at[0], at[1]


def _first(fired: np.ndarray) -> np.ndarray:
    return np.where(fired.any(axis=1), fired.argmax(axis=1), fired.shape[1])


def detection_lengths(cases: Cases, derived: Derived, *, lives: int = LIVES) -> dict[str, np.ndarray]:
    """Audited tokens until each rule fires, one for each of ``lives``; inf where it does not within the cap."""
    scores = score(cases, derived)
    length = int(np.ceil(CAP_TOKENS / scores.tokens.mean()))
    drawn = np.random.default_rng(11).integers(0, len(cases.margins), (lives, length))
    ends = np.cumsum(scores.tokens[drawn], axis=1)
    found = {}
    for rule, places in walk(scores, drawn, derived).items():
        reached = ends[np.arange(lives), np.minimum(places, length - 1)].astype(float)
        found[rule] = np.where(places < length, reached, np.inf)
    return found


def quantile(lengths: np.ndarray, q: float) -> int | None:
    """Of lengths that may be infinite; None where this one is."""
    value = np.sort(lengths)[min(len(lengths) - 1, int(np.ceil(q * len(lengths))) - 1)]
    return int(value) if np.isfinite(value) else None


def honest_lives(cells: Sequence[Cases], derived: Derived, *, lives: int = HONEST_LIVES) -> dict[str, float]:
    """Shares of ``lives`` lives of LIFE_ROLLOUTS rollouts, each life of one cell's work, in which each rule fired.

    Lives are drawn by prompts, all samples of one after the other: rollouts of one prompt are alike.
    ``hard`` ends a node (a rollout, the window, two alarms); ``soft`` halves its record (the window, one alarm).
    """
    random = np.random.default_rng(12)
    fired: list[dict[str, np.ndarray]] = []
    for cases in cells:
        scores = score(cases, derived)
        each = -(-lives // len(cells))
        for start in range(0, each, 50):  # bounds the memory
            prompts = random.integers(
                0, len(cases.margins) // cases.samples, (min(50, each - start), LIFE_ROLLOUTS // cases.samples)
            )
            drawn = (prompts[:, :, None] * cases.samples + np.arange(cases.samples)).reshape(len(prompts), -1)
            fired.append(walk(scores, drawn, derived))
    together = {rule: np.concatenate([one[rule] for one in fired]) < LIFE_ROLLOUTS for rule in fired[0]}
    return {
        "hard": float(together["out"].mean()),
        "rollout": float(together["rollout"].mean()),
        "window_hard": float(together["window_hard"].mean()),
        "window_soft": float(together["window"].mean()),
        "drift": float(together["drift"].mean()),
    }


def roc(*, honest: dict[Cell, Cases], cheats: dict[Cell, Cases], derived: Derived) -> dict:
    """Blocks of audited tokens by their mean clipped margin: thresholds from honest blocks, all cells alike."""
    clip = derived.drift.clip
    random = np.random.default_rng(13)

    def blocks(cells: Sequence[Cases], *, tokens: int, number: int) -> np.ndarray:
        means = []
        for cases in cells:
            clipped = np.array([np.minimum(m, clip).sum() for m in cases.margins])
            lengths = np.array([len(m) for m in cases.margins])
            count = max(1, round(tokens / lengths.mean()))
            drawn = random.integers(0, len(lengths), (number // len(cells), count))
            means.append(clipped[drawn].sum(axis=1) / lengths[drawn].sum(axis=1))
        return np.concatenate(means)

    table = [{"cheat": cell.name} for cell in cheats]
    curves: dict[str, list[float]] = {}
    for tokens in ROC_TOKENS:
        baseline = np.sort(blocks(list(honest.values()), tokens=tokens, number=ROC_HONEST))
        for row, cases in zip(table, cheats.values(), strict=True):
            values = blocks([cases], tokens=tokens, number=ROC_BLOCKS)
            row[str(tokens)] = round(float((values > np.quantile(baseline, 1 - RATES[0])).mean()), 4)
            if tokens == ROC_SHOWN:
                curves[row["cheat"]] = [
                    round(float((values > np.quantile(baseline, 1 - rate)).mean()), 4) for rate in RATES[:-1]
                ] + [1.0]
    return {"statistic": f"mean of min(margin, {clip:.3f})", "table": table, "rates": RATES, "curves": curves,
            "curve_tokens": ROC_SHOWN}  # fmt: skip
