"""Margins tell an honest completion from any other, whatever it is recomputed with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollmesh_peer.models.margins import Claim, recompute
from rollmesh_protocol import sampling
from tests.unit.models.tiny import naive_generate, naive_logits, naive_logprobs, random_ids


@pytest.fixture(scope="module")
def claims(tiny):
    """Honest completions, drawn token by token with the numpy reference in float32: 3 prompts, 4 samples each."""
    prompts = random_ids(2, [12, 12, 30], vocabulary=260)
    return [
        Claim(
            prompt=prompt,
            completion=np.array(
                naive_generate(tiny.fp32, prompt, seed=seed, max_new_tokens=12, stop=frozenset()), dtype=np.uint32
            ),
            seed=seed,
        )
        for number, prompt in enumerate(prompts)
        for seed in range(number * 10, number * 10 + 4)
    ]


def margins(model, claims):
    return np.concatenate([one.margins for one in recompute(model, claims)])


def test_honest_tokens_have_margin_zero(tiny, claims):
    assert (margins(tiny.fp32, claims) == 0).all()


def test_margins_and_logprobs_are_the_references(tiny, claims):
    edited = [Claim(prompt=claim.prompt, completion=np.roll(claim.completion, 1), seed=claim.seed) for claim in claims]
    found = recompute(tiny.fp32, edited, chunk_tokens=7)
    for one, claim in zip(found, edited, strict=True):
        logits = naive_logits(tiny.fp32, claim.prompt, claim.completion).numpy()
        expected = [
            sampling.sampling_margin(row, claim.seed, position, int(claim.completion[position]))
            for position, row in enumerate(logits)
        ]
        np.testing.assert_allclose(one.margins, expected, atol=1e-3)
        np.testing.assert_allclose(
            one.logprobs, naive_logprobs(tiny.fp32, [claim.prompt], [claim.completion]), atol=1e-3
        )


def test_another_arithmetic_leaves_small_margins(tiny, claims):
    found = margins(tiny.bf16, claims)
    assert (found == 0).mean() > 0.9
    assert found.max() < 0.5


@pytest.mark.parametrize(("tokens", "chunk_tokens"), [(1, 512), (5, 4), (9, 4)])
def test_a_chunk_of_one_token_is_a_chunk_too(tiny, claims, tokens, chunk_tokens):
    """A completion that ends at once, alone in its batch, or what is left over of a longer one."""
    claim = Claim(prompt=claims[0].prompt, completion=claims[0].completion[:tokens], seed=claims[0].seed)
    (found,) = recompute(tiny.fp32, [claim], chunk_tokens=chunk_tokens)
    assert found.margins.shape == found.logprobs.shape == (tokens,)
    assert (found.margins == 0).all()


@pytest.mark.parametrize("batch", [1, 3, 12])
def test_the_batch_changes_nothing_beyond_rounding(tiny, claims, batch):
    found = np.concatenate([margins(tiny.fp32, claims[at : at + batch]) for at in range(0, len(claims), batch)])
    assert found.max() < 1e-3


def test_a_piece_is_what_the_whole_is_there(tiny, claims):
    """Behind the prompt and the tokens before it, with the noise of its own positions."""
    pieces = [
        Claim(prompt=np.append(c.prompt, c.completion[:5]), completion=c.completion[5:], seed=c.seed, first=5)
        for c in claims
    ]
    assert (margins(tiny.fp32, pieces) == 0).all()
    whole, found = recompute(tiny.fp32, claims), recompute(tiny.fp32, pieces)
    for one, piece in zip(whole, found, strict=True):
        np.testing.assert_allclose(piece.logprobs, one.logprobs[5:], atol=1e-3)


def test_another_seed_position_prompt_or_model_shows(tiny, claims):
    wrong_seed = [Claim(prompt=c.prompt, completion=c.completion, seed=c.seed + 1000) for c in claims]
    shifted = [
        Claim(prompt=np.append(c.prompt, c.completion[0]), completion=c.completion[1:], seed=c.seed) for c in claims
    ]
    other_prompt = [Claim(prompt=c.prompt[::-1], completion=c.completion, seed=c.seed) for c in claims]
    for forged in (wrong_seed, shifted, other_prompt):
        assert (margins(tiny.fp32, forged) > 1).mean() > 0.3
    noisy = torch.Generator().manual_seed(0)
    before = tiny.fp32.lm_head.weight.clone()
    with torch.no_grad():
        tiny.fp32.lm_head.weight += torch.randn(before.shape, generator=noisy) * 0.2
        assert (margins(tiny.fp32, claims) > 1).mean() > 0.1
        tiny.fp32.lm_head.weight.copy_(before)
