"""Strictness of the wire types: each example refuses unknown fields, missing ones and ones of another type."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_protocol import codec
from rollmesh_protocol.errors import Refused
from tests.unit.protocol.examples import EXAMPLES

NAMES = sorted(EXAMPLES)


def _reencode(name: str, change: dict[str, object], *, drop: str | None = None) -> bytes:
    value = EXAMPLES[name].model_dump() | change
    if drop:
        del value[drop]
    return codec.pack(value)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_field_is_refused(name: str) -> None:
    with pytest.raises(Refused) as caught:
        type(EXAMPLES[name]).decode(_reencode(name, {"reward": 1.0}), limit=1 << 20)
    assert caught.value.code == "request.invalid"
    assert "reward" in caught.value.detail


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_field_is_refused(name: str) -> None:
    for field, declared in type(EXAMPLES[name]).model_fields.items():
        if declared.is_required():
            with pytest.raises(Refused):
                type(EXAMPLES[name]).decode(_reencode(name, {}, drop=field), limit=1 << 20)


@pytest.mark.parametrize("name", NAMES)
def test_a_field_of_another_type_is_refused(name: str) -> None:
    for field in type(EXAMPLES[name]).model_fields:
        with pytest.raises(Refused):
            type(EXAMPLES[name]).decode(_reencode(name, {field: {"odd": [1.5]}}), limit=1 << 20)


@given(st.sampled_from(NAMES), st.binary(max_size=200))
def test_garbage_is_refused(name: str, message: bytes) -> None:
    with pytest.raises(Refused):
        type(EXAMPLES[name]).decode(message, limit=1 << 20)


@given(st.sampled_from(NAMES), st.data())
def test_flipped_bits_never_crash(name: str, data: st.DataObject) -> None:
    message = bytearray(EXAMPLES[name].encode())
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(Refused):
        type(EXAMPLES[name]).decode(bytes(message), limit=1 << 20)


def test_booleans_are_no_numbers() -> None:
    with pytest.raises(Refused):
        type(EXAMPLES["pass"]).decode(_reencode("pass", {"issued_version": True}), limit=1000)


@pytest.mark.parametrize("shape", [(-1, 4), (-2, -2)])
def test_a_tensor_with_a_negative_side_is_refused(shape: tuple[int, ...]) -> None:
    card = EXAMPLES["card"].model_dump()
    card["layout"]["tensors"] = ({"name": "w", "dtype": "bf16", "shape": shape},)
    with pytest.raises(Refused, match=r"layout\.tensors\.0\.shape\.0"):
        type(EXAMPLES["card"]).read(card)


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_a_stop_token_beyond_any_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(Refused, match="stop_tokens"):
        type(EXAMPLES["card"]).decode(_reencode("card", {"stop_tokens": (token,)}), limit=1 << 20)
