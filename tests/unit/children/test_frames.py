"""Frames: what is packed comes back, and nothing else decodes."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_peer.children import frames
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), PLAIN, max_size=5), st.integers(0, 2**40))
def test_round_trip(body: dict[str, object], call_id: int) -> None:
    packed = frames.pack(frames.RESULT, call_id, {"body": body})
    assert frames.payload_length(packed[:4]) == len(packed) - 4
    frame = frames.unpack(packed[4:])
    assert frame["id"] == call_id
    assert frames.body_of(frame) == body


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_refused(payload: bytes) -> None:
    code = frames.GARBAGE
    with contextlib.suppress(ChildFailed):
        try:
            assert frames.unpack(payload)["kind"] in frames.KINDS
        except ChildFailed as error:
            code = error.code
            raise
    assert code == frames.GARBAGE


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"kind": "call"},
        {"kind": "other", "id": 1},
        {"kind": "call", "id": "1"},
        {"id": 1},
        {1: 2, "kind": "call", "id": 1},
        {"kind": ["call"], "id": 1},
        {"kind": {"call": 1}, "id": 1},
    ],
)
def test_what_is_no_frame_is_refused(value: object) -> None:
    with pytest.raises(ChildFailed) as refused:
        frames.unpack(msgpack.packb(value))
    assert refused.value.code == frames.GARBAGE


@pytest.mark.parametrize("body", [None, [], "x", {1: 2}])
def test_a_body_is_a_map_with_text_keys(body: object) -> None:
    with pytest.raises(ChildFailed):
        frames.body_of({"kind": "call", "id": 1, "body": body})


def test_length_is_checked_before_anything_is_allocated() -> None:
    for length in (0, limits.CHILD_FRAME_BYTES + 1, 2**32 - 1):
        with pytest.raises(ChildFailed):
            frames.payload_length(frames.HEADER.pack(length))
    assert frames.payload_length(frames.HEADER.pack(limits.CHILD_FRAME_BYTES)) == limits.CHILD_FRAME_BYTES


def test_nothing_larger_than_the_limit_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHILD_FRAME_BYTES", 100)
    assert frames.pack(frames.CALL, 1, {"body": {"x": bytes(50)}})
    with pytest.raises(ChildFailed, match="larger than 100"):
        frames.pack(frames.CALL, 1, {"body": {"x": bytes(100)}})
    with pytest.raises(ChildFailed, match="cannot be written"):
        frames.pack(frames.CALL, 1, {"body": {"x": object()}})
