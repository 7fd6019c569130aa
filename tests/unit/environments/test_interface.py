"""Items survive the ledger and the pipe; draws are fixed and even."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_protocol.environments.interface import MAX_KEY_DEPTH, Item, draw, is_plain
from rollmesh_protocol.errors import Refused

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.text(), st.dictionaries(st.text(), PLAIN, max_size=4))
def test_item_survives_json(question: str, key: dict[str, object]) -> None:
    item = Item(question, key)
    assert Item.from_plain(item.to_plain()) == item
    assert Item.from_plain(json.loads(json.dumps(item.to_plain()))) == item


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        {},
        {"question": "q"},
        {"question": 1, "key": {}},
        {"question": "q", "key": []},
        {"question": "q", "key": {}, "more": 1},
        {"question": "q", "key": {"a": b"bytes"}},
        {"question": "q", "key": {"a": float("nan")}},
        {"question": "q", "key": {1: 2}},
        {"question": "q" * (2**20 + 1), "key": {}},
    ],
)
def test_what_is_no_item_is_refused(plain: object) -> None:
    with pytest.raises(Refused):
        Item.from_plain(plain)


def test_depth_is_bounded() -> None:
    value: object = 0
    for _ in range(MAX_KEY_DEPTH):
        value = [value]
    assert is_plain(value)
    assert not is_plain([value])
    for _ in range(100_000):
        value = [value]
    assert not is_plain(value)


def test_draws_are_fixed_and_told_apart() -> None:
    assert [draw(1000, "x", seed, 5) for seed in range(4)] == [545, 915, 585, 129]
    assert len({draw(2**60, *parts) for parts in [("a", "b"), ("ab",), ("a", "b", ""), ("b", "a"), (1,), ("1",)]}) == 6


@given(st.integers(1, 2**40), st.integers())
def test_draws_stay_below_their_bound(bound: int, part: int) -> None:
    assert 0 <= draw(bound, part) < bound
