"""The objective (trust.md, layer L8): a clipped policy gradient that takes a node's word for nothing beyond noise.

Three log-probabilities per token: mu of the weights that generated it, pi_old of the learner at the start of the step,
pi of the learner now.

    loss = sum over tokens of
           - stopgrad(min(pi_old / mu_hat, cap)) * min(r A, clip(r, 1 - low, 1 + high) A) / Z     r = pi / pi_old
           + kl * (exp(ref - pi) - 1 - (ref - pi)) / Z                                            (optional)
    mu_hat = mu where the learner recomputed it, else the claimed mu clamped to pi_old +- delta

Invariants: every function is pure and works on flat tensors, one element per completion token; a claimed mu changes a
token's weight by a factor between exp(-delta) and exp(delta), whatever it is; Z is a constant, so that a
completion's length buys nothing. It knows no model, no groups and no rewards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The constants of the loss."""

    clip_low: float
    clip_high: float
    importance_cap: float
    delta: float
    """Nats."""
    kl: float
    normaliser: float
    """Z: by default the samples of a batch times the longest completion, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What is known about the completion tokens before the step; float32 [n] each, ``exact`` bool [n]."""

    mu: Tensor
    exact: Tensor
    """Where mu was recomputed by the learner."""
    advantage: Tensor

    def __getitem__(self, part: slice | Tensor) -> Tokens:
        """Return some of the tokens: those of a slice, or of int64 positions."""
        return Tokens(mu=self.mu[part], exact=self.exact[part], advantage=self.advantage[part])


def behaviour(tokens: Tokens, *, pi_old: Tensor, delta: float) -> Tensor:
    """Return mu_hat, float32 [n]: exact where audited, else clamped to ``pi_old`` +- ``delta`` nats."""
    clamped = torch.minimum(torch.maximum(tokens.mu, pi_old - delta), pi_old + delta)
    return torch.where(tokens.exact, tokens.mu, clamped)


def importance(tokens: Tokens, *, pi_old: Tensor, objective: Objective) -> Tensor:
    """Return min(pi_old / mu_hat, cap), float32 [n], without gradient."""
    difference = pi_old - behaviour(tokens, pi_old=pi_old, delta=objective.delta)
    return difference.detach().clamp(max=math.log(objective.importance_cap)).exp()


def policy_loss(
    pi: Tensor, *, pi_old: Tensor, tokens: Tokens, objective: Objective, reference: Tensor | None = None
) -> Tensor:
    """Return the loss of some tokens, a scalar with gradient towards ``pi``. Losses of parts of a batch add up.

    ``pi``, ``pi_old`` and ``reference`` are log-probabilities, float32 [n]; gradients flow into ``pi`` alone.
    Raises ``ValueError`` when the objective has a KL term and there is no reference.
    """
    old = pi_old.detach()
    ratio = (pi - old).exp()
    clipped = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    gain = torch.minimum(ratio * tokens.advantage, clipped * tokens.advantage)
    loss = -(importance(tokens, pi_old=old, objective=objective) * gain)
    if objective.kl:
        if reference is None:
            raise ValueError("the objective has a KL term but there are no reference log-probabilities")
        loss = loss + objective.kl * kl_to_reference(pi, reference=reference.detach())
    return loss.sum() / objective.normaliser


def kl_to_reference(pi: Tensor, *, reference: Tensor) -> Tensor:
    """Return the k3 estimate of KL(pi || reference) per token, float32 [n], never negative."""
    difference = reference - pi
    return difference.expm1() - difference


def is_clipped(pi: Tensor, *, pi_old: Tensor, advantage: Tensor, objective: Objective) -> Tensor:
    """Return where the clipped branch was taken, bool [n]: those tokens carry no policy gradient."""
    ratio = (pi - pi_old).exp()
    above = (advantage > 0) & (ratio > 1.0 + objective.clip_high)
    below = (advantage < 0) & (ratio < 1.0 - objective.clip_low)
    return above | below
