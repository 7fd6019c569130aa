"""What every backend must do: one suite over all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rollmesh_node.engine.backend import Weights
from rollmesh_node.engine.scripted_backend import ScriptedBackend
from rollmesh_node.engine.transformers_backend import TransformersBackend
from rollmesh_protocol.errors import ChildFailed
from tests.unit.engine.requests import drained, group, random_groups

STOP = [65, 70, 80, 90, 100, 110, 120, 130]


@pytest.fixture(params=["scripted", "transformers"])
def empty(request):
    if request.param == "scripted":
        return ScriptedBackend()
    return TransformersBackend(threads=1, max_rows=7, device="cpu", dtype="float32")


@pytest.fixture
def backend(empty, tiny):
    empty.load(Weights(config=tiny.config, layout=tiny.layout, image=tiny.image))
    return empty


def by_place(rollouts):
    return {(rollout.key, rollout.index): rollout for rollout in rollouts}


def test_every_sample_comes_once_and_well_formed(backend):
    requests = random_groups(1, prompts=[5, 30, 17], samples=4, max_new_tokens=12, stop=STOP)
    rollouts = drained(backend, requests)
    assert sorted((r.key, r.index) for r in rollouts) == [(key, index) for key in range(3) for index in range(4)]
    for rollout in rollouts:
        assert 1 <= len(rollout.tokens) <= 12
        assert rollout.tokens.dtype == np.uint32
        assert rollout.logprobs.dtype == np.float32
        assert len(rollout.logprobs) == len(rollout.tokens)
        assert np.isfinite(rollout.logprobs).all()
        assert (rollout.logprobs <= 0).all()
        assert rollout.tokens.max() < 260


def test_a_rollout_ends_with_its_first_stop_token_or_at_its_length(backend):
    requests = random_groups(2, prompts=[8] * 4, samples=6, max_new_tokens=12, stop=STOP)
    rollouts = drained(backend, requests)
    for rollout in rollouts:
        stops = np.isin(rollout.tokens, STOP)
        assert not stops[:-1].any()
        assert (rollout.finish == "stop") == stops[-1]
        assert stops[-1] or len(rollout.tokens) == 12
    assert {rollout.finish for rollout in rollouts} == {"stop", "length"}


def test_the_last_token_may_be_a_stop_token(backend):
    (free,) = drained(backend, [group(0, [1, 2, 3], seeds=[5], max_new_tokens=4)])
    assert free.finish == "length"
    last = int(free.tokens[-1])
    if last in free.tokens[:-1]:
        pytest.skip("the last token occurs before")
    (stopped,) = drained(backend, [group(0, [1, 2, 3], seeds=[5], max_new_tokens=4, stop=[last])])
    if not isinstance(backend, ScriptedBackend):  # whose tokens depend on which may not occur
        assert stopped.tokens.tolist() == free.tokens.tolist()
        assert stopped.finish == "stop"


def test_the_same_request_gives_the_same_tokens_in_any_company(backend):
    requests = random_groups(3, prompts=[12, 12, 40, 3], samples=3, stop=STOP)
    together = by_place(drained(backend, requests))
    for request in requests:
        alone = by_place(drained(backend, [request]))
        for place, rollout in alone.items():
            assert rollout.tokens.tolist() == together[place].tokens.tolist()
            assert rollout.finish == together[place].finish


def test_seeds_matter_and_are_the_only_difference_between_samples(backend):
    first, second, third = drained(backend, [group(0, [7, 8, 9], seeds=[1, 1, 2], max_new_tokens=8)])
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.tokens.tolist() != third.tokens.tolist()


def test_lengths_of_groups_are_their_own(backend):
    requests = [group(key, [key + 1] * 4, seeds=[9, 10], max_new_tokens=key + 1) for key in range(5)]
    assert {(r.key, len(r.tokens)) for r in drained(backend, requests)} == {(key, key + 1) for key in range(5)}


def test_what_is_dropped_can_be_begun_again(backend):
    requests = random_groups(4, prompts=[5, 5], samples=3, max_new_tokens=20)
    whole = by_place(drained(backend, requests))
    backend.add(requests)
    ended = by_place(backend.step())
    partials = backend.drop()
    assert backend.in_flight == 0
    assert {(p.key, p.index) for p in partials} | ended.keys() == whole.keys()
    begun = {(p.key, p.index): p.tokens[:7] for p in partials}
    again = [
        replace(
            request,
            samples=tuple(
                replace(sample, begun=begun[request.key, sample.index])
                for sample in request.samples
                if (request.key, sample.index) in begun
            ),
        )
        for request in requests
    ]
    for place, rollout in by_place(drained(backend, [one for one in again if one.samples])).items():
        tokens = [*begun[place].tolist(), *rollout.tokens.tolist()]
        assert tokens == whole[place].tokens.tolist()
        assert len(rollout.tokens) == len(rollout.logprobs)


def test_work_is_added_between_steps(backend):
    first, second = random_groups(6, prompts=[5, 9], samples=2)
    backend.add([first])
    rollouts = backend.step()
    backend.add([second])
    while backend.in_flight:
        rollouts += backend.step()
    assert sorted((r.key, r.index) for r in rollouts) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_nothing_is_generated_without_weights(empty):
    with pytest.raises(ChildFailed) as failure:
        drained(empty, [group(0, [1], seeds=[3])])
    assert failure.value.code == "child.weights"


def test_stats_are_totals(backend):
    requests = random_groups(5, prompts=[6, 9], samples=3)
    tokens = sum(len(rollout.tokens) for rollout in drained(backend, requests))
    stats = backend.stats()
    assert stats.tokens == tokens
    assert stats.rollouts == 6
    assert stats.prompt_tokens == 15
    assert stats.loads == 1


def test_a_missing_image_is_an_error(backend, tmp_path):
    with pytest.raises((ChildFailed, OSError)):
        backend.swap(tmp_path / "none")
