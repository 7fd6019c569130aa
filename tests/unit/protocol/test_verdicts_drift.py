"""The sequential test: honest nodes live long, small drifts are found, and its state is all there is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_protocol.verdicts.drift import DriftState, DriftTest, advance, excess, fit_drift

TEST = DriftTest(clip=0.3, reference=0.005, exponent=4.0)
TOKENS = 16


def rollouts(number: int, *, seed: int = 0, scale: float = 0.1, above_zero: float = 0.03) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    shape = (number, TOKENS)
    return [*(random.exponential(scale, shape) * (random.random(shape) < above_zero)).astype(np.float32)]


FITTED = fit_drift([rollouts(2000, seed=1), rollouts(300, seed=2)])


def alarm_at(work: list[np.ndarray], test: DriftTest) -> int | None:
    """The number of the first rollout that raises the alarm."""
    state = DriftState()
    for number, one in enumerate(work):
        state, is_alarm = advance(state, one, test)
        if is_alarm:
            return number
    return None


def test_the_alarm_keeps_its_share_of_the_rate_over_a_life() -> None:
    assert math.exp(-TEST.alarm) * 10_000 == pytest.approx(1e-3 / 4)


def test_honest_rollouts_are_e_values() -> None:
    fresh = rollouts(20_000, seed=3)
    values = np.exp([FITTED.exponent * excess(one, clip=FITTED.clip, reference=FITTED.reference) for one in fresh])
    assert values.mean() <= 1
    assert FITTED.exponent > 1


def test_an_honest_node_lives_and_a_careful_cheat_does_not() -> None:
    """Margins twice as often and half as large again (about what int8 weights do) within 10,000 tokens."""
    assert alarm_at(rollouts(10_000, seed=4), FITTED) is None
    for seed in range(20):
        found = alarm_at(rollouts(625, seed=100 + seed, scale=0.15, above_zero=0.06), FITTED)
        assert found is not None


def test_false_alarms_are_as_rare_as_the_formula_says() -> None:
    """With a low alarm they can be counted: N exp(-alarm) of them at most."""
    alarm, life = math.log(2000), 100
    test = DriftTest(clip=FITTED.clip, reference=FITTED.reference, exponent=FITTED.exponent, alarm=alarm)
    false = sum(alarm_at(rollouts(life, seed=1000 + seed), test) is not None for seed in range(300))
    assert false / 300 <= life * math.exp(-alarm) + 0.02


margins = st.lists(st.floats(0, 20, width=32), min_size=1, max_size=30).map(lambda m: np.array(m, dtype=np.float32))


@given(st.lists(margins, max_size=30))
def test_the_score_is_never_negative_and_an_alarm_starts_it_again(work: list[np.ndarray]) -> None:
    state = DriftState()
    for one in work:
        before = state
        state, is_alarm = advance(state, one, TEST)
        assert 0 <= state.score < TEST.alarm
        assert state.alarms == before.alarms + is_alarm
        assert (state.tokens == 0) == (state.score == 0)
        if is_alarm:
            assert state.score == 0


@given(st.lists(margins, min_size=1, max_size=20), margins)
def test_larger_margins_never_lower_the_score(work: list[np.ndarray], more: np.ndarray) -> None:
    state = DriftState()
    for one in work[:-1]:
        state, _ = advance(state, one, TEST)
    small, is_small = advance(state, work[-1], TEST)
    large, is_large = advance(state, work[-1] + more[: len(work[-1])].mean(), TEST)
    assert is_large or (not is_small and large.score >= small.score)


def test_margins_that_are_no_numbers_raise_the_alarm() -> None:
    assert advance(DriftState(), np.array([np.nan], dtype=np.float32), TEST)[1]


def test_the_worst_cell_sets_the_reference() -> None:
    calm, wild = rollouts(500, seed=5), rollouts(500, seed=6, above_zero=0.06)
    assert fit_drift([calm, wild]).reference > 1.5 * fit_drift([calm]).reference
    with pytest.raises(ValueError, match="without rollouts"):
        fit_drift([calm, []])


def test_too_few_rollouts_never_accuse() -> None:
    test = fit_drift([rollouts(3, seed=7, above_zero=0.5)])
    assert test.exponent == 0
    assert alarm_at(rollouts(50, scale=5.0, above_zero=1.0), test) is None


def test_a_machine_that_agrees_with_itself_gives_a_test_all_the_same() -> None:
    test = fit_drift([[np.zeros(TOKENS, dtype=np.float32)] * 2000])
    assert test.exponent > 0
    assert alarm_at([np.zeros(TOKENS, dtype=np.float32)] * 100, test) is None
