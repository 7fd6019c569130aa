"""Loading, swapping and splitting into batches: what the transformers backend adds to the decode loop."""

from __future__ import annotations

import pytest

from rollmesh_node.engine import memory
from rollmesh_node.engine.backend import Weights
from rollmesh_node.engine.transformers_backend import TransformersBackend
from rollmesh_peer.models.base import write_base_image
from rollmesh_peer.testing.tiny_model import prepare_tiny
from rollmesh_protocol.errors import ChildFailed, HostError, Refused
from tests.unit.engine.requests import drained, group, random_groups


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


def test_batches_hold_no_more_rows_than_allowed_and_every_sample_once(backend):
    requests = random_groups(1, prompts=[30, 5, 12, 40], samples=5)
    batches = list(backend._batches(requests))
    assert [sum(len(g.samples) for g in batch) for batch in batches] == [8, 8, 4]
    assert sorted((g.key, s.index) for batch in batches for g in batch for s in g.samples) == [
        (key, index) for key in range(4) for index in range(5)
    ]
    lengths = [len(g.prompt) for batch in batches for g in batch]
    assert lengths == sorted(lengths)


def test_short_memory_makes_small_batches_never_none(backend, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda **_: 1)
    batches = list(backend._batches(random_groups(2, prompts=[5], samples=3)))
    assert [len(batch[0].samples) for batch in batches] == [1, 1, 1]


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
    [(group(0, [260], seeds=[1]), "vocabulary"), (group(0, [1] * 2041, seeds=[1], max_new_tokens=8), "do not fit")],
)
def test_requests_beyond_the_model_are_errors(backend, request_, why):
    with pytest.raises(ChildFailed, match=why):
        drained(backend, [request_])


def test_a_config_that_is_not_loaded_is_refused(tiny):
    with pytest.raises(Refused):
        TransformersBackend(device="cpu").load(
            Weights(config={**tiny.config, "model_type": "bert"}, layout=tiny.layout, image=tiny.image)
        )
