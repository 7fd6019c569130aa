"""Leases that a node let go of against those it delivered: chance looks like chance, and choosing shows."""

from __future__ import annotations

from random import Random

import pytest

from rollmesh_learner.members.withheld import KEPT_LEASES, LEAST_LEASES, WithheldBook, rank_z

NODE = "node-a"


def judge(*, chooses_by: str, leases: int = 120, seed: int = 0):
    """A node that looks at its leases, four samples each, and abandons 30 % of them: at random, or the worst ones."""
    random = Random(seed)
    book = WithheldBook()
    for number in range(leases):
        skill = random.random()
        samples = [(float(random.random() < skill), random.randrange(5, 200)) for _ in range(4)]
        score = {
            "chance": random.random(),
            "reward": sum(reward for reward, _ in samples) / 4 + 0.01 * random.random(),
            "length": 1 - sum(tokens for _, tokens in samples) / 800,
        }[chooses_by]
        lease_id = number.to_bytes(16, "little")
        tell = book.abandoned if score < 0.3 else book.delivered
        for reward, tokens in samples:
            tell(NODE, lease_id, reward=reward, tokens=tokens)
    return book.judge(NODE)


def test_who_abandons_what_does_badly_is_seen() -> None:
    found = judge(chooses_by="reward")
    assert found.reward_z > 5 and found.is_telling
    assert "lower rewards" in found.words


def test_who_abandons_what_is_long_is_seen() -> None:
    found = judge(chooses_by="length", leases=300)
    assert found.length_z > 3 and found.is_telling
    assert "longer answers" in found.words


def test_chance_is_hardly_ever_telling() -> None:
    found = [judge(chooses_by="chance", seed=seed) for seed in range(400)]
    assert sum(one.is_telling for one in found) <= 6  # 2 x 1/740 each: about one is expected
    assert {one.words for one in found if not one.is_telling} == {""}


def test_too_little_tells_nothing() -> None:
    assert rank_z([0.0] * (LEAST_LEASES - 1), [1.0] * 100) == 0.0
    assert rank_z([0.0] * LEAST_LEASES, [1.0] * LEAST_LEASES) > 3
    assert WithheldBook().judge("nobody").words == ""


def test_equal_values_are_no_difference() -> None:
    assert rank_z([1.0] * 20, [1.0] * 20) == 0.0


def test_it_is_the_test_of_mann_and_whitney() -> None:
    """U counted pair by pair, ties as halves, and its variance with the correction for ties."""
    low, high = [1, 2, 2, 3, 3, 4, 5, 6], [3, 4, 5, 6, 6, 7, 8, 9]
    above = sum((x > y) + 0.5 * (x == y) for x in low for y in high)
    ties = [2, 3, 2, 2, 3]
    variance = 64 / 12 * (17 - sum(t**3 - t for t in ties) / (16 * 15))
    assert rank_z(low, high) == pytest.approx((32 - above) / variance**0.5)


def test_only_the_newest_leases_count() -> None:
    book = WithheldBook()
    for number in range(KEPT_LEASES + 50):
        book.delivered(NODE, number.to_bytes(16, "little"), reward=1.0, tokens=1)
    assert book.judge(NODE).delivered == KEPT_LEASES
