"""The decode loop against the plainest possible one: every token recomputed alone, drawn with the numpy reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollmesh_node.engine import decoding
from rollmesh_node.engine.backend import Stats
from rollmesh_node.engine.decoding import Decoder
from rollmesh_peer.models.architecture import MODEL_TYPES
from rollmesh_peer.models.margins import Claim, recompute
from tests.unit.engine.requests import group, random_groups
from tests.unit.models.tiny import naive_generate, naive_logprobs, random_model

STOP = [65, 70, 80, 90, 100, 110, 120, 30]


def decode(model, groups):
    stats = Stats()
    return list(Decoder(model, groups, stats=stats).run()), stats


def check(model, groups):
    """Compare every rollout of a batch with the naive one."""
    rollouts, stats = decode(model, groups)
    assert len(rollouts) == sum(len(g.samples) for g in groups)
    for rollout in rollouts:
        request = groups[rollout.key]
        expected = naive_generate(
            model,
            request.prompt,
            seed=request.samples[rollout.index].seed,
            max_new_tokens=request.max_new_tokens,
            stop=request.stop,
        )
        assert rollout.tokens.tolist() == expected
        exact = naive_logprobs(model, [request.prompt], [rollout.tokens])
        torch.testing.assert_close(torch.from_numpy(rollout.logprobs), exact, atol=3e-4, rtol=0)
    return rollouts, stats


@pytest.mark.parametrize("shared", [0, 15, 16, 20])
def test_prompts_of_many_lengths_with_a_common_beginning(tiny, shared):
    check(tiny.fp32, random_groups(1, prompts=[21, 40, 33, 22], samples=3, stop=STOP, shared=shared))


def test_equal_prompts_in_two_groups(tiny):
    first, second = random_groups(2, prompts=[30, 30], samples=2, shared=0)
    twin = group(1, first.prompt.tolist(), seeds=[s.seed for s in second.samples])
    check(tiny.fp32, [first, twin])


def test_one_prompt_that_begins_another(tiny):
    prompt = list(range(40, 80))
    check(
        tiny.fp32,
        [group(0, prompt, seeds=[1, 2]), group(1, prompt[:20], seeds=[3, 4]), group(2, prompt[:1], seeds=[5])],
    )


def test_a_prompt_of_one_token(tiny):
    check(tiny.fp32, [group(0, [7], seeds=[1, 2, 3])])


def test_rows_leave_as_they_end(tiny):
    """Many rows with many stop tokens: rows end at different steps, and the batch shrinks several times."""
    dropped = []
    original = decoding.GrowingCache.drop

    def spy(cache, moves, *, rows):
        dropped.append(rows)
        original(cache, moves, rows=rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding.GrowingCache, "drop", spy)
        requests = random_groups(3, prompts=[18, 25, 19], samples=8, max_new_tokens=24, stop=range(60))
        check(tiny.fp32, requests)
    assert len(dropped) >= 3
    assert dropped == sorted(dropped, reverse=True)


def test_rollouts_come_at_the_step_that_ends_them(tiny):
    requests = random_groups(4, prompts=[10, 10], samples=6, max_new_tokens=20, stop=range(60))
    rollouts, _ = decode(tiny.fp32, requests)
    lengths = [len(rollout.tokens) for rollout in rollouts]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_completions_longer_than_the_first_room(tiny, monkeypatch):
    monkeypatch.setattr(decoding, "FIRST_COLUMNS", 3)
    check(tiny.fp32, random_groups(5, prompts=[12, 5], samples=2, max_new_tokens=30))


@pytest.mark.parametrize("elements", [1, 100, 500])
def test_a_prefill_in_pieces(tiny, monkeypatch, elements):
    monkeypatch.setattr(decoding, "MASK_ELEMENTS", elements)
    check(tiny.fp32, random_groups(6, prompts=[33, 20, 25], samples=2, shared=17))


def test_no_query_sees_nothing(tiny, monkeypatch):
    """Kernels differ in what they make of a row of -inf; padding must not depend on it."""
    masks = []
    original = Decoder._forward

    def spy(decoder, ids, *, positions, mask):
        masks.append(mask)
        return original(decoder, ids, positions=positions, mask=mask)

    monkeypatch.setattr(Decoder, "_forward", spy)
    decode(tiny.fp32, random_groups(9, prompts=[4, 20, 11], samples=2))
    assert len(masks) == 10
    assert all((mask.amax(-1) == 0).all() for mask in masks)


def test_the_prefill_computes_shared_tokens_once(tiny):
    _, stats = decode(tiny.fp32, random_groups(7, prompts=[30, 32], samples=8, shared=20))
    assert stats.prompt_tokens == 20 + 10 + 12
    assert stats.steps == 9
    assert stats.tokens == 160


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_type_is_decoded(model_type):
    model = random_model(model_type)
    requests = [group(key, range(key + 3, 30 + 2 * key), seeds=[1, 2], max_new_tokens=6) for key in range(3)]
    check(model, requests)


def test_bf16_passes_the_audit(tiny):
    requests = random_groups(8, prompts=[20, 31, 26], samples=8, max_new_tokens=16, stop=STOP, shared=16)
    rollouts, _ = decode(tiny.bf16, requests)
    claims = [
        Claim(prompt=requests[r.key].prompt, completion=r.tokens, seed=requests[r.key].samples[r.index].seed)
        for r in rollouts
    ]
    found = recompute(tiny.bf16, claims)
    margins = np.concatenate([one.margins for one in found])
    assert (margins == 0).mean() > 0.9
    assert margins.max() < 0.5
    gaps = np.abs(np.concatenate([one.logprobs for one in found]) - np.concatenate([r.logprobs for r in rollouts]))
    assert np.median(gaps) < 0.05
