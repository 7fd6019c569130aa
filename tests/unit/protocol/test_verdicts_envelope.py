"""From honest margins to thresholds: they hold their rates, more data tightens, and no class ever loosens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_protocol.verdicts import envelope
from rollmesh_protocol.verdicts.envelope import (
    CLASS_TOKENS,
    NO_COUNTS,
    Rates,
    count,
    delta_of,
    envelope_of,
    learn_class,
    tail_bound,
    thresholds_of,
    tighten,
    token_rate,
)
from rollmesh_protocol.verdicts.margins import Thresholds

RULES = Thresholds()
LONGEST = 64


def margins(tokens: int, *, seed: int = 0, scale: float = 0.1, above_zero: float = 0.03) -> np.ndarray:
    """Most are zero, the others exponential: the tail that the bound assumes, and real ones stay below."""
    random = np.random.default_rng(seed)
    values = random.exponential(scale, tokens) * (random.random(tokens) < above_zero)
    return values.astype(np.float32)


def values_of(found: Thresholds) -> tuple[float, float, float]:
    return found.low_margin, found.high_margin, found.any_margin


@given(st.integers(1, 6), st.integers(10, 5000), st.floats(1e-9, 1e-2))
def test_the_union_bound_holds(needed: int, tokens: int, rate: float) -> None:
    """P(at least c of n) is at most C(n, c) p^c, and that is at most the rate."""
    p = token_rate(rate, count=needed, tokens=tokens)
    choose = np.prod([(tokens - i) / (i + 1) for i in range(needed)])
    assert p == 1.0 or choose * p**needed <= rate * (1 + 1e-9)


@pytest.mark.parametrize("rate", [1e-3, 1e-4, 1e-5])
def test_a_bound_from_a_small_sample_holds_for_the_population(rate: float) -> None:
    """In 95 of 100 samples of 5,000 tokens, give or take the exact share beyond the bound is no larger than stated."""
    bounds = np.array([tail_bound(margins(5000, seed=seed), rate) for seed in range(100)])
    exact = 0.03 * np.exp(-bounds / 0.1)
    assert (exact <= rate).sum() >= 92
    assert np.median(bounds) < 1.6 * 0.1 * np.log(0.03 / rate), "and it is not far beyond what is needed"


@given(st.integers(200, 3000), st.integers(0, 50), st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_more_of_the_same_data_tightens(tokens: int, seed: int, rate: float) -> None:
    few = margins(tokens, seed=seed, above_zero=0.2)
    assert tail_bound(np.tile(few, 10), rate) <= tail_bound(few, rate) * (1 + 1e-6)


@given(st.floats(1e-9, 0.5), st.floats(1e-9, 0.5))
def test_a_rarer_margin_is_larger(one: float, other: float) -> None:
    sample = margins(2000)
    rare, common = sorted((one, other))
    assert tail_bound(sample, rare) >= tail_bound(sample, common) - 1e-6


def test_nothing_above_zero_gives_the_least_thresholds() -> None:
    found = envelope_of([np.zeros(100, dtype=np.float32)], rules=RULES, longest=LONGEST)
    assert values_of(found) == (envelope.LEAST_LOW, envelope.LEAST_HIGH, envelope.LEAST_ANY)
    with pytest.raises(ValueError, match="without tokens"):
        envelope_of([np.zeros(0, dtype=np.float32)], rules=RULES, longest=LONGEST)


def test_the_worst_cell_decides_and_rules_keep_their_order() -> None:
    calm, wild = margins(20_000, scale=0.05), margins(20_000, scale=0.12)
    together = envelope_of([calm, wild], rules=RULES, longest=LONGEST)
    alone = envelope_of([wild], rules=RULES, longest=LONGEST)
    assert all(a <= b < 1.1 * a for a, b in zip(values_of(alone), values_of(together), strict=True))
    assert together.low_margin <= together.high_margin <= together.any_margin
    assert (together.high_in_one, together.window_tokens) == (RULES.high_in_one, RULES.window_tokens)


def test_a_cell_of_a_few_tokens_does_not_widen_the_envelope_by_what_it_leaves_open() -> None:
    much, little = margins(20_000), margins(400, seed=3)
    together = envelope_of([much, little], rules=RULES, longest=LONGEST)
    assert together.any_margin < 1.05 * envelope_of([much], rules=RULES, longest=LONGEST).any_margin
    assert together.any_margin < envelope_of([little], rules=RULES, longest=LONGEST).any_margin


@given(st.integers(1000, 4000), st.integers(0, 200))
def test_that_little_was_measured_loosens_no_default(tokens: int, seed: int) -> None:
    """What cannot be excluded is no reason to believe it: without a calibration nothing is excluded either."""
    found = envelope_of([margins(tokens, scale=0.04, seed=seed)], rules=RULES, longest=LONGEST)
    assert all(one <= other for one, other in zip(values_of(found), values_of(RULES), strict=True))


def test_honest_work_beyond_the_defaults_widens_them() -> None:
    """Else the honest nodes of a model that computes less exactly would all be put out."""
    found = envelope_of([margins(20_000, scale=0.3)], rules=RULES, longest=LONGEST)
    assert all(one > other for one, other in zip(values_of(found), values_of(RULES), strict=True))


def test_longer_completions_have_a_wider_bound() -> None:
    sample = margins(20_000)
    short, long = (thresholds_of(sample, rules=RULES, longest=n) for n in (16, 2048))
    assert short.any_margin < long.any_margin
    assert Rates.of(RULES, longest=16).any == pytest.approx(envelope.HARD_RATE / 16)


counts = st.lists(st.integers(0, 2000), min_size=envelope.BINS, max_size=envelope.BINS).map(tuple)
nodes = st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.sampled_from("1234"), counts), max_size=8)


@given(nodes, st.floats(0.1, 5), st.floats(0.2, 5), st.floats(0.5, 50))
def test_a_class_never_loosens_whatever_its_nodes_did(found, low: float, high: float, any_: float) -> None:
    limits = Thresholds(low_margin=low, high_margin=high, any_margin=any_)
    learned = learn_class(found, envelope=limits, longest=LONGEST)
    if learned is not None:
        assert all(one <= other for one, other in zip(values_of(learned), values_of(limits), strict=True))
        assert all(one >= other / 2 for one, other in zip(values_of(learned), values_of(limits), strict=True))
        assert tighten(limits, learned) == learned


def test_a_class_needs_three_unrelated_nodes() -> None:
    limits = envelope_of([margins(50_000, scale=0.12)], rules=RULES, longest=LONGEST)
    calm = count(NO_COUNTS, margins(CLASS_TOKENS, scale=0.03))
    known = {name: (name, calm) for name in "abc"}
    learned = learn_class(known, envelope=limits, longest=LONGEST)
    assert learned is not None
    assert learned.any_margin < limits.any_margin
    related = known | {"c": ("a", calm)}
    assert learn_class(related, envelope=limits, longest=LONGEST) is None
    young = known | {"c": ("c", count(NO_COUNTS, margins(CLASS_TOKENS - 1, scale=0.03)))}
    assert learn_class(young, envelope=limits, longest=LONGEST) is None


def test_what_lies_outside_the_envelope_teaches_nothing() -> None:
    limits = envelope_of([margins(50_000)], rules=RULES, longest=LONGEST)
    calm = count(NO_COUNTS, margins(CLASS_TOKENS, scale=0.03))
    wild = count(NO_COUNTS, margins(CLASS_TOKENS, scale=2.0))
    honest = {name: (name, calm) for name in "abc"}
    learned = learn_class(honest, envelope=limits, longest=LONGEST)
    assert learn_class(honest | {"d": ("d", wild)}, envelope=limits, longest=LONGEST) == learned
    assert learn_class({name: (name, wild) for name in "abc"}, envelope=limits, longest=LONGEST) is None


@given(st.lists(st.floats(0, 100, width=32), max_size=40), st.lists(st.floats(0, 100, width=32), max_size=40))
def test_counts_add_up(one: list[float], other: list[float]) -> None:
    first, second = (np.array(values, dtype=np.float32) for values in (one, other))
    both = count(count(NO_COUNTS, first), second)
    assert both == count(NO_COUNTS, np.concatenate([first, second]))
    assert sum(both) == len(one) + len(other)
    assert both[0] == sum(value == 0 for value in (*one, *other))


@given(st.integers(1, 4000), st.integers(0, 5))
def test_delta_is_a_gap_that_few_exceed(tokens: int, seed: int) -> None:
    gaps = np.random.default_rng(seed).exponential(0.05, tokens).astype(np.float32)
    delta = delta_of(gaps)
    assert np.quantile(gaps, 0.999) <= delta * (1 + 1e-6) or tokens < 1000
    assert delta <= gaps.max()
    assert (gaps > delta).mean() <= 0.001
