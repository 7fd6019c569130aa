"""Layer L4: what a node claims its log-probabilities were, against the learner's own for the same tokens.

Pure numpy. The learner's figures (pi_old) fall out of the training pass, so every rollout is checked for nothing.
Invariant: a verdict is never a rejection. ``audit`` asks for the recomputation that can tell (layer L5); age of the
weights, another engine and a lie look alike from here. A claim moves the loss by no more than ``delta`` either way.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["ok", "audit"]

LARGEST_EXPONENT: Final = 80.0
"""Log-ratios are cut here before exp, so that absurd claims give large numbers and not infinities."""
MEDIAN_TOKENS: Final = 8
"""Completion length from which on the median counts. Honest rollouts two steps old (SmolLM2, lr 1e-5) exceeded 0.10 in
27 % of cases at 2 to 5 tokens and in 0.3 % at 10 to 12; shorter ones are left to the other two figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobLimits:
    """From where on a rollout is sent to the auditor."""

    median: float = 0.10
    """Median of exp|d| - 1 over its tokens, from MEDIAN_TOKENS on. Honest bf16 noise has 0.03 (trust.md)."""
    kl: float = 0.10
    """Mean k3 over its tokens, nats. Honest noise has 0.002, two steps at lr 1e-5 up to 0.18 in one of 1,600."""
    least_ratio: float = 1e-4
    """Smallest exp(-|d|) of a token: one impossible token is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far one rollout's claims are from the learner's own log-probabilities; d = own - claimed, nats."""

    tokens: int
    median: float
    """median of exp|d| - 1."""
    kl: float
    """k3 estimate of KL(claimed || own): mean of exp(d) - 1 - d, never negative."""
    least_ratio: float
    """min of exp(-|d|), in (0, 1]."""
    verdict: Verdict

    def as_record(self) -> dict[str, object]:
        """Plain values by field name, for the pipe and the metrics file."""
        return asdict(self)


def mismatch(
    claimed: NDArray[np.float32], *, own: NDArray[np.float32], limits: LogprobLimits | None = None
) -> Mismatch:
    """Compare the claimed log-probabilities [t] of one rollout with the learner's ``own`` [t], both in nats.

    Raises ``ValueError`` for empty or unequal lengths; values that are not finite give ``audit``.
    """
    if claimed.shape != own.shape or claimed.size == 0:
        raise ValueError(f"log-probabilities of shapes {claimed.shape} and {own.shape}")
    bounds = limits or LogprobLimits()
    difference = own.astype(np.float64) - claimed.astype(np.float64)
    difference = np.nan_to_num(difference, nan=LARGEST_EXPONENT, posinf=LARGEST_EXPONENT, neginf=-LARGEST_EXPONENT)
    difference = np.clip(difference, -LARGEST_EXPONENT, LARGEST_EXPONENT)
    size = np.abs(difference)
    median = float(np.median(np.expm1(size)))
    kl = float(np.mean(k3(difference)))
    least_ratio = float(np.exp(-size.max()))
    shifted = median > bounds.median and claimed.size >= MEDIAN_TOKENS
    suspicious = shifted or kl > bounds.kl or least_ratio < bounds.least_ratio
    return Mismatch(
        tokens=claimed.size,
        median=median,
        kl=kl,
        least_ratio=least_ratio,
        verdict="audit" if suspicious else "ok",
    )


def k3(difference: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return exp(d) - 1 - d for d = log q - log p of tokens drawn from p: an unbiased estimate of KL(p || q), >= 0.

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    values: NDArray[np.float64] = np.expm1(difference) - difference
    return values
