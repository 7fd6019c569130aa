"""AdamW on masters: against torch's own on a float32 model, small steps that bfloat16 forgets, and exact restoring."""

import math

import pytest
import torch
from torch import nn

from rollmesh_learner.training.optimiser import MasterOptimiser
from rollmesh_learner.training.settings import TrainingSettings
from rollmesh_protocol.errors import ChildFailed


def linear(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 5, bias=False).to(torch.bfloat16).to(dtype)


def settings(**chosen: object) -> TrainingSettings:
    return TrainingSettings(**({"lr": 1e-2, "weight_decay": 0.1, "max_gradient_norm": 1e9} | chosen))


def gradient(seed: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))


def push(model: nn.Linear, value: torch.Tensor) -> None:
    """Send ``value`` backward as the gradient of the weight, as a model's backward pass would."""
    (model.weight * value.to(model.weight.dtype)).sum().backward()


def test_equals_torch_on_a_float32_model() -> None:
    plain, ours = linear(torch.float32), linear(torch.float32)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    masters = MasterOptimiser(dict(ours.named_parameters()), settings=settings())
    for step in range(5):
        plain.zero_grad()
        push(plain, gradient(step))
        adam.step()
        push(ours, gradient(step))
        norm = masters.step()
        assert norm == pytest.approx(float(gradient(step).norm()), rel=1e-5)
    torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-6, atol=1e-7)


def test_gradients_add_up_in_float32_and_leave_the_model() -> None:
    model = linear(torch.bfloat16)
    masters = MasterOptimiser(dict(model.named_parameters()), settings=settings())
    push(model, torch.full((5, 6), 256.0))
    for _ in range(16):
        push(model, torch.full((5, 6), 0.5))  # lost one by one in bfloat16
    assert model.weight.grad is None
    assert torch.equal(masters.masters["weight"].grad, torch.full((5, 6), 264.0))
    masters.clear()
    assert not masters.masters["weight"].grad.any()


def test_masters_remember_what_bfloat16_cannot_show() -> None:
    model = linear(torch.bfloat16)
    before = model.weight.detach().clone()
    masters = MasterOptimiser(dict(model.named_parameters()), settings=settings(lr=1e-5, weight_decay=0.0))
    push(model, torch.ones(5, 6))
    masters.step()
    assert (model.weight == before).float().mean() > 0.8
    for _ in range(200):
        push(model, torch.ones(5, 6))
        masters.step()
    assert (model.weight != before).all()
    assert torch.equal(model.weight, masters.masters["weight"].to(torch.bfloat16))


def test_large_gradients_are_scaled_to_the_bound() -> None:
    """SGD would show it directly; Adam's first moment does."""
    model = linear(torch.float32)
    masters = MasterOptimiser(dict(model.named_parameters()), settings=settings(max_gradient_norm=0.5))
    push(model, 100 * gradient(0))
    norm = masters.step()
    assert norm == pytest.approx(100 * float(gradient(0).norm()), rel=1e-5)
    moment = masters.state()["weight.exp_avg"]
    assert float(moment.norm()) == pytest.approx(0.1 * 0.5, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = linear(torch.bfloat16)
    masters = MasterOptimiser(dict(model.named_parameters()), settings=settings())
    before = model.weight.detach().clone()
    push(model, torch.full((5, 6), bad))
    assert not math.isfinite(masters.step())
    assert torch.equal(model.weight, before)
    assert masters.updates == 0
    assert masters.state() == {}
    push(model, gradient(0))
    assert math.isfinite(masters.step())


def test_warm_up_is_linear() -> None:
    chosen = settings(lr=1.0, warmup_steps=4)
    assert [chosen.lr_at(update) for update in (1, 2, 4, 5, 9)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert settings(lr=1.0).lr_at(1) == 1.0


def test_restored_it_goes_on_exactly() -> None:
    one = linear(torch.bfloat16)
    masters = MasterOptimiser(dict(one.named_parameters()), settings=settings())
    for step in range(3):
        push(one, gradient(step))
        masters.step()
    kept = {n: m.detach().clone() for n, m in masters.masters.items()}
    moments = {n: m.clone() for n, m in masters.state().items()}

    other = linear(torch.bfloat16)
    again = MasterOptimiser(dict(other.named_parameters()), settings=settings())
    again.restore(masters=kept, state=moments, updates=masters.updates)
    for step in range(3, 7):
        for model, optimiser in ((one, masters), (other, again)):
            push(model, gradient(step))
            optimiser.step()
        assert torch.equal(masters.masters["weight"], again.masters["weight"])
    assert again.updates == 7


def test_what_does_not_fit_is_refused() -> None:
    masters = MasterOptimiser(dict(linear(torch.bfloat16).named_parameters()), settings=settings())
    good = {"weight": torch.zeros(5, 6)}
    for wrong in ({}, {"weight": torch.zeros(5, 5)}, {"weight": torch.zeros(5, 6, dtype=torch.bfloat16)}):
        with pytest.raises(ChildFailed):
            masters.restore(masters=wrong, state={}, updates=0)
    with pytest.raises(ChildFailed, match="incomplete"):
        masters.restore(masters=good, state={"weight.exp_avg": torch.zeros(5, 6)}, updates=1)
