"""The test for drift on a node's own work: alarms as the learner's, and words before they come."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rollmesh_node.selfcheck.drifting import FAR_TOKENS, SURE, drift_of
from rollmesh_protocol.verdicts.drift import DriftState, DriftTest, advance

TEST = DriftTest(clip=0.3, reference=0.003, exponent=5.0, alarm=17.5)
TOKENS = 20


def work(number: int, *, margin: float) -> list[np.ndarray]:
    """Rollouts with one margin each."""
    one = np.zeros(TOKENS, np.float32)
    one[3] = margin
    return [one] * number


def test_honest_work_has_neither_score_nor_words() -> None:
    drift = drift_of(work(50, margin=0.04), TEST)
    assert not drift.is_found and drift.alarms == 0 and drift.score == 0
    assert drift.mean == pytest.approx(0.002) and drift.honest == pytest.approx(0.002)
    assert drift.tokens_to_alarm is None


def test_a_drift_is_told_before_the_alarm() -> None:
    """Margins of 0.007 nats a token: 0.4 of the score with each rollout."""
    early, soon, late = (drift_of(work(number, margin=0.14), TEST) for number in (17, 18, 44))
    assert not early.is_found and soon.is_found and soon.alarms == 0
    assert SURE < soon.evidence < TEST.alarm and soon.score == pytest.approx(soon.evidence)
    assert late.alarms == 1 and late.score == TEST.alarm
    for drift in (early, soon, late):
        assert drift.tokens_to_alarm == pytest.approx(875, abs=1)
    assert "0.007 nats" in soon.words and "honest nodes 0.002 at most" in soon.words
    assert "some 876 audited" in soon.words or "some 875 audited" in soon.words
    assert late.figures.endswith("score 17.5 of 17.5, alarm")


def test_alarms_are_those_of_the_learner() -> None:
    random = np.random.default_rng(1)
    rollouts = [(random.exponential(0.2, 30) * (random.random(30) < 0.1)).astype(np.float32) for _ in range(400)]
    state = DriftState()
    for one in rollouts:
        state, _ = advance(state, one, TEST)
    drift = drift_of(rollouts, TEST)
    assert drift.alarms == state.alarms > 1 and f"{drift.alarms} alarms" in drift.figures


def test_a_bad_hour_among_good_work_is_found_by_its_alarm() -> None:
    drift = drift_of([*work(50, margin=0.3), *work(2000, margin=0.0)], TEST)
    assert drift.alarms and drift.evidence < 0 and drift.is_found
    assert drift.tokens_to_alarm is None and "over a part of these tokens" in drift.words


@pytest.mark.parametrize("exponent", [0.0, 1e-300])
def test_a_calibration_that_says_nothing_accuses_nobody(exponent: float) -> None:
    drift = drift_of(work(50, margin=9.0), DriftTest(clip=0.3, reference=0.003, exponent=exponent))
    assert not drift.is_found and drift.tokens_to_alarm is None
    assert math.isfinite(FAR_TOKENS)


def test_margins_that_are_no_numbers_are_an_alarm() -> None:
    drift = drift_of(work(2, margin=math.nan), TEST)
    assert drift.alarms == 2 and drift.is_found and drift.tokens_to_alarm is None
    assert "over a part of these tokens" in drift.words
