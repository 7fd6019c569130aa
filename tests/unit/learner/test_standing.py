"""The record of a node and what follows from it, event by event."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_learner.members.standing import (
    DRIFT,
    DRIFTS_OUT,
    OFFENCES,
    SOFT_IN_A_ROW,
    Record,
    StandingRules,
    State,
    after_absence,
    as_message,
    audit_rate,
    state_of,
)
from rollmesh_protocol.errors import CODES

RULES = StandingRules(new_rollouts=10, probation_rollouts=50, rate_new=1.0, rate_probation=0.5, rate_steady=0.03)
SOFT = "result.logprob"
EVENTS = {
    "accept": lambda record: record.accept(1),
    "pass": lambda record: record.audit(passed=True),
    "fail": lambda record: record.audit(passed=False),
    "soft": lambda record: record.offend(SOFT, rollouts=1, detail="why"),
    "hard": lambda record: record.offend("result.sampling", rollouts=1, detail="why"),
    "reused": lambda record: record.offend("lease.reused", rollouts=1),
    "late": lambda record: record.offend("lease.expired", rollouts=4),
    "unheard of": lambda record: record.offend("result.never_seen_before", rollouts=1),
}


def after(*events: str) -> Record:
    record = Record()
    for event in events:
        record = EVENTS[event](record)
    return record


@pytest.mark.parametrize(
    ("events", "state", "rate"),
    [
        ((), "new", 1.0),
        (("accept",) * 1000, "new", 1.0),  # only what was audited counts
        (("pass",) * 9, "new", 1.0),
        (("pass",) * 10, "probation", 0.5),
        (("pass",) * 49, "probation", 0.5),
        (("pass",) * 50, "full", 0.03),
        (("fail",) * 50, "new", 1.0),
        (("pass",) * 50 + ("soft",), "probation", 0.5),
        (("pass",) * 50 + ("soft",) * 3, "new", 1.0),
        (("pass",) * 100 + ("soft",), "full", 0.03),
        (("pass",) * 1000 + ("hard",), "quarantined", 1.0),  # no good record offsets a hard failure
        (("pass",) * 1000 + ("reused",), "quarantined", 1.0),
        (("soft",) * 7, "new", 1.0),
        (("soft",) * 8, "quarantined", 1.0),
        (("unheard of",) * 8, "quarantined", 1.0),
        (("soft", "accept") * 100, "new", 1.0),
        (("soft",) * 7 + ("late",) + ("soft",), "quarantined", 1.0),  # lateness breaks no row
        (("late",) * 1000, "new", 1.0),  # being slow is no offence
        (("pass",) * 50 + ("late",) * 10, "full", 0.03),
        (("hard",) + ("pass",) * 100 + ("accept",) * 100, "quarantined", 1.0),  # and there is no way back
    ],
)
def test_states_and_their_audit_rates(events: tuple[str, ...], state: State, rate: float) -> None:
    record = after(*events)
    assert state_of(record, RULES) == state
    assert audit_rate(record, RULES) == rate


def test_eight_in_a_row() -> None:
    assert SOFT_IN_A_ROW == 8


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=60))
def test_whatever_happens(events: list[str]) -> None:
    """Quarantine is for ever and keeps its first reason; counts only grow; the state is a function of the record."""
    record = Record()
    for event in events:
        before, record = record, EVENTS[event](record)
        assert record.accepted >= before.accepted
        assert record.rejected >= before.rejected
        assert record.audited >= before.audited
        assert 0 <= record.passed <= record.audited
        if before.is_quarantined:
            assert record.quarantined_for == before.quarantined_for
        if event in ("hard", "reused"):
            assert record.is_quarantined
    assert record.is_quarantined == (state_of(record, RULES) == "quarantined")


def test_the_reason_is_told_and_bounded() -> None:
    record = Record().offend("result.sampling", rollouts=4, detail="x" * 10_000)
    message = as_message(record, RULES)
    assert message.reason.startswith("result.sampling: xxx")
    assert len(message.reason) == 500
    assert (message.state, message.rejected, message.accepted) == ("quarantined", 4, 0)


def test_every_code_of_a_refused_result_has_a_severity() -> None:
    wanted = {code for code in CODES if code.startswith(("result.", "lease."))} - {"lease.limits"}  # a node's own
    assert wanted == set(OFFENCES)
    assert {code for code, severity in OFFENCES.items() if severity == "hard"} == {"lease.reused", "result.sampling"}


# --- time ------------------------------------------------------------------------------------------------------------
DAY = 86_400.0


def soft(record: Record, *, now: float) -> Record:
    return record.offend(SOFT, rollouts=1, now=now, half_life_s=RULES.soft_half_life_s)


@pytest.mark.parametrize(
    ("every_s", "is_out"), [(0.0, True), (60.0, True), (600.0, True), (DAY / 4, False), (DAY, False), (30 * DAY, False)]
)
def test_small_offences_weigh_less_the_longer_ago_they_were(every_s: float, is_out: bool) -> None:
    record = Record()
    for number in range(SOFT_IN_A_ROW):
        record = soft(record, now=1e9 + number * every_s)
    assert record.is_quarantined == is_out
    assert record.rejected == SOFT_IN_A_ROW, "the count itself is kept"


@pytest.mark.parametrize(("every_s", "is_out"), [(60.0, True), (DAY / 24, True), (DAY, False), (30 * DAY, False)])
def test_accepted_work_does_not_clear_drifts(every_s: float, is_out: bool) -> None:
    record = Record()
    for number in range(DRIFTS_OUT):
        now = 1e9 + number * every_s
        record = record.accept(8, now=now)
        record = record.offend(DRIFT, rollouts=0, now=now, half_life_s=RULES.soft_half_life_s)
    assert record.is_quarantined == is_out


def test_a_half_life_halves() -> None:
    record = soft(soft(Record(), now=1e9), now=1e9 + RULES.soft_half_life_s)
    assert record.soft_in_a_row == pytest.approx(1.5)


def test_a_clock_that_is_set_back_fades_nothing() -> None:
    record = soft(soft(Record(), now=1e9), now=0.0)
    assert (record.soft_in_a_row, record.soft_at) == (2.0, 1e9)


def test_quarantine_never_fades() -> None:
    record = Record().offend("result.sampling", rollouts=1, now=0.0, half_life_s=1.0)
    later = after_absence(soft(record, now=1e12), RULES, now=1e12)
    assert later.is_quarantined and state_of(later, RULES) == "quarantined"


@pytest.mark.parametrize(
    ("passed", "away_s", "state"),
    [
        (1000, 6.9 * DAY, "full"),
        (1000, 7.1 * DAY, "probation"),
        (30, 7.1 * DAY, "probation"),
        (5, 7.1 * DAY, "new"),
        (1000, 3650 * DAY, "probation"),
    ],
)
def test_a_good_record_is_worth_less_after_a_long_absence(passed: int, away_s: float, state: State) -> None:
    record = Record(passed=passed).accept(8, now=1e9)
    back = after_absence(record, RULES, now=1e9 + away_s)
    assert state_of(back, RULES) == state
    assert back.passed == (10 if passed >= 10 and away_s > RULES.away_s else passed)
    assert after_absence(back, RULES, now=1e9 + away_s + 1) == back, "once is enough"
    assert back.accepted == record.accepted


def test_a_record_from_before_there_were_times_is_left_as_it_is() -> None:
    assert after_absence(Record(passed=1000), RULES, now=1e9) == Record(passed=1000)
