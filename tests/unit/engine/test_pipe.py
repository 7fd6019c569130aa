"""What travels between supervisor and host survives the trip; anything else is an error with a code."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_node.engine.backend import GroupRequest, Rollout, SampleRequest
from rollmesh_node.engine.pipe import group_body, read_group, read_rollout, rollout_body
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
    assert (read.key, read.samples, read.max_new_tokens, read.stop) == (key, request.samples, most, stop)


def good_request() -> dict[str, object]:
    return {"key": 1, "prompt": b"\1\0\0\0", "samples": [{"index": 0, "seed": 1}], "max_new_tokens": 2, "stop": [1]}


def good_rollout() -> dict[str, object]:
    rollout = Rollout(
        key=1, index=2, tokens=np.array([3, 4], np.uint32), logprobs=np.array([-1, -2], np.float32), finish="stop",
        elapsed_s=0.5,
    )  # fmt: skip
    return rollout_body(rollout)


def test_rollouts():
    read = read_rollout(through_a_pipe(good_rollout()))
    assert read.tokens.tolist() == [3, 4]
    assert read.logprobs.tolist() == [-1, -2]
    assert (read.key, read.index, read.finish, read.elapsed_s) == (1, 2, "stop", 0.5)


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
    ],
)  # fmt: skip
def test_wrong_rollouts(wrong):
    with pytest.raises(ChildFailed) as failure:
        read_rollout(good_rollout() | wrong)
    assert failure.value.code == "child.request"


@pytest.mark.parametrize("body", [None, [], 3, "x"])
def test_a_request_that_is_no_map(body):
    with pytest.raises(ChildFailed):
        read_group(body)
