"""Buckets of lengths."""

from __future__ import annotations

from rollmesh_learner.work.lengths import bucket_of, histogram


def test_buckets_are_powers_of_two() -> None:
    assert [bucket_of(n) for n in (1, 2, 3, 4, 7, 8, 255, 256)] == [1, 2, 2, 4, 4, 8, 128, 256]


def test_dropped_stands_beside_consumed() -> None:
    found = histogram([("dropped", 300, 2), ("consumed", 3, 5), ("dropped", 2, 1), ("consumed", 400, 1)])
    assert list(found.items()) == [(2, {"consumed": 5, "dropped": 1}), (256, {"consumed": 1, "dropped": 2})]
