"""Histograms of completion lengths in buckets of powers of two: dropped work beside consumed work.

Dropping what comes too late must not favour short answers; whoever compares the two columns sees whether it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

Fate = Literal["consumed", "dropped"]


def bucket_of(num_tokens: int) -> int:
    """The smallest length of the bucket that a completion of ``num_tokens`` (at least 1) is in: 1, 2, 4, 8 ..."""
    return 1 << (max(1, num_tokens).bit_length() - 1)


def histogram(lengths: Iterable[tuple[Fate, int, int]]) -> dict[int, dict[Fate, int]]:
    """Counts by bucket, shortest first, from (fate, tokens, how many)."""
    found: dict[int, dict[Fate, int]] = {}
    for fate, num_tokens, count in lengths:
        add(found, fate, num_tokens, count=count)
    return in_order(found)


def add(counts: dict[int, dict[Fate, int]], fate: Fate, num_tokens: int, *, count: int = 1) -> None:
    """Count ``count`` more completions of ``num_tokens``."""
    row = counts.setdefault(bucket_of(num_tokens), {"consumed": 0, "dropped": 0})
    row[fate] += count


def in_order(counts: Mapping[int, dict[Fate, int]]) -> dict[int, dict[Fate, int]]:
    """The same, the shortest bucket first."""
    return {bucket: counts[bucket] for bucket in sorted(counts)}
