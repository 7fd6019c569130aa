"""The example environment: the same items everywhere, and a reward that hostile text cannot slow down."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_protocol.environments.addition import READ_CHARS, last_integer, make
from rollmesh_protocol.environments.interface import Item
from rollmesh_protocol.errors import UsageError


def test_items_are_fixed_for_ever() -> None:
    """A golden value: a resumed learner, on another version of Python, must make the same prompts."""
    environment = make({}, seed=7)
    assert [environment.item(index).question for index in (0, 1, 10**12)] == [
        "What is 1 + 20? Answer with a number only.",
        "What is 4 + 14? Answer with a number only.",
        "What is 20 + 6? Answer with a number only.",
    ]
    assert environment.messages(environment.item(0)) == ({"role": "user", "content": environment.item(0).question},)


@given(st.integers(0, 2**63), st.integers(0, 2**63))
def test_key_holds_the_sum(seed: int, index: int) -> None:
    environment = make({}, seed=seed)
    item = environment.item(index)
    words = item.question.split()
    a, b = int(words[2]), int(words[4].rstrip("?"))
    assert 1 <= a <= 20 and 1 <= b <= 20
    assert item.key == {"answer": a + b}
    assert environment.reward(item, f"The answer is {a + b}.") == 1.0
    assert environment.reward(item, f"The answer is {a + b + 1}.") == 0.0


def test_operands_are_uniform() -> None:
    counts = Counter(make({}, seed=3).item(index).question.split()[2] for index in range(20_000))
    assert len(counts) == 20
    assert all(800 < count < 1200 for count in counts.values())


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("3 + 4 = 7", 7),
        ("3 + 4 = 7.", 7),
        ("**7**", 7),
        ("it is -7", -7),
        ("20-13", 13),
        ("+7", 7),
        ("007", 7),
        ("7 apples, 12 pears", 12),
        ("7 and then " + "9" * 19, 7),
        ("9" * 10_000, None),
        ("", None),
        ("seven", None),
        ("\u0667", None),  # an Arabic-Indic digit
        ("²", None),
        ("7\x00", 7),
    ],
)
def test_last_integer(text: str, number: int | None) -> None:
    assert last_integer(text) == number


@pytest.mark.parametrize("unit", ["9", "-", "+-", "1 ", "9" * 18 + " ", "-9", "\u0669", "a"])
def test_hostile_text_takes_linear_time(unit: str) -> None:
    text = unit * (4_000_000 // len(unit))
    start = time.process_time()
    last_integer(text)
    last_integer(text[:READ_CHARS])
    assert time.process_time() - start < 1.0


def test_parameters() -> None:
    assert make({"low": 5, "high": 5}, seed=0).item(3).question == "What is 5 + 5? Answer with a number only."
    with pytest.raises(UsageError, match="no parameter 'hihg'; did you mean high"):
        make({"hihg": 3}, seed=0)
    with pytest.raises(UsageError, match="must be from 5 to"):
        make({"low": 5, "high": 4}, seed=0)
    with pytest.raises(UsageError, match="must be a whole number"):
        make({"low": 1.5}, seed=0)
    with pytest.raises(UsageError, match="must be a whole number"):
        make({"low": True}, seed=0)


def test_a_forged_key_earns_nothing_by_type() -> None:
    environment = make({}, seed=0)
    for answer in (None, "7", [7], 7.5):
        assert environment.reward(Item("?", {"answer": answer}), "7") == 0.0
