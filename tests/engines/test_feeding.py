"""Work that comes and goes while an engine runs: nothing is lost, doubled, or drawn differently for it."""

from __future__ import annotations

from tests.engines.asks import STOP, begun_from, group, random_groups
from tests.engines.judge import is_prefix


def places(drawn):
    return sorted((one.key, one.index) for one in drawn)


def asked(requests):
    return sorted((request.key, sample.index) for request in requests for sample in request.samples)


def test_an_idle_engine_has_nothing_to_say(subject):
    assert subject.backend.in_flight == 0
    assert subject.backend.step() == []
    assert subject.backend.drop() == []


def test_more_is_added_while_others_run(subject):
    requests = random_groups(6, prompts=[12, 40, 3, 25, 18, 7], samples=3, max_new_tokens=20, stop=STOP)
    rollouts = []
    for request in requests:
        before = subject.backend.in_flight
        subject.backend.add([request])
        assert subject.backend.in_flight == before + 3
        rollouts += subject.backend.step()
    rollouts += subject.rest()
    assert places(rollouts) == asked(requests)
    subject.judge.agree(requests, rollouts)


def test_the_company_changes_rounding_at_most(subject):
    requests = random_groups(7, prompts=[12, 12, 40, 3], samples=3, max_new_tokens=12, stop=STOP)
    for request in requests:
        alone = subject.run([request])
        assert places(alone) == asked([request])
        subject.judge.agree([request], alone)
    subject.judge.agree(requests, subject.run(requests))


def test_a_long_sample_does_not_hold_up_the_short_ones_behind_it(subject):
    """Continuous: what ends early is told early, and makes room."""
    long = group(0, [1] * 9, seeds=[1], max_new_tokens=300)
    short = [group(key, [key] * 5, seeds=[key], max_new_tokens=2) for key in range(1, 4)]
    subject.backend.add([long])
    subject.backend.add(short)
    order = []
    while subject.backend.in_flight:
        order += [rollout.key for rollout in subject.backend.step()]
    assert sorted(order) == [0, 1, 2, 3]
    if subject.name not in {"reference", "scripted"}:  # which work one after the other
        assert order[-1] == 0


def test_dropped_samples_give_back_what_they_have(subject):
    requests = random_groups(8, prompts=[10, 35, 22], samples=4, max_new_tokens=60, stop=STOP[:2])
    short = group(9, [3, 4, 5], seeds=[1, 2], max_new_tokens=3)
    subject.backend.add([short, *requests])
    done = []
    while not done:
        done += subject.backend.step()
    partials = subject.backend.drop()
    assert subject.backend.in_flight == 0
    assert places([*done, *partials]) == asked([short, *requests])
    for partial in partials:
        assert len(partial.tokens) == len(partial.logprobs)
        (request,) = (request for request in (short, *requests) if request.key == partial.key)
        assert len(partial.tokens) < request.max_new_tokens
        assert not set(partial.tokens.tolist()) & request.stop
    subject.judge.agree([short, *requests], [*done, *partials])
    assert subject.backend.step() == []


def test_after_a_drop_the_same_keys_start_cleanly(subject):
    requests = random_groups(9, prompts=[10, 35], samples=3, max_new_tokens=30)
    whole = {(rollout.key, rollout.index): rollout for rollout in subject.run(requests)}
    subject.backend.add(requests)
    subject.backend.step()
    dropped = subject.backend.drop()
    if subject.name in {"reference", "scripted", "transformers"}:  # float32: no rounding that could tip a draw
        assert all(is_prefix(partial, whole[partial.key, partial.index]) for partial in dropped)
    again = subject.run(requests)
    assert places(again) == asked(requests)
    subject.judge.agree(requests, again)


def test_what_was_dropped_is_gone_on_with(subject):
    (request,) = random_groups(10, prompts=[24], samples=4, max_new_tokens=40)
    subject.backend.add([request, group(1, [5] * 4, seeds=[1], max_new_tokens=5)])
    done = subject.backend.step()
    partials = {partial.index: partial.tokens for partial in subject.backend.drop() if partial.key == 0}
    left = [sample for sample in request.samples if sample.index in partials]
    assert len(left) + sum(rollout.key == 0 for rollout in done) == 4
    again = begun_from(
        group(0, request.prompt.tolist(), seeds=[sample.seed for sample in left], max_new_tokens=40),
        [partials[sample.index] for sample in left],
    )
    rest = subject.run([again])
    assert {rollout.index: len(rollout.tokens) for rollout in rest} == {
        place: 40 - len(sample.begun) for place, sample in enumerate(again.samples)
    }
    subject.judge.agree([again], rest)


def test_many_drops_leave_nothing_behind(subject):
    for turn in range(6):
        subject.backend.add(random_groups(20 + turn, prompts=[4, 50], samples=2, max_new_tokens=50))
        if turn % 3:
            subject.backend.step()
        subject.backend.drop()
        assert subject.backend.in_flight == 0
    requests = random_groups(40, prompts=[4, 50], samples=2, max_new_tokens=10)
    subject.judge.agree(requests, subject.run(requests))
