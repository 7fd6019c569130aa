"""Weights that change: a swap is as good as a fresh load, and an engine without whole weights draws nothing."""

from __future__ import annotations

import pytest

from rollmesh_node.engine import memory
from rollmesh_protocol.errors import ChildFailed, HostError, Refused
from tests.engines.asks import STOP, begun_from, group, random_groups
from tests.engines.conftest import MAKERS, MODELS, params

WANTED = random_groups(11, prompts=[40, 9, 40], samples=3, max_new_tokens=16, stop=STOP)


def test_a_swap_is_as_good_as_a_fresh_load(subject):
    """The same prompts before and after, so that keys and values kept from the old weights would show."""
    first, second = subject.pair.first, subject.pair.second
    before = subject.run(WANTED)
    subject.judge.agree(WANTED, before)
    subject.swap(second)
    swapped = subject.run(WANTED)
    assert subject.judge_of(first).differ(WANTED, swapped)
    subject.judge.agree(WANTED, swapped)
    subject.load(second)
    loaded = subject.run(WANTED)
    subject.judge.agree(WANTED, loaded)
    subject.swap(first)
    subject.judge.agree(WANTED, subject.run(WANTED))


def test_a_rollout_of_two_segments(subject):
    """Half of it under the first weights, the rest under the second, each exactly recomputable."""
    (request,) = random_groups(12, prompts=[20], samples=3, max_new_tokens=32)
    whole = sorted(subject.run([request]), key=lambda rollout: rollout.index)
    subject.judge.agree([request], whole)
    subject.swap(subject.pair.second)
    again = begun_from(request, [rollout.tokens[:16] for rollout in whole])
    rest = subject.run([again])
    subject.judge.agree([again], rest)
    assert subject.judge_of(subject.pair.first).differ([again], rest)


def test_a_swap_to_the_same_weights_changes_nothing(subject):
    subject.swap(subject.pair.first)
    subject.judge.agree(WANTED, subject.run(WANTED))


def test_weights_do_not_change_under_samples_in_flight(model):
    model.backend.add([group(0, [1, 2, 3], seeds=[5], max_new_tokens=200)])
    with pytest.raises(ChildFailed, match="in flight"):
        model.backend.swap(model.pair.second.image)
    model.backend.drop()
    model.judge.agree(WANTED, model.run(WANTED))


def test_after_a_failed_swap_nothing_is_drawn_until_whole_weights_are_loaded(model, tmp_path):
    short = tmp_path / "image"
    short.write_bytes(model.pair.first.image.read_bytes()[:-64])
    for image in (tmp_path / "none", short):
        with pytest.raises((ChildFailed, OSError)):
            model.swap_to(image)
    with pytest.raises(ChildFailed) as refusal:
        model.backend.add([group(0, [1], seeds=[1])])
    assert refusal.value.code == "child.weights"
    model.load(model.pair.second)
    model.judge.agree(WANTED, model.run(WANTED))


@pytest.mark.parametrize("name", params(MAKERS))
def test_nothing_is_drawn_without_weights(fresh, name):
    backend = fresh(name)
    assert backend.in_flight == 0
    with pytest.raises(ChildFailed) as refusal:
        backend.add([group(0, [1], seeds=[3])])
    assert refusal.value.code == "child.weights"


@pytest.mark.parametrize("name", params([name for name in MODELS if name != "reference"]))
def test_too_little_memory_is_refused_with_the_numbers(fresh, pairs, monkeypatch, name):
    backend = fresh(name)
    monkeypatch.setattr(memory, "free_bytes", lambda **_: 100_000_000)
    with pytest.raises(HostError, match=r"0\.1 GB.* free") as refusal:
        backend.load(pairs("llama").first)
    assert "GB" in refusal.value.detail
    with pytest.raises(ChildFailed):
        backend.add([group(0, [1], seeds=[3])])


@pytest.mark.parametrize("name", params(MODELS))
def test_an_architecture_that_is_not_loaded_is_refused_by_name(fresh, pairs, name):
    weights = pairs("llama").first
    for odd in ("gemma2", "mixtral", "bert"):
        other = type(weights)(config={**weights.config, "model_type": odd}, layout=weights.layout, image=weights.image)
        with pytest.raises(Refused, match=odd):
            fresh(name).load(other)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (group(1, [320], seeds=[1]), "vocabulary"),
        (group(1, [2**31], seeds=[1]), "vocabulary"),
        (group(1, [1] * 2041, seeds=[1], max_new_tokens=8), "fit"),
        (begun_from(group(1, [1], seeds=[1]), [[5, 320]]), "vocabulary"),
        (begun_from(group(1, [1], seeds=[1], max_new_tokens=2), [[5, 6]]), "begun"),
        (group(1, [], seeds=[1]), "empty"),
    ],
    ids=["unknown token", "huge token", "too long", "begun with an unknown token", "begun and over", "no prompt"],
)
def test_a_wrong_request_is_refused_before_anything_is_taken(model, wrong, why):
    right = group(0, [1, 2, 3], seeds=[1, 2], max_new_tokens=4)
    with pytest.raises(ChildFailed, match=why) as refusal:
        model.backend.add([right, wrong])
    assert refusal.value.code == "child.request"
    assert model.backend.in_flight == 0
    model.judge.agree([right], model.run([right]))
