"""Hung or slow: decided by movement alone."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from rollmesh_node.progress import PATIENCE, Progress


def test_an_idle_engine_is_never_hung() -> None:
    progress = Progress(0.0, hung_s=10, cold_s=100)
    assert progress.due == math.inf
    progress.heard(5.0, in_flight=0, tokens=0, steps=0)
    assert progress.due == math.inf
    progress.given(7.0)
    assert progress.due == 107.0
    progress.rested()
    assert progress.due == math.inf


def test_the_first_movement_has_a_longer_grace_and_idle_time_does_not_count() -> None:
    progress = Progress(0.0, hung_s=10, cold_s=100)
    progress.given(50.0)
    progress.heard(60.0, in_flight=4, tokens=0, steps=0)
    progress.heard(120.0, in_flight=4, tokens=0, steps=0)
    assert progress.due == 150.0
    progress.heard(140.0, in_flight=4, tokens=4, steps=1)
    assert progress.due == 150.0  # warm now: 140 and the bound
    assert progress.words(148.0) == "hung: no progress for 8 s"
    progress.heard(141.0, in_flight=0, tokens=9, steps=2)
    progress.given(500.0)
    assert progress.due == 510.0


def test_beats_without_movement_do_not_help() -> None:
    progress = Progress(0.0, hung_s=10, cold_s=10)
    progress.given(0.0)
    for second in range(1, 10):
        progress.heard(float(second), in_flight=2, tokens=7, steps=3)
    assert progress.due == 11.0
    progress.heard(9.5, in_flight=2, tokens=7, steps=4)  # a prefill: steps move, tokens do not
    assert progress.due == 9.5 + PATIENCE * 8.5  # it has come back from a pause of that length


def test_a_restarted_count_is_movement() -> None:
    progress = Progress(0.0, hung_s=10, cold_s=10)
    progress.heard(1.0, in_flight=1, tokens=900, steps=90)
    progress.heard(2.0, in_flight=1, tokens=5, steps=1)
    assert progress.due == 12.0


@given(pauses=st.lists(st.floats(0.1, 1e4), min_size=1, max_size=30), growth=st.floats(1.0, PATIENCE * 0.99))
def test_a_slow_engine_whose_pauses_grow_slowly_is_never_killed(pauses: list[float], growth: float) -> None:
    """Whatever the pauses: one that is less than PATIENCE times the longest before it is survived."""
    progress = Progress(0.0, hung_s=1.0, cold_s=1e5)
    now, longest = 0.0, 0.0
    progress.given(now)
    for number, pause in enumerate(pauses):
        allowed = min(pause, max(0.9, longest * growth)) if number > 1 else pause if number == 0 else min(pause, 0.9)
        now += allowed
        assert now <= progress.due
        progress.heard(now, in_flight=1, tokens=number, steps=number)
        if number:
            progress.moved(now)
            longest = max(longest, allowed if number > 1 else 0.0)
