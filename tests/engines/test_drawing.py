"""What every backend draws: the tokens and log-probs that follow from weights, prompt and seed, and where they end."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engines.asks import STOP, begun_from, group, random_groups
from tests.engines.models import POSITIONS, VOCABULARY

TEXTS = {
    "one token": [7],
    "one special token": [258],
    "a chat": [257, *b"user\nWhat is 2 + 3?", 258, 10, 257, *b"assistant\n"],
    "unicode": list(
        "na\u00efve \u65e5\u672c\u8a9e \U0001f642\U0001f469\u200d\U0001f52c \u200f\u05e2 \u0000\ufffd".encode()
    ),
    "special tokens only": [256, 257, 258, 258, 257, 256, 259],
    "ids that no text has": [VOCABULARY - 1, VOCABULARY - 2, 300],
    "one token again and again": [42] * 100,
}


def places(rollouts):
    return sorted((rollout.key, rollout.index) for rollout in rollouts)


def asked(requests):
    return sorted((request.key, sample.index) for request in requests for sample in request.samples)


def test_tokens_and_logprobs_are_those_of_weights_and_seeds(subject):
    requests = random_groups(1, prompts=[5, 30, 17, 64, 33], samples=4, max_new_tokens=24, stop=STOP)
    rollouts = subject.run(requests)
    assert places(rollouts) == asked(requests)
    for rollout in rollouts:
        assert rollout.tokens.dtype == np.uint32
        assert rollout.logprobs.dtype == np.float32
        assert len(rollout.logprobs) == len(rollout.tokens)
        assert np.isfinite(rollout.logprobs).all()
        assert (rollout.logprobs <= 0).all()
        assert rollout.tokens.max() < VOCABULARY
    subject.judge.agree(requests, rollouts)


def test_the_judge_knows_other_seeds_from_these(subject):
    """The suite's own scales: what was drawn with other seeds must weigh as wrong."""
    requests = random_groups(2, prompts=[20, 9], samples=4, max_new_tokens=12)
    others = [group(r.key, r.prompt.tolist(), seeds=range(77, 81), max_new_tokens=12) for r in requests]
    drawn = subject.run(others)
    subject.judge.agree(others, drawn)
    with pytest.raises(AssertionError):
        subject.judge.agree(requests, drawn)
    assert subject.judge.differ(requests, drawn)


@pytest.mark.parametrize("text", TEXTS)
def test_any_prompt_of_token_ids_will_do(subject, text):
    requests = [group(0, TEXTS[text], seeds=[1, 2, 3], max_new_tokens=10, stop=STOP)]
    subject.judge.agree(requests, subject.run(requests))


def test_a_prompt_that_fills_the_model(subject):
    prompt = np.random.default_rng(3).integers(0, 256, POSITIONS - 6).tolist()
    requests = [group(0, prompt, seeds=[4], max_new_tokens=6), group(1, prompt[:1500], seeds=[5], max_new_tokens=4)]
    rollouts = subject.run(requests)
    assert {rollout.key: len(rollout.tokens) for rollout in rollouts} == {0: 6, 1: 4}
    subject.judge.agree(requests, rollouts)


def test_a_rollout_ends_with_its_first_stop_token_or_at_its_length(subject):
    requests = random_groups(4, prompts=[8] * 4, samples=6, max_new_tokens=16, stop=STOP)
    rollouts = subject.run(requests)
    for rollout in rollouts:
        stops = np.isin(rollout.tokens, STOP)
        assert not stops[:-1].any()
        assert (rollout.finish == "stop") == stops[-1]
        assert stops[-1] or len(rollout.tokens) == 16
    assert {rollout.finish for rollout in rollouts} == {"stop", "length"}


def test_a_stop_token_at_the_length_limit_is_a_stop(model):
    (free,) = model.run([group(0, [1, 2, 3], seeds=[5], max_new_tokens=4)])
    assert free.finish == "length"
    last = next(at for at in range(3, -1, -1) if free.tokens[at] not in free.tokens[:at])
    (stopped,) = model.run([
        group(0, [1, 2, 3], seeds=[5], max_new_tokens=last + 1, stop=[int(free.tokens[last])])
    ])  # fmt: skip
    assert stopped.tokens.tolist() == free.tokens[: last + 1].tolist()
    assert stopped.finish == "stop"


