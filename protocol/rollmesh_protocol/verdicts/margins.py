"""What an audit's figures mean (layer L5): a pure decision with the default thresholds of the design.

The margin of a token is ``max_j z_j - z_claimed`` with z = logits + noise under the exact weights: zero when the node
sampled what it had to, and within floating-point noise of zero when its engine rounds differently. Honest margins on
SmolLM2 stayed below 0.4; calibration tightens these defaults for a model and an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["pass", "hard", "soft"]

KEPT_WINDOWS: Final = 10
"""A node's audited tokens are remembered for this many windows, the newest counting as much as the oldest."""


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Where honest noise ends."""

    any_margin: float = 3.0
    """One token above this is a hard failure."""
    high_margin: float = 1.0
    high_in_one: int = 3
    """This many tokens above ``high_margin`` in one rollout are a hard failure."""
    low_margin: float = 0.5
    window_tokens: int = 200
    """The node-level rule looks at no fewer of its last audited tokens than this."""
    high_share: float = 0.01
    """A larger share above ``high_margin`` over those tokens is a hard failure."""
    low_share: float = 0.01
    """A larger share above ``low_margin`` over those tokens is a soft failure."""


@dataclass(frozen=True, kw_only=True)
class AuditFigures:
    """What the recomputation of one rollout found."""

    tokens: int
    over_low: int
    over_high: int
    over_any: int
    largest: float


def count_margins(margins: NDArray[np.float32], thresholds: Thresholds) -> AuditFigures:
    """The figures of one rollout by these thresholds; ``margins`` [tokens] in nats, at least one."""
    return AuditFigures(
        tokens=margins.size,
        over_low=int((margins > thresholds.low_margin).sum()),
        over_high=int((margins > thresholds.high_margin).sum()),
        over_any=int((margins > thresholds.any_margin).sum()),
        largest=float(margins.max()),
    )


def judge_rollout(figures: AuditFigures, thresholds: Thresholds) -> tuple[Verdict, str]:
    """The verdict on one rollout by itself, and why."""
    if figures.over_any:
        return "hard", f"a token lies {figures.largest:.1f} below the sample that its seed gives"
    if figures.over_high >= thresholds.high_in_one:
        return "hard", f"{figures.over_high} of {figures.tokens} tokens lie more than {thresholds.high_margin:g} below"
    return "pass", ""


def judge_window(recent: Sequence[tuple[int, int, int]], thresholds: Thresholds) -> tuple[Verdict, str]:
    """The verdict on a node's last audited rollouts, each (tokens, margins over low, margins over high)."""
    tokens = sum(n for n, _, _ in recent)
    if tokens < thresholds.window_tokens:
        return "pass", ""
    low = sum(n for _, n, _ in recent) / tokens
    high = sum(n for _, _, n in recent) / tokens
    if high > thresholds.high_share:
        return "hard", f"{high:.1%} of the last {tokens} tokens lie more than {thresholds.high_margin:g} below"
    if low > thresholds.low_share:
        return "soft", f"{low:.1%} of the last {tokens} tokens lie more than {thresholds.low_margin:g} below"
    return "pass", ""


def keep_recent(recent: list[tuple[int, int, int]], thresholds: Thresholds) -> None:
    """Forget the oldest figures beyond :data:`KEPT_WINDOWS` windows."""
    most = KEPT_WINDOWS * thresholds.window_tokens
    while len(recent) > 1 and sum(n for n, _, _ in recent) - recent[0][0] >= most:
        recent.pop(0)
