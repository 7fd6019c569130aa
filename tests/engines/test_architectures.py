"""Every architecture that a run may have, in every engine: the same tokens, swaps and segments."""

from __future__ import annotations

import pytest

from tests.engines.asks import STOP, begun_from, random_groups
from tests.engines.models import ARCHITECTURES

OTHERS = [kind for kind in ARCHITECTURES if kind != "llama"]  # which all the other tests are about
CASES = [(name, kind) for name in ("reference", "transformers-bf16") for kind in OTHERS]
# vLLM starts again for each, and its own tests go through all types; here is the one that differs most.
CASES += [("vllm", "gemma")]


@pytest.mark.parametrize(
    ("name", "model_type"), [pytest.param(*case, marks=pytest.mark.vllm if "vllm" in case else ()) for case in CASES]
)
def test_tokens_swaps_and_segments(subject_of, name, model_type):
    one = subject_of(name, model_type)
    requests = random_groups(13, prompts=[1, 30, 17], samples=3, max_new_tokens=24, stop=STOP[:2])
    rollouts = one.run(requests)
    assert len(rollouts) == 9
    one.judge.agree(requests, rollouts)
    one.swap(one.pair.second)
    found = {(rollout.key, rollout.index): rollout.tokens for rollout in rollouts}
    again = [
        begun_from(request, [_first_half(found[request.key, sample.index]) for sample in request.samples])
        for request in requests
    ]
    rest = one.run(again)
    one.judge.agree(again, rest)
    assert one.judge_of(one.pair.first).differ(again, rest)


def _first_half(tokens):
    return tokens[: len(tokens) // 2]
