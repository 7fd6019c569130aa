"""How likely an audit is in full standing: telling rollouts more than others, at the mean that the operator set.

With w the weight of a rollout, m the running mean of w over steady rollouts and q the configured mean, its rate is

    r = q / 2 * (1 + w / m)

so that the mean of r is q whatever the weights are, and no rollout is drawn with less than half of q: nobody can hide
behind others that are more telling. Audits cost tokens, and telling rollouts may be the longer ones: m is raised
until the share of tokens, prompts included, that is expected to be audited is at most :data:`COST_MOST` (or q, where
an operator asks for more). Pure: the draw itself is :mod:`.draw`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

COST_MOST: Final = 0.05
"""Audited tokens as a share of generated plus prompt tokens (trust.md)."""
ADVANTAGE_MOST: Final = 2.0
PER_ADVANTAGE: Final = 2.0
FOR_REWARD: Final = 2.0
PER_MARK: Final = 4.0
MARKS_MOST: Final = 2
WEIGHT_MOST: Final = 64.0
MEMORY: Final = 2048
"""Rollouts over which the running means forget."""
_PRIOR_WEIGHT: Final = 3.0
_PRIOR_COUNT: Final = 32.0
"""What the means start from: half the answers right, as good as nothing odd; soon outweighed by what is seen."""
_PRIOR_TOKENS: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of a rollout when it is drawn or not."""

    advantage: float
    """Of its reward within its group, in standard deviations."""
    reward: float
    marks: int
    """Oddities of its own (layer L3), and one where its node seems to withhold samples."""
    tokens: int
    """Prompt and completion: what auditing it costs."""


def weight_of(evidence: Evidence) -> float:
    """How telling a rollout is: 1 for one that moves nothing, up to :data:`WEIGHT_MOST`."""
    telling = 1.0 + PER_ADVANTAGE * min(abs(evidence.advantage), ADVANTAGE_MOST)
    if evidence.reward > 0:
        telling += FOR_REWARD
    return float(min(WEIGHT_MOST, telling * PER_MARK ** min(evidence.marks, MARKS_MOST)))


@dataclass(frozen=True, kw_only=True)
class Means:
    """Exponentially weighted sums over steady rollouts, and what their audits cost so far, in tokens."""

    count: float = _PRIOR_COUNT
    weight: float = _PRIOR_COUNT * _PRIOR_WEIGHT
    tokens: float = _PRIOR_COUNT * _PRIOR_TOKENS
    weighted_tokens: float = _PRIOR_COUNT * _PRIOR_WEIGHT * _PRIOR_TOKENS
    work_tokens: int = 0
    """Prompt and generated tokens of all steady rollouts so far."""
    drawn_tokens: int = 0
    """Those of them that were drawn for audit."""

    def seen(self, evidence: Evidence) -> Means:
        """After one more steady rollout."""
        kept = 1.0 - 1.0 / MEMORY
        weight = weight_of(evidence)
        return replace(
            self,
            count=kept * self.count + 1.0,
            weight=kept * self.weight + weight,
            tokens=kept * self.tokens + evidence.tokens,
            weighted_tokens=kept * self.weighted_tokens + weight * evidence.tokens,
            work_tokens=self.work_tokens + evidence.tokens,
        )

    def drawn(self, evidence: Evidence) -> Means:
        """After that rollout was drawn."""
        return replace(self, drawn_tokens=self.drawn_tokens + evidence.tokens)


def steady_rate(evidence: Evidence, *, means: Means, mean_rate: float) -> float:
    """The probability of auditing a rollout of a node in full standing; ``mean_rate`` is held over rollouts."""
    if mean_rate <= 0:
        return 0.0
    by_count = means.weight / means.count
    by_tokens = means.weighted_tokens / means.tokens
    room = 2.0 * max(COST_MOST, mean_rate) / mean_rate - 1.0
    return min(1.0, mean_rate / 2.0 * (1.0 + weight_of(evidence) / max(by_count, by_tokens / room)))


def early_rate(evidence: Evidence, *, base_rate: float) -> float:
    """The probability below full standing: the rate of its state, raised by every mark."""
    return min(1.0, base_rate * (1 + evidence.marks))
