"""What an untrusted process writes is read as scores or not at all."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_peer.children.score import (
    BATCH,
    ERROR_CHARS,
    NOT_A_NUMBER,
    RESULT_BYTES,
    Score,
    read_results,
    write_results,
)


@given(st.lists(st.floats(0, 1) | st.text(max_size=300), min_size=1, max_size=BATCH))
def test_round_trip(outcomes: list[float | str]) -> None:
    written = write_results(outcomes)
    assert len(written) <= RESULT_BYTES
    scores = read_results(written, len(outcomes))
    assert scores is not None
    for outcome, score in zip(outcomes, scores, strict=True):
        if isinstance(outcome, str):
            assert score.reward == 0.0
            assert score.error is not None and 0 < len(score.error) <= ERROR_CHARS and score.error.isprintable()
        else:
            assert score == Score(outcome)


@given(st.binary(max_size=RESULT_BYTES + 10), st.integers(1, BATCH))
def test_any_bytes_give_harmless_scores(written: bytes, count: int) -> None:
    scores = read_results(written, count)
    if scores is None:
        assert not count * 8 <= len(written) <= RESULT_BYTES
        return
    assert len(scores) == count
    for score in scores:
        assert 0.0 <= score.reward <= 1.0
        assert score.error is None or (score.reward == 0.0 and score.error.isprintable())


@pytest.mark.parametrize("reward", [-0.001, 1.001, math.inf, -math.inf, 1e300])
def test_rewards_outside_the_range_are_errors(reward: float) -> None:
    scores = read_results(struct.pack("<2d", reward, 1.0), 2)
    assert scores is not None
    assert (scores[0].reward, scores[1]) == (0.0, Score(1.0))
    assert "not in [0, 1]" in str(scores[0].error)


def test_nan_does_not_shift_the_errors_after_it() -> None:
    scores = read_results(write_results([math.nan, "ValueError: second", 0.5, "KeyError: fourth"]), 4)
    assert scores == [
        Score(0.0, NOT_A_NUMBER),
        Score(0.0, "ValueError: second"),
        Score(0.5),
        Score(0.0, "KeyError: fourth"),
    ]


def test_newlines_and_escapes_in_an_error_do_not_forge_another() -> None:
    scores = read_results(write_results(["a\nb\x1b[31m\x00", "second"]), 2)
    assert scores == [Score(0.0, "a b [31m "), Score(0.0, "second")]
