"""Teacher-forced log-probs: packed, padded, chunked or alone, in any order, with gradients or without."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh_peer.models import packing
from rollmesh_peer.models.architecture import MODEL_TYPES
from rollmesh_peer.models.logprobs import completion_logprobs
from tests.unit.models.tiny import naive_logprobs, random_ids, random_model

EXACT = 3e-4
"""Nats of rounding in float32."""


def groups(seed: int, *, prompts: list[int], completions: list[list[int]], vocabulary: int):
    """Samples in mixed order: prompt lengths, and for each the lengths of its completions."""
    heads = random_ids(seed, prompts, vocabulary=vocabulary)
    pairs = [
        (head, tail)
        for number, (head, lengths) in enumerate(zip(heads, completions, strict=True))
        for tail in random_ids(seed + 1 + number, lengths, vocabulary=vocabulary)
    ]
    order = np.random.default_rng(seed).permutation(len(pairs))
    return [pairs[i][0] for i in order], [pairs[i][1] for i in order]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_type_gives_what_it_gives_alone(model_type):
    model = random_model(model_type)
    prompts, completions = groups(1, prompts=[40, 7, 1], completions=[[5, 1, 9, 3], [2, 30], [1, 1, 4]], vocabulary=130)
    found = completion_logprobs(model, prompts, completions)
    torch.testing.assert_close(found, naive_logprobs(model, prompts, completions), atol=EXACT, rtol=0)


@settings(max_examples=25)
@given(data=st.data())
def test_any_mix_gives_what_each_gives_alone(tiny, data):
    prompt_lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    completions = [data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5)) for _ in prompt_lengths]
    prompts, tails = groups(len(prompt_lengths), prompts=prompt_lengths, completions=completions, vocabulary=260)
    chunk = data.draw(st.integers(1, 64))
    found = completion_logprobs(tiny.fp32, prompts, tails, chunk_tokens=chunk)
    torch.testing.assert_close(found, naive_logprobs(tiny.fp32, prompts, tails), atol=EXACT, rtol=0)


@pytest.mark.parametrize(("row", "batch", "worth"), [(1, 8192, 8), (64, 200, 8), (10_000, 8192, 10_000), (1, 1, 8)])
def test_the_layout_of_rows_does_not_matter(tiny, monkeypatch, row, batch, worth):
    monkeypatch.setattr(packing, "ROW_TOKENS", row)
    monkeypatch.setattr(packing, "_WORTH", worth)
    monkeypatch.setattr(packing.batches, "__kwdefaults__", {"batch_tokens": batch})
    prompts, completions = groups(3, prompts=[30, 31], completions=[[9, 12, 1, 4], [3, 3]], vocabulary=260)
    found = completion_logprobs(tiny.fp32, prompts, completions)
    torch.testing.assert_close(found, naive_logprobs(tiny.fp32, prompts, completions), atol=EXACT, rtol=0)


def test_bf16_in_any_batch_stays_within_its_noise(tiny):
    prompts, completions = groups(4, prompts=[50, 20], completions=[[12] * 6, [7] * 3], vocabulary=260)
    together = completion_logprobs(tiny.bf16, prompts, completions)
    alone = torch.cat([completion_logprobs(tiny.bf16, [p], [c]) for p, c in zip(prompts, completions, strict=True)])
    assert together.dtype == torch.float32
    assert (together - alone).abs().median() < 0.05
    assert (together - alone).abs().max() < 0.5


def test_gradients_are_those_of_the_plain_computation(tiny):
    model = random_model("llama").requires_grad_(True)
    prompts, completions = groups(5, prompts=[20, 6], completions=[[4, 7, 2], [5]], vocabulary=130)
    weights = torch.randn(18, generator=torch.Generator().manual_seed(0))

    def gradients(values):
        model.zero_grad()
        (values * weights).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    packed = gradients(completion_logprobs(model, prompts, completions, chunk_tokens=5))
    plain = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
        logprobs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        plain.append(logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0])
    expected = gradients(torch.cat(plain))
    assert packed.keys() == expected.keys()
    for name, gradient in packed.items():
        torch.testing.assert_close(gradient, expected[name], atol=2e-4, rtol=2e-3)


def test_no_more_than_a_chunk_reaches_the_vocabulary(tiny):
    seen = []
    hook = tiny.fp32.lm_head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[0]))
    prompts, completions = groups(6, prompts=[10], completions=[[12] * 5], vocabulary=260)
    completion_logprobs(tiny.fp32, prompts, completions, chunk_tokens=16)
    hook.remove()
    assert sum(seen) == 60
    assert max(seen) <= 16


def test_samples_of_a_prompt_share_it():
    prompt = np.arange(44)
    (batch,) = packing.batches([prompt] * 8, [np.arange(12)] * 8)
    assert batch.ids.shape == (1, 44 + 8 * 11)
    assert sorted(batch.order.tolist()) == list(range(96))


def test_long_completions_do_not_share():
    """All pairs of a shared row are computed: with little to save, the plain causal kernel is quicker."""
    passes = list(packing.batches([np.arange(10)] * 4, [np.arange(300)] * 4))
    assert all(batch.visible is None for batch in passes)


@pytest.mark.parametrize(("prompts", "completions"), [([[]], [[1]]), ([[1]], [[]]), ([[1], [2]], [[1]])])
def test_empty_or_uneven_input_is_an_error(prompts, completions):
    with pytest.raises(ValueError, match="completion"):
        list(packing.batches([np.array(p) for p in prompts], [np.array(c) for c in completions]))
