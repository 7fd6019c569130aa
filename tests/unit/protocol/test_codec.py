"""What a stranger may put into MessagePack, and what comes of it."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_protocol import codec, limits
from rollmesh_protocol.errors import Refused

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=40)
    | st.binary(max_size=40)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=5))
def test_what_is_packed_comes_back(value: dict[str, object]) -> None:
    assert codec.unpack(codec.pack(value), limit=1 << 16) == value


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_nothing_else(message: bytes) -> None:
    with contextlib.suppress(Refused):
        assert isinstance(codec.unpack(message, limit=1 << 16), dict)


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=5), st.data())
def test_cut_or_lengthened_messages_are_refused(value: dict[str, object], data: st.DataObject) -> None:
    message = codec.pack(value)
    cut = data.draw(st.integers(0, len(message) - 1))
    for broken in (message[:cut], message + b"\xc0"):
        with pytest.raises(Refused):
            codec.unpack(broken, limit=1 << 16)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("not a map", msgpack.packb([1])),
        ("NaN", msgpack.packb({"a": float("nan")})),
        ("infinity inside", msgpack.packb({"a": [1.0, float("-inf")]})),
        ("a number as key", msgpack.packb({1: 2})),
        ("the same key twice", b"\x82\xa1a\x01\xa1a\x02"),
        ("an extension", msgpack.packb({"a": msgpack.ExtType(5, b"xx")})),
        ("a timestamp extension", b"\x81\xa1a\xd6\xff\x00\x00\x00\x00"),
        ("text that is not UTF-8", b"\x81\xa1a\xa1\xff"),
        ("an array header beyond the end", b"\x81\xa1a\xdd\xff\xff\xff\xff"),
        ("a binary header beyond the end", b"\x81\xa1a\xc6\xff\xff\xff\xff"),
        ("the reserved byte", b"\x81\xa1a\xc1"),
        ("nothing", b""),
    ],
)
def test_refused(what: str, message: bytes) -> None:
    with pytest.raises(Refused):
        codec.unpack(message, limit=1 << 16)


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"a": x}])
def test_nesting_is_bounded(wrap: object) -> None:
    def nested(levels: int) -> bytes:
        value: object = 1
        for _ in range(levels):
            value = wrap(value)  # type: ignore[operator]
        return codec.pack({"a": value})  # type: ignore[dict-item]

    assert codec.unpack(nested(limits.MAX_NESTING - 1), limit=1 << 16)
    with pytest.raises(Refused, match="nested"):
        codec.unpack(nested(limits.MAX_NESTING), limit=1 << 16)


def test_a_million_small_values_are_refused_before_they_become_objects() -> None:
    message = b"\x81\xa1a\xdd" + (1_000_000).to_bytes(4, "big") + b"\x00" * 1_000_000
    with pytest.raises(Refused) as caught:
        codec.unpack(message, limit=limits.RESULT_BYTES)
    assert caught.value.code == "request.too_large"


def test_the_limit_is_checked_first() -> None:
    with pytest.raises(Refused) as caught:
        codec.unpack(codec.pack({"a": b"x" * 100}), limit=50)
    assert caught.value.code == "request.too_large"
