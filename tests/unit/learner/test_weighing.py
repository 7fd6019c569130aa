"""How likely an audit is: the mean stays what the operator set, whatever rollouts look like, and so does the cost."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_learner.audit.weighing import (
    COST_MOST,
    WEIGHT_MOST,
    Evidence,
    Means,
    early_rate,
    steady_rate,
    weight_of,
)

Q = 0.03
DULL = Evidence(advantage=0.0, reward=0.0, marks=0, tokens=20)
EVIDENCE = st.builds(
    Evidence,
    advantage=st.floats(-20, 20),
    reward=st.floats(-5, 5),
    marks=st.integers(0, 5),
    tokens=st.integers(2, 4000),
)


def group(random: Random, *, good: float, size: int = 8, long_if_good: int = 1, odd: float = 0.0) -> list[Evidence]:
    """Rewards 0 and 1 by chance, their advantages, and lengths that go with them."""
    rewards = [float(random.random() < good) for _ in range(size)]
    mean = sum(rewards) / size
    deviation = (mean * (1 - mean)) ** 0.5
    return [
        Evidence(
            advantage=(reward - mean) / deviation if deviation else 0.0,
            reward=reward,
            marks=int(random.random() < odd),
            tokens=random.randrange(20, 60) * (long_if_good if reward else 1),
        )
        for reward in rewards
    ]


def simulate(
    groups: list[list[Evidence]], *, mean_rate: float = Q
) -> tuple[float, float, list[tuple[Evidence, float]]]:
    """As the drawer goes about it: the mean rate, the expected share of audited tokens, and every rollout's rate."""
    means = Means()
    rated = []
    for members in groups:
        for evidence in members:
            means = means.seen(evidence)
        rated += [(evidence, steady_rate(evidence, means=means, mean_rate=mean_rate)) for evidence in members]
    tokens = sum(evidence.tokens for evidence, _ in rated)
    mean = sum(rate for _, rate in rated) / len(rated)
    return mean, sum(rate * evidence.tokens for evidence, rate in rated) / tokens, rated


@pytest.mark.parametrize("good", [0.0, 0.05, 0.3, 0.5, 0.9, 1.0])
def test_the_mean_rate_is_the_configured_one_at_any_reward(good: float) -> None:
    random = Random(1)
    mean, cost, _ = simulate([group(random, good=good) for _ in range(3000)])
    assert mean == pytest.approx(Q, rel=0.03)
    assert cost <= COST_MOST


def test_the_mean_is_held_while_the_model_learns_and_oddities_come_and_go() -> None:
    random = Random(2)
    groups = [group(random, good=step / 4000, odd=0.3 if step > 2000 else 0.0) for step in range(4000)]
    mean, cost, _ = simulate(groups)
    assert mean == pytest.approx(Q, rel=0.05)
    assert cost <= COST_MOST


@pytest.mark.parametrize("long_if_good", [4, 20])
def test_audits_cost_five_percent_of_the_tokens_at_most_although_the_telling_ones_are_long(long_if_good: int) -> None:
    random = Random(3)
    mean, cost, _ = simulate([group(random, good=0.1, long_if_good=long_if_good) for _ in range(4000)])
    assert cost <= COST_MOST * 1.02
    assert mean <= Q * 1.03


def test_telling_rollouts_are_drawn_more_often_and_nobody_is_drawn_less_than_half_as_often() -> None:
    random = Random(4)
    _, _, rated = simulate([group(random, good=0.1) for _ in range(3000)])
    won = [rate for evidence, rate in rated if evidence.reward > 0]
    lost = [rate for evidence, rate in rated if evidence.reward == 0 and evidence.advantage == 0]
    assert sum(won) / len(won) > 2.5 * sum(lost) / len(lost)
    assert min(rate for _, rate in rated) >= Q / 2


@pytest.mark.parametrize("what", [{"advantage": 1.0}, {"advantage": -1.0}, {"reward": 1.0}, {"marks": 1}, {"marks": 2}])
def test_each_of_them_tells_something(what: dict) -> None:
    told = Evidence(**({"advantage": 0.0, "reward": 0.0, "marks": 0, "tokens": 20} | what))
    assert weight_of(told) > weight_of(DULL) == 1.0
    assert steady_rate(told, means=Means(), mean_rate=Q) > steady_rate(DULL, means=Means(), mean_rate=Q)


@given(st.lists(EVIDENCE, min_size=1, max_size=50), st.floats(0, 1))
def test_a_rate_is_a_probability_and_never_below_half_the_mean(found: list[Evidence], mean_rate: float) -> None:
    means = Means()
    for evidence in found:
        means = means.seen(evidence)
        rate = steady_rate(evidence, means=means, mean_rate=mean_rate)
        assert mean_rate / 2 <= rate <= 1
        assert 1 <= weight_of(evidence) <= WEIGHT_MOST


def test_without_audits_nothing_is_drawn_and_below_full_standing_marks_raise_the_rate() -> None:
    assert steady_rate(DULL, means=Means(), mean_rate=0.0) == 0.0
    odd = Evidence(advantage=0.0, reward=0.0, marks=1, tokens=20)
    assert (early_rate(DULL, base_rate=0.5), early_rate(odd, base_rate=0.5)) == (0.5, 1.0)
    assert early_rate(odd, base_rate=0.0) == 0.0


def test_what_was_audited_is_counted_in_tokens() -> None:
    means = Means().seen(DULL).seen(DULL).drawn(DULL)
    assert (means.work_tokens, means.drawn_tokens) == (40, 20)