def test_markers_that_the_request_does_not_name_do_not_stop(model):
    """The end of a text is what the lease says, not what the model's config says."""
    requests = [group(key, [40 + key] * 5, seeds=range(key * 50, key * 50 + 8), max_new_tokens=32) for key in range(4)]
    rollouts = model.run(requests)
    assert {len(rollout.tokens) for rollout in rollouts} == {32}
    assert any(258 in rollout.tokens[:-1] for rollout in rollouts)
    model.judge.agree(requests, rollouts)


def test_lengths_and_stops_of_groups_are_their_own(subject):
    requests = [
        group(key, [key + 1] * 4, seeds=[9, 10], max_new_tokens=key + 1, stop=STOP if key % 2 else ())
        for key in range(6)
    ]
    rollouts = subject.run(requests)
    assert all(len(rollout.tokens) <= rollout.key + 1 for rollout in rollouts)
    assert all(len(rollout.tokens) == rollout.key + 1 for rollout in rollouts if rollout.key % 2 == 0)
    subject.judge.agree(requests, rollouts)


def test_seeds_are_the_only_difference_between_samples(subject):
    request = group(10**12, [7, 8, 9], seeds=[0, 0, 2**64 - 1, 2**32], max_new_tokens=8)
    rollouts = sorted(subject.run([request]), key=lambda rollout: rollout.index)
    tokens = [rollout.tokens.tolist() for rollout in rollouts]
    assert tokens[0] == tokens[1]
    assert len({tuple(some) for some in tokens}) == 3
    assert {rollout.key for rollout in rollouts} == {10**12}
    subject.judge.agree([request], rollouts)


@pytest.mark.parametrize("kept", [0, 1, 15, 16, 31])
def test_what_has_begun_is_gone_on_with(subject, kept):
    """The recomputed segment: the positions go on, and only new tokens are reported."""
    request = group(0, range(40, 60), seeds=[11, 12, 13], max_new_tokens=32)
    whole = sorted(subject.run([request]), key=lambda rollout: rollout.index)
    again = begun_from(request, [rollout.tokens[:kept] for rollout in whole])
    rest = subject.run([again])
    assert {len(rollout.tokens) for rollout in rest} == {32 - kept}
    assert {rollout.finish for rollout in rest} == {"length"}
    subject.judge.agree([again], rest)


def test_samples_of_a_group_begin_at_different_places(subject):
    request = group(3, range(30), seeds=range(20, 25), max_new_tokens=40, stop=STOP)
    whole = sorted(subject.run([request]), key=lambda rollout: rollout.index)
    again = begun_from(request, [rollout.tokens[: len(rollout.tokens) * at // 5] for at, rollout in enumerate(whole)])
    rest = subject.run([again])
    assert places(rest) == asked([again])
    subject.judge.agree([again], rest)
    for rollout in rest:
        assert (rollout.finish == "stop") == (int(rollout.tokens[-1]) in request.stop)


def test_a_text_of_someone_else_is_gone_on_with_too(model):
    """What has begun was drawn by other weights: the engine conditions on it all the same."""
    foreign = np.random.default_rng(5).integers(0, 60, 20)
    request = begun_from(group(0, [5] * 7, seeds=[1, 2], max_new_tokens=28), [foreign, foreign[:9]])
    model.judge.agree([request], model.run([request]))


def test_a_thousand_tiny_requests(subject):
    requests = [group(key, [key % 256, key // 256], seeds=[key], max_new_tokens=1 + key % 2) for key in range(1000)]
    rollouts = subject.run(requests)
    assert places(rollouts) == asked(requests)
    assert all(len(rollout.tokens) == 1 + rollout.key % 2 for rollout in rollouts)
    some = requests[::13]
    subject.judge.agree(some, [rollout for rollout in rollouts if rollout.key % 13 == 0])


def test_totals_grow_by_what_was_drawn(subject):
    requests = random_groups(5, prompts=[6, 9], samples=3)
    before = vars(subject.backend.stats()).copy()
    rollouts = subject.run(requests)
    after = vars(subject.backend.stats())
    assert after["rollouts"] - before["rollouts"] == 6
    assert after["tokens"] - before["tokens"] == sum(len(rollout.tokens) for rollout in rollouts)
    assert after["prompt_tokens"] > before["prompt_tokens"]
    assert after["steps"] > before["steps"]
