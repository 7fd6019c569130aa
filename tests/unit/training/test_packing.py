"""Shared beginnings change what is computed, not what comes out: against each sample alone, for every architecture."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh_learner.training import packing
from rollmesh_learner.training.batch import Sample
from rollmesh_learner.training.forest import grow
from rollmesh_peer.models.architecture import MODEL_TYPES
from tests.unit.training.models import random_model
from tests.unit.training.samples import random_samples, sample


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def alone(model: PreTrainedModel, samples: Sequence[Sample]) -> Tensor:
    """The same states from one plain forward pass per sample, in transformers' own attention."""
    model.set_attn_implementation("sdpa")
    found = []
    for each in samples:
        ids = torch.from_numpy(each.read.astype("int64"))[None]
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        found.append(states[0, len(each.prompt) - 1 :])
    return torch.cat(found)


def gradients(model: PreTrainedModel, states: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weight = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states).sin()
    (states * weight).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


DENSE = [name for name in MODEL_TYPES if name != "qwen3_moe"]
"""Grouped products of experts do not come in float64, in which these tests compute; tests/unit/models has them."""


@pytest.mark.parametrize("model_type", DENSE)
def test_states_and_gradients_equal_those_of_each_sample_alone(model_type: str) -> None:
    model = random_model(model_type)
    samples = random_samples(0)
    plain = alone(model, samples)
    expected = gradients(model, plain)
    packing.enable(model)
    states, computed = packing.completion_states(model, samples)
    assert computed == len(grow(samples).tokens) < sum(len(s.read) for s in samples)
    torch.testing.assert_close(states, plain, rtol=1e-4, atol=1e-4)
    found = gradients(model, states)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize(("block_nodes", "small_scores"), [(1, 10**9), (8, 10**9), (10**9, 10**9), (8, 0), (10**9, 0)])
def test_every_way_to_cut_gives_the_same(monkeypatch: pytest.MonkeyPatch, block_nodes: int, small_scores: int) -> None:
    """Blocks of one node, of all nodes, and both ways to compute one."""
    model = random_model("llama")
    samples = random_samples(1)
    plain = alone(model, samples)
    expected = gradients(model, plain)
    packing.enable(model)
    monkeypatch.setattr(packing, "BLOCK_NODES", block_nodes)
    monkeypatch.setattr(packing, "SMALL_SCORES", small_scores)
    states, _ = packing.completion_states(model, samples)
    torch.testing.assert_close(states, plain, rtol=1e-4, atol=1e-4)
    for name, gradient in gradients(model, states).items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4 * scale)


def test_a_sibling_changes_nothing() -> None:
    """The test that the comparison can fail: without the plan, a sample would see the one before it."""
    model = random_model("llama")
    packing.enable(model)
    one, other = sample([1, 2, 3], [4, 5, 6]), sample([1, 2, 3], [7, 8, 9])
    (both, _), (single, _) = (packing.completion_states(model, s) for s in ([one, other], [other]))
    torch.testing.assert_close(both[3:], single, rtol=1e-5, atol=1e-5)
    forest = grow([one, other])
    leaky = model.base_model(
        input_ids=torch.from_numpy(forest.tokens)[None], position_ids=torch.from_numpy(forest.positions)[None],
        use_cache=False,
    ).last_hidden_state[0, forest.sources]  # fmt: skip
    assert float((leaky[4:] - single[1:]).detach().abs().max()) > 0.01


def test_without_a_plan_the_model_computes_as_before() -> None:
    model = random_model("llama")
    ids = torch.randint(0, 250, (2, 9))
    plain = model(ids).logits
    packing.enable(model)
    torch.testing.assert_close(model(ids).logits, plain, rtol=1e-5, atol=1e-5)
