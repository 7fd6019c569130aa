"""How numbers, times and strangers' text look in a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_peer.status.words import ago, clean, duration, rate, share, size


@given(st.text(max_size=3000))
def test_a_peers_text_cannot_move_the_cursor_or_fill_the_screen(text: str) -> None:
    shown = clean(text)
    assert len(shown) <= 200
    assert not any(unicodedata.category(letter).startswith("C") for letter in shown)


def test_escapes_and_reordering_are_made_visible() -> None:
    assert clean("\x1b[2Ja\u202eb\tc\r\n d") == "?[2Ja?b c d"
    assert clean("x" * 300) == "x" * 199 + "…"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0 s"), (59.9, "59 s"), (185, "3 min 5 s"), (7800, "2 h 10 min"), (356400, "4 d 3 h")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "-"), (1.9, "now"), (42.7, "42 s ago"), (61, "1 min ago"), (7300, "2 h ago"), (1e6, "11 d ago")],
)
def test_ages(seconds: float | None, words: str) -> None:
    assert ago(seconds) == words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"),
        (812, "812 B"),
        (3_249_000, "3.2 MB"),
        (269_000_000, "269 MB"),
        (999_600, "1.0 MB"),
        (5e13, "50.0 TB"),
    ],
)
def test_sizes(num_bytes: float, words: str) -> None:
    assert size(num_bytes) == words


def test_nothing_is_a_dash() -> None:
    assert (rate(0.2), rate(1234.5), share(0, 0), share(4, 5)) == ("-", "1,234", "-", "80 %")
