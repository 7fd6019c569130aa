"""The engine's host between pipe and backend: what a stream sends, and what is left of it when it ends."""

from __future__ import annotations

import pytest

from rollmesh_node.engine import host as host_module
from rollmesh_node.engine.host import Host
from rollmesh_node.engine.pipe import Beat, Refusal, group_body, read_item
from rollmesh_node.engine.segments import Completion
from rollmesh_peer.children.child import Notes
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.layout import Layout, TensorSpec
from tests.unit.engine.requests import group

LAYOUT = Layout(tensors=(TensorSpec(name="w", dtype="bf16", shape=(4,)),))
ROOTS = (b"A" * 32, b"B" * 32)


@pytest.fixture
def images(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() * 8)
    return tmp_path / "a", tmp_path / "b"


def make(images, **script) -> Host:
    host = Host(backend="scripted", script=script)
    host.load({"layout": LAYOUT.encode(), "config_json": "{}", "image": str(images[0]), "root": ROOTS[0]})
    return host


def add(*requests) -> tuple[str, dict[str, object]]:
    return "add", {"requests": [group_body(request) for request in requests]}


def take(items) -> list:
    return [read_item(item) for item in items]


def rollouts(items) -> list[Completion]:
    return [item for item in items if isinstance(item, Completion)]


def told(*notes) -> Notes:
    said = Notes()
    for note in notes:
        said.put(note)
    return said


def test_one_call_can_say_everything(images):
    body = {"requests": [group_body(group(0, [1], seeds=[1, 2]))], "finish": True}
    items = take(make(images).generate(body, Notes()))
    assert [(r.key, r.index) for r in rollouts(items)] == [(0, 0), (0, 1)]
    assert isinstance(items[0], Beat) and items[0].in_flight == 2
    assert items[-1] == Beat(in_flight=0, tokens=16, steps=2)


def test_work_comes_in_notes_while_others_are_made(images):
    notes = told(add(group(0, [1], seeds=[1, 2])))
    stream = make(images).generate({}, notes)
    seen = []
    for item in map(read_item, stream):
        seen.append(item)
        if isinstance(item, Completion) and item.key == 0 and item.index == 0:
            notes.put(add(group(1, [1], seeds=[3])))
            notes.put(("finish", {}))
    assert [(r.key, r.index) for r in rollouts(seen)] == [(0, 0), (0, 1), (1, 0)]
    assert all(span.root == ROOTS[0] for r in rollouts(seen) for span in r.segments)


def test_what_is_held_goes_on_from_a_boundary_with_the_next_weights(images):
    host = make(images, token_s=1e-9, heeds_weights=True, stop_chance=0)
    long = group(0, [1], seeds=[1, 2], max_new_tokens=300)
    notes = told(add(long), add(group(1, [1], seeds=[3], max_new_tokens=200)))
    stream = host.generate({}, notes)
    before = [next(stream), next(stream)]
    assert [(r.key, len(r.tokens)) for r in rollouts(map(read_item, before))] == [(1, 200)]
    notes.put(("hold", {}))
    assert rollouts(take(stream)) == []
    host.swap({"image": str(images[1]), "root": ROOTS[1]})
    done = rollouts(take(host.generate({"finish": True}, Notes())))
    assert [(r.key, r.index) for r in done] == [(0, 0), (0, 1)]
    fresh = Host(backend="scripted", script={"heeds_weights": True, "stop_chance": 0})
    for index, image in enumerate(images):
        fresh.load({"layout": LAYOUT.encode(), "config_json": "{}", "image": str(image), "root": ROOTS[index]})
        whole = rollouts(take(fresh.generate({"requests": [group_body(long)], "finish": True}, Notes())))
        part = slice(0, 128) if index == 0 else slice(128, 300)
        for made, reference in zip(done, whole, strict=True):
            assert [(span.first_token, span.root) for span in made.segments] == [(0, ROOTS[0]), (128, ROOTS[1])]
            assert made.tokens[part].tolist() == reference.tokens[part].tolist()
            assert made.logprobs[part].tolist() == reference.logprobs[part].tolist()


def test_a_swap_without_a_root_leaves_nothing_to_go_on_with(images):
    host = make(images)
    assert rollouts(take(host.generate({}, told(add(group(0, [1], seeds=[1])), ("hold", {}))))) == []
    host.swap({"image": str(images[1])})
    assert rollouts(take(host.generate({"finish": True}, Notes()))) == []


def test_whoever_leaves_abandons_everything(images):
    host = make(images)
    notes = told(add(group(0, [1], seeds=[1, 2, 3])))
    stream = host.generate({}, notes)
    next(stream)
    next(stream)
    stream.close()
    notes = told(add(group(0, [1], seeds=[1])), ("finish", {}))
    assert len(rollouts(take(host.generate({}, notes)))) == 1
    cancelled = Notes()
    cancelled.cancel()
    assert rollouts(take(host.generate({"requests": [group_body(group(0, [1], seeds=[1]))]}, cancelled))) == []


def test_a_request_that_cannot_be_done_is_refused_alone(images):
    twice = group(0, [1], seeds=[1])
    items = take(make(images).generate({}, told(add(twice, twice, group(1, [1], seeds=[2])), ("finish", {}))))
    assert [item.key for item in items if isinstance(item, Refusal)] == [0]
    assert [r.key for r in rollouts(items)] == [0, 1]


@pytest.mark.parametrize("note", [("sing", {}), ("add", {"requests": 3}), ("add", {"requests": [{}]})])
def test_a_note_that_makes_no_sense_ends_the_stream(images, note):
    with pytest.raises(ChildFailed) as failure:
        take(make(images).generate({}, told(note)))
    assert failure.value.code == "child.request"


def test_an_idle_stream_beats_until_it_is_left(images, monkeypatch):
    monkeypatch.setattr(host_module, "BEAT_S", 0.01)
    notes = Notes()
    stream = make(images).generate({}, notes)
    assert [read_item(next(stream)) for _ in range(3)] == [Beat(in_flight=0, tokens=0, steps=0)] * 3
    notes.cancel()
    assert len(take(stream)) <= 2


def test_the_error_of_a_step_is_what_is_told(images):
    host = make(images, fail_after=1)
    body = {"requests": [group_body(group(0, [1], seeds=[1, 2]))], "finish": True}
    with pytest.raises(ChildFailed, match="fails here"):
        take(host.generate(body, Notes()))


def test_nothing_is_generated_without_weights():
    with pytest.raises(ChildFailed) as failure:
        Host(backend="scripted", script={}).generate({}, Notes())
    assert failure.value.code == "child.weights"


def test_notes_are_bounded():
    notes = Notes()
    for _ in range(limits.CHILD_NOTES):
        notes.put(("add", {}))
    with pytest.raises(ChildFailed, match="not been taken"):
        notes.put(("add", {}))
    assert len(notes.take()) == limits.CHILD_NOTES
