"""What travels between supervisor and host survives the trip; anything else is an error with a code."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_node.engine.backend import GroupRequest, SampleRequest
from rollmesh_node.engine.pipe import (
    Beat,
    Refusal,
    beat_item,
    group_body,
    read_group,
    read_groups,
    read_item,
    read_rollout,
    read_root,
    refusal_item,
    rollout_item,
)
from rollmesh_node.engine.segments import Completion, Span
from rollmesh_protocol.errors import ChildFailed

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


def through_a_pipe(body):
    return msgpack.unpackb(msgpack.packb(body))


@given(
    key=U64,
    prompt=st.lists(U32, min_size=1, max_size=9),
    samples=st.lists(st.tuples(U32, U64), min_size=1, max_size=5),
    most=st.integers(1, 32_768),
    stop=st.frozensets(U32, max_size=3),
)
def test_requests(key, prompt, samples, most, stop):
    request = GroupRequest(
        key=key,
        prompt=np.array(prompt, dtype=np.uint32),
        samples=tuple(SampleRequest(index=index, seed=seed) for index, seed in samples),
        max_new_tokens=most,
        stop=stop,
    )
    read = read_group(through_a_pipe(group_body(request)))
    assert read.prompt.tolist() == prompt
    assert [(sample.index, sample.seed) for sample in read.samples] == samples
    assert (read.key, read.max_new_tokens, read.stop) == (key, most, stop)


def good_request() -> dict[str, object]:
    return {"key": 1, "prompt": b"\1\0\0\0", "samples": [{"index": 0, "seed": 1}], "max_new_tokens": 2, "stop": [1]}


def good_rollout() -> dict[str, object]:
    done = Completion(
        key=1, index=2, tokens=np.array([3, 4], np.uint32), logprobs=np.array([-1, -2], np.float32), finish="stop",
        elapsed_s=0.5, segments=(Span(first_token=0, root=b"r"), Span(first_token=1, root=b"s")),
    )  # fmt: skip
    return rollout_item(done)["rollout"]


def test_rollouts():
    read = read_rollout(through_a_pipe({"rollout": good_rollout()}))
    assert read.tokens.tolist() == [3, 4]
    assert read.logprobs.tolist() == [-1, -2]
    assert (read.key, read.index, read.finish, read.elapsed_s) == (1, 2, "stop", 0.5)
    assert [(span.first_token, span.root) for span in read.segments] == [(0, b"r"), (1, b"s")]


def test_other_items():
    beat, refusal = Beat(in_flight=1, tokens=2, steps=3), Refusal(key=4, code="child.request", detail="too long")
    assert read_item(through_a_pipe(beat_item(beat))) == beat
    assert read_item(through_a_pipe(refusal_item(refusal))) == refusal
    assert read_rollout(beat_item(beat)) is None
    with pytest.raises(ChildFailed, match="too long"):
        read_rollout(refusal_item(refusal))


def test_fields_that_may_be_absent():
    assert read_groups({}) == [] and read_root({}) == b""
    assert len(read_groups({"requests": [good_request()]})) == 1
    for wrong in ({"requests": {}}, {"requests": None}):
        with pytest.raises(ChildFailed):
            read_groups(wrong)
    with pytest.raises(ChildFailed):
        read_root({"root": "text"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": -1}, {"key": True}, {"prompt": b""}, {"prompt": b"123"}, {"prompt": "abcd"}, {"samples": []},
        {"samples": [1]}, {"samples": [{"index": 0, "seed": 2**64}]}, {"samples": [{"index": 0}]},
        {"max_new_tokens": 0}, {"max_new_tokens": 10**9}, {"stop": None}, {"stop": [-1]}, {"stop": ["x"]},
        {"prompt": bytes(4 * 40_000)},
    ],
)  # fmt: skip
def test_wrong_requests(wrong):
    with pytest.raises(ChildFailed) as failure:
        read_group(good_request() | wrong)
    assert failure.value.code == "child.request"


@pytest.mark.parametrize(
    "wrong",
    [
        {"finish": "eos"}, {"finish": ["stop"]}, {"finish": None}, {"elapsed_s": "1"}, {"tokens": b""},
        {"tokens": b"12345678", "logprobs": b"1234"}, {"logprobs": None}, {"index": -1}, {"key": 1.0},
        {"segments": []}, {"segments": None}, {"segments": [[1, b"r"]]}, {"segments": [[0, b"r"], [0, b"s"]]},
        {"segments": [[0, b"r"], [2, b"s"]]}, {"segments": [[0, "r"]]}, {"segments": [[0]]}, {"segments": [0]},
    ],
)  # fmt: skip
def test_wrong_rollouts(wrong):
    with pytest.raises(ChildFailed) as failure:
        read_item({"rollout": good_rollout() | wrong})
    assert failure.value.code == "child.request"


@pytest.mark.parametrize("item", [{}, {"rollout": None}, {"beat": {}}, {"beat": 1}, {"refused": {"key": "x"}}])
def test_wrong_items(item):
    with pytest.raises(ChildFailed) as failure:
        read_item(item)
    assert failure.value.code == "child.request"


@pytest.mark.parametrize("body", [None, [], 3, "x"])
def test_a_request_that_is_no_map(body):
    with pytest.raises(ChildFailed):
        read_group(body)
