"""Audits of a mixture of experts: a token goes to its own experts, packed or not; rounding may tip a near tie."""

from __future__ import annotations

import numpy as np
import pytest

from rollmesh_peer.models.loader import load_model
from rollmesh_peer.models.margins import Claim, recompute
from tests.engines.models import VOCABULARY, make_weights
from tests.unit.models.tiny import naive_generate, naive_logprobs, random_ids

TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The same mixture in float32 and in bf16."""
    weights = make_weights("qwen3_moe", tmp_path_factory.mktemp("mixture") / "image", seed=1)
    return [
        load_model(weights.config, layout=weights.layout, image=weights.image, arithmetic=arithmetic)
        for arithmetic in ("float32", "bfloat16")
    ]


@pytest.fixture(scope="module")
def claims(models):
    """Honest completions of the bf16 model, each drawn alone: 4 prompts, 4 samples each."""
    return [
        Claim(
            prompt=prompt,
            completion=np.array(
                naive_generate(models[1], prompt, seed=seed, max_new_tokens=TOKENS, stop=frozenset()), dtype=np.uint32
            ),
            seed=seed,
        )
        for number, prompt in enumerate(random_ids(2, [12, 40, 25, 3], vocabulary=VOCABULARY))
        for seed in range(number * 10, number * 10 + 4)
    ]


def test_packed_log_probs_are_those_of_each_alone(models, claims):
    """In float32, where no rounding is large enough to tip a choice of experts."""
    packed = recompute(models[0], claims)
    for one, claim in zip(packed, claims, strict=True):
        alone = naive_logprobs(models[0], [claim.prompt], [claim.completion]).numpy()
        np.testing.assert_allclose(one.logprobs, alone, atol=1e-3)


def test_honest_draws_of_bf16_pass_in_any_packing(models, claims):
    """Nearly all margins are zero; where experts nearly tied, a few are as large as another expert makes them."""
    for model in models:
        margins = np.concatenate([one.margins for one in recompute(model, claims)])
        assert (margins == 0).mean() > 0.9
        assert np.quantile(margins, 0.99) < 1


def test_draws_with_other_seeds_show(models, claims):
    forged = [Claim(prompt=claim.prompt, completion=claim.completion, seed=claim.seed + 1000) for claim in claims]
    for model in models:
        assert (np.concatenate([one.margins for one in recompute(model, forged)]) > 1).mean() > 0.3
