"""What nodes that are audited much may hold while audits are behind."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rollmesh_learner.work.throttle import AuditLoad, audit_allowance

IDLE = AuditLoad(waiting=0, expected=0.0, most=64, sharers=1)


def allowance(load: AuditLoad, *, earned: int = 1000, holding: int = 0, rate: float = 1.0) -> int:
    return audit_allowance(earned, holding=holding, rate=rate, load=load, least=8)


def test_an_idle_auditor_takes_nothing_away_but_the_bound() -> None:
    assert allowance(IDLE) == 64
    assert allowance(IDLE, rate=0.5) == 128
    assert allowance(IDLE, earned=8) == 8
    assert allowance(IDLE, rate=0.0) == 1000, "where nothing is audited there is nothing to wait for"


def test_a_growing_queue_leaves_less_and_in_the_end_nothing() -> None:
    found = [allowance(replace(IDLE, waiting=waiting)) for waiting in (0, 16, 32, 63, 64, 100)]
    assert found == [64, 48, 32, 1, 0, 0]


def test_what_is_still_out_counts_and_is_not_taken_back() -> None:
    assert allowance(replace(IDLE, expected=60.0), holding=60) == 64
    assert allowance(replace(IDLE, waiting=70, expected=20.0), holding=20) == 20


def test_those_who_share_it_get_equal_parts() -> None:
    assert allowance(replace(IDLE, sharers=4)) == 16
    assert allowance(replace(IDLE, sharers=1000)) == 8, "a group at least, or nobody could begin"


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from([0.5, 1.0])), max_size=30), st.integers(8, 200))
def test_the_bound_holds_whoever_asks(asks: list[tuple[int, float]], most: int) -> None:
    expected = 0.0
    for wanted, rate in asks:
        load = AuditLoad(waiting=0, expected=expected, most=most, sharers=len(asks))
        expected += rate * audit_allowance(wanted, holding=0, rate=rate, load=load, least=8)
        assert expected <= most
