"""What audit figures mean: the thresholds of the design, at their edges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_protocol.verdicts.margins import (
    KEPT_WINDOWS,
    AuditFigures,
    Thresholds,
    Verdict,
    judge_rollout,
    judge_window,
    keep_recent,
)

DEFAULT = Thresholds()


def figures(*, tokens: int = 100, low: int = 0, high: int = 0, any_: int = 0, largest: float = 0.3) -> AuditFigures:
    return AuditFigures(tokens=tokens, over_low=low, over_high=high, over_any=any_, largest=largest)


def test_the_defaults_are_those_of_the_design() -> None:
    assert Thresholds(
        any_margin=3.0, high_margin=1.0, high_in_one=3, low_margin=0.5, window_tokens=200, high_share=0.01,
        low_share=0.01,
    ) == DEFAULT  # fmt: skip


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (figures(), "pass"),
        (figures(low=100, largest=0.9), "pass"),  # the window decides about these
        (figures(low=2, high=2, largest=2.9), "pass"),
        (figures(low=3, high=3, largest=1.1), "hard"),
        (figures(tokens=10_000, low=3, high=3, largest=1.1), "hard"),
        (figures(low=1, high=1, any_=1, largest=3.1), "hard"),
        (figures(tokens=1, low=1, high=1, any_=1, largest=17.0), "hard"),
    ],
)
def test_one_rollout(found: AuditFigures, verdict: Verdict) -> None:
    judged, why = judge_rollout(found, DEFAULT)
    assert judged == verdict
    assert bool(why) == (verdict != "pass")


@pytest.mark.parametrize(
    ("recent", "verdict"),
    [
        ([], "pass"),
        ([(199, 199, 199)], "pass"),  # too few tokens to say
        ([(200, 2, 2)], "pass"),
        ([(200, 3, 2)], "soft"),
        ([(200, 3, 3)], "hard"),
        ([(100, 0, 0), (100, 3, 3)], "hard"),
        ([(100, 3, 0), (100, 0, 0)], "soft"),
        ([(1000, 10, 10)], "pass"),
        ([(1000, 11, 10)], "soft"),
        ([(1000, 11, 11)], "hard"),
    ],
)
def test_the_last_tokens_of_a_node(recent: list[tuple[int, int, int]], verdict: Verdict) -> None:
    judged, why = judge_window(recent, DEFAULT)
    assert judged == verdict
    assert bool(why) == (verdict != "pass")


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=60))
def test_what_is_remembered_is_bounded_and_enough(history: list[tuple[int, int, int]]) -> None:
    kept: list[tuple[int, int, int]] = []
    for entry in history:
        kept.append(entry)
        keep_recent(kept, DEFAULT)
    most = KEPT_WINDOWS * DEFAULT.window_tokens
    assert kept == history[-len(kept) :]
    assert sum(tokens for tokens, _, _ in kept[1:]) < most or len(kept) == 1
    if sum(tokens for tokens, _, _ in history) >= most:
        assert sum(tokens for tokens, _, _ in kept) >= most


def test_an_old_cheat_is_not_diluted_for_ever() -> None:
    """However long the good record: one window's worth of wrong tokens is over the share of what is remembered."""
    recent = [(100, 0, 0)] * 1000
    keep_recent(recent, DEFAULT)
    for _ in range(8):
        recent.append((100, 3, 3))
        keep_recent(recent, DEFAULT)
    assert judge_window(recent, DEFAULT)[0] == "hard"
