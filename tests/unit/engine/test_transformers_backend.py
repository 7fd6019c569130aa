"""Loading, swapping and splitting into batches: what the transformers backend adds to the decode loop."""

from __future__ import annotations

import pytest

from rollmesh_node.engine import decoding, memory, transformers_backend
from rollmesh_node.engine.backend import Weights
from rollmesh_node.engine.transformers_backend import TransformersBackend
from rollmesh_peer.models.base import write_base_image
from rollmesh_peer.testing.tiny_model import prepare_tiny
from rollmesh_protocol.errors import ChildFailed, HostError, Refused
from tests.unit.engine.requests import drained, group, random_groups, with_begun


def weights(tiny):
    return Weights(config=tiny.config, layout=tiny.layout, image=tiny.image)


@pytest.fixture
def backend(tiny):
    made = TransformersBackend(threads=1, max_rows=8, device="cpu")
    made.load(weights(tiny))
    return made


def test_a_swap_changes_what_is_generated_and_back(backend, tiny, tmp_path):
    other = tmp_path / "image"
    write_base_image(prepare_tiny(tmp_path / "model", seed=99), image=other)
    request = group(0, range(20), seeds=range(4))
    before = [rollout.tokens.tolist() for rollout in drained(backend, [request])]
    backend.swap(other)
    between = [rollout.tokens.tolist() for rollout in drained(backend, [request])]
    fresh = TransformersBackend(threads=1, max_rows=8, device="cpu")
    fresh.load(Weights(config=tiny.config, layout=tiny.layout, image=other))
    assert [rollout.tokens.tolist() for rollout in drained(fresh, [request])] == between
    backend.swap(tiny.image)
    assert [rollout.tokens.tolist() for rollout in drained(backend, [request])] == before != between
    assert backend.stats().loads == 3


def test_after_a_failed_swap_nothing_is_generated(backend, tiny, tmp_path):
    short = tmp_path / "image"
    short.write_bytes(tiny.image.read_bytes()[:-64])
    with pytest.raises(ChildFailed, match="bytes"):
        backend.swap(short)
    with pytest.raises(ChildFailed) as failure:
        drained(backend, [group(0, [1], seeds=[1])])
    assert failure.value.code == "child.weights"
    backend.load(weights(tiny))
    assert len(drained(backend, [group(0, [1], seeds=[1])])) == 1


def test_no_more_rows_are_decoded_than_allowed(backend):
    requests = random_groups(1, prompts=[30, 5, 12, 40], samples=5)
    assert len(drained(backend, requests)) == 20
    stats = backend.stats()
    assert 8 - 2 < (stats.tokens - stats.rollouts) / stats.steps <= 8  # the first token comes with the prefill


def test_short_memory_makes_few_rows_never_none(backend, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda **_: 1)
    assert len(drained(backend, random_groups(2, prompts=[5], samples=3))) == 3
    stats = backend.stats()
    assert stats.tokens - stats.rollouts == stats.steps


def test_a_cache_may_take_half_of_what_is_free_and_of_what_it_has(tiny, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda **_: 1_000_000)
    config = tiny.bf16.config
    per_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert memory.cells_that_fit(config, device="cpu") == 500_000 // per_token
    assert memory.cells_that_fit(config, device="cpu", held_bytes=500_000) == 750_000 // per_token
    assert memory.cells_that_fit(config, device="cpu", cell_bytes=4) == 250_000 // per_token
    monkeypatch.setattr(memory, "free_bytes", lambda **_: None)
    assert memory.cells_that_fit(config, device="cpu") > 1 << 60


def test_a_step_returns_in_time_and_with_the_first_that_end(backend, monkeypatch):
    requests = [group(key, [key + 1] * 5, seeds=[key, 9], max_new_tokens=3 + 4 * key) for key in range(2)]
    backend.add(requests)
    assert [(rollout.key, rollout.index) for rollout in backend.step()] == [(0, 0), (0, 1)]
    assert backend.in_flight == 2
    monkeypatch.setattr(transformers_backend, "STEP_S", 0.0)
    steps = backend.stats().steps
    assert backend.step() == []
    assert backend.stats().steps == steps + 1
    assert sorted(len(partial.tokens) for partial in backend.drop()) == [4, 4]
    assert (backend.in_flight, backend.step(), backend.drop()) == (0, [], [])


def test_weights_are_not_swapped_under_what_is_in_flight(backend, tiny):
    backend.add([group(0, [1, 2], seeds=[1])])
    with pytest.raises(ChildFailed, match="in flight"):
        backend.swap(tiny.image)
    backend.drop()
    backend.swap(tiny.image)


def test_a_draw_that_fails_leaves_work_that_can_be_dropped(backend, monkeypatch):
    def fail(*_args, **_more):
        raise HostError("the model's logits are not finite")

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "draw", fail)
        backend.add([group(0, [1, 2], seeds=[1, 2])])
        with pytest.raises(HostError):
            backend.step()
        assert [len(partial.tokens) for partial in backend.drop()] == [0, 0]
    assert len(drained(backend, [group(0, [1, 2], seeds=[1])])) == 1


def test_too_little_memory_is_said_with_numbers(tiny, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda **_: 100_000_000)
    with pytest.raises(HostError, match=r"needs 0\.0 GB .* 0\.1 GB are free on cpu: out of memory"):
        TransformersBackend(device="cpu").load(weights(tiny))


def test_what_the_system_tells_is_believed():
    free = memory.free_bytes(device="cpu")
    assert free is None or free > 100_000_000
    assert memory.resident_bytes() > 10_000_000


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (group(0, [260], seeds=[1]), "vocabulary"),
        (group(0, [1] * 2041, seeds=[1], max_new_tokens=8), "do not fit"),
        (group(0, [], seeds=[1]), "empty"),
        (with_begun(group(0, [1], seeds=[1], max_new_tokens=2), [[5, 6]]), "no token"),
        (with_begun(group(0, [1], seeds=[1]), [[260]]), "vocabulary"),
    ],
)
def test_requests_beyond_the_model_are_errors(backend, request_, why):
    with pytest.raises(ChildFailed, match=why):
        drained(backend, [request_])


def test_a_config_that_is_not_loaded_is_refused(tiny):
    with pytest.raises(Refused):
        TransformersBackend(device="cpu").load(
            Weights(config={**tiny.config, "model_type": "bert"}, layout=tiny.layout, image=tiny.image)
        )
