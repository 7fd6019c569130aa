"""The objective: by hand, against finite differences, and that a node's word is worth delta and no more."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollmesh_learner.training.loss import Objective, Tokens, behaviour, importance, is_clipped, policy_loss

OBJECTIVE = Objective(clip_low=0.2, clip_high=0.3, importance_cap=2.0, delta=0.4, kl=0.0, normaliser=10.0)
WITH_KL = Objective(clip_low=0.2, clip_high=0.3, importance_cap=2.0, delta=0.4, kl=0.5, normaliser=10.0)

nats = st.floats(-20, 0, width=32, allow_subnormal=False)
claims = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def known(mu: Tensor, advantage: Tensor, *, exact: bool = False) -> Tokens:
    return Tokens(mu=mu, exact=torch.full(mu.shape, exact), advantage=advantage)


def test_mu_is_clamped_unless_recomputed() -> None:
    old = tensor(-1.0, -1.0, -1.0)
    mu = tensor(-1.1, -3.0, 0.0)
    assert torch.allclose(behaviour(known(mu, mu), pi_old=old, delta=0.4), tensor(-1.1, -1.4, -0.6))
    assert torch.equal(behaviour(known(mu, mu, exact=True), pi_old=old, delta=0.4), mu)


def test_importance_is_capped() -> None:
    old = tensor(-1.0, -1.0, -1.0)
    mu = tensor(-1.5, -30.0, -0.5)
    found = importance(known(mu, mu, exact=True), pi_old=old, objective=OBJECTIVE)
    assert torch.allclose(found, tensor(math.exp(0.5), 2.0, math.exp(-0.5)))


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain"),
    [
        (1.0, 2.0, 2.0),
        (1.1, 2.0, 2.2),
        (1.5, 2.0, 1.3 * 2.0),  # clipped above
        (0.5, 2.0, 0.5 * 2.0),  # the pessimistic branch
        (0.5, -2.0, 0.8 * -2.0),  # clipped below
        (1.5, -2.0, 1.5 * -2.0),
    ],
)
def test_loss_by_hand(ratio: float, advantage: float, gain: float) -> None:
    old, mu = tensor(-2.0), tensor(-2.3)
    pi = old + math.log(ratio)
    found = policy_loss(pi, pi_old=old, tokens=known(mu, tensor(advantage)), objective=OBJECTIVE)
    assert float(found) == pytest.approx(-math.exp(0.3) * gain / 10.0, rel=1e-5)


def test_kl_by_hand() -> None:
    pi, reference = tensor(-1.0), tensor(-1.5)
    found = policy_loss(pi, pi_old=pi, tokens=known(pi, tensor(0.0)), objective=WITH_KL, reference=reference)
    assert float(found) == pytest.approx(0.5 * (math.exp(-0.5) + 0.5 - 1) / 10.0, rel=1e-5)
    with pytest.raises(ValueError, match="reference"):
        policy_loss(pi, pi_old=pi, tokens=known(pi, pi), objective=WITH_KL)


def test_parts_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    pi, old, mu, advantage = (-3 * torch.rand(12, generator=generator) for _ in range(4))
    whole = policy_loss(pi, pi_old=old, tokens=known(mu, advantage), objective=OBJECTIVE)
    parts = [
        policy_loss(pi[part], pi_old=old[part], tokens=known(mu, advantage)[part], objective=OBJECTIVE)
        for part in (slice(0, 5), slice(5, 12))
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-5)


def test_gradient_against_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    pi, mu, reference = (-2 * torch.rand(40, generator=generator, dtype=torch.float64) for _ in range(3))
    old = pi + 0.4 * (torch.rand(40, generator=generator, dtype=torch.float64) - 0.5)
    tokens = known(mu, torch.randn(40, generator=generator, dtype=torch.float64))

    def loss(values: Tensor) -> Tensor:
        return policy_loss(values, pi_old=old, tokens=tokens, objective=WITH_KL, reference=reference)

    leaf = pi.clone().requires_grad_()
    loss(leaf).backward()
    step = 1e-6
    for index in range(len(pi)):
        shift = torch.zeros_like(pi)
        shift[index] = step
        slope = float(loss(pi + shift) - loss(pi - shift)) / (2 * step)
        assert float(leaf.grad[index]) == pytest.approx(slope, abs=1e-8)


def test_no_gradient_through_old_reference_or_weights() -> None:
    pi, old, reference = (tensor(-1.0).requires_grad_() for _ in range(3))
    mu = tensor(-1.2).requires_grad_()
    policy_loss(pi, pi_old=old, tokens=known(mu, tensor(1.0)), objective=WITH_KL, reference=reference).backward()
    assert pi.grad is not None
    assert old.grad is None
    assert reference.grad is None
    assert mu.grad is None


def test_at_the_first_pass_the_detached_policy_is_the_old_one() -> None:
    pi = tensor(-1.0, -2.0).requires_grad_()
    tokens = known(tensor(-1.1, -1.9), tensor(1.0, -0.5))
    policy_loss(pi, pi_old=pi.detach(), tokens=tokens, objective=OBJECTIVE).backward()
    expected = [-math.exp(0.1) * 1.0 / 10, math.exp(-0.1) * 0.5 / 10]
    np.testing.assert_allclose(pi.grad.numpy(), expected, rtol=1e-5)


@given(claim=claims, pi=nats, old=nats, advantage=st.floats(-5, 5, width=32, allow_subnormal=False))
def test_a_claim_moves_neither_loss_nor_gradient_beyond_delta(
    claim: float, pi: float, old: float, advantage: float
) -> None:
    """Between any claim and the truth lies a factor of at most exp(delta), and never a change of sign."""
    losses, slopes = [], []
    for word in (claim, old):
        leaf = tensor(pi).requires_grad_()
        loss = policy_loss(leaf, pi_old=tensor(old), tokens=known(tensor(word), tensor(advantage)), objective=OBJECTIVE)
        loss.backward()
        losses.append(float(loss.detach()))
        slopes.append(float(leaf.grad))
    for moved, truth in (losses, slopes):
        assert moved * truth >= 0
        slack = 1e-4 * abs(truth) + 1e-30
        assert abs(truth) * math.exp(-0.4) - slack <= abs(moved) <= abs(truth) * math.exp(0.4) + slack


def test_clipped_tokens_are_those_without_gradient() -> None:
    pi = (tensor(-1.0) + torch.log(tensor(0.5, 0.9, 1.2, 1.5))).repeat(2)
    old = torch.full((8,), -1.0)
    advantage = torch.cat([torch.ones(4), -torch.ones(4)])
    leaf = pi.clone().requires_grad_()
    policy_loss(leaf, pi_old=old, tokens=known(old, advantage), objective=OBJECTIVE).backward()
    assert torch.equal(is_clipped(pi, pi_old=old, advantage=advantage, objective=OBJECTIVE), leaf.grad == 0)
    assert is_clipped(pi, pi_old=old, advantage=advantage, objective=OBJECTIVE).sum() == 2
