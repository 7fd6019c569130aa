"""Statistics of the noise with fixed seeds: draws follow softmax, and nothing depends on its neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from rollmesh_protocol import sampling

DRAWS = 20_000
P_LEAST = 1e-3
"""Smallest p-value accepted; the seeds are fixed, so a pass stays a pass."""


def chi_square_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """Upper tail of chi-square by the Wilson-Hilferty approximation; cells are merged until each expects 10."""
    order = np.argsort(expected)
    merged_observed, merged_expected, o, e = [], [], 0.0, 0.0
    for index in order:
        o, e = o + observed[index], e + expected[index]
        if e >= 10:
            merged_observed.append(o)
            merged_expected.append(e)
            o, e = 0.0, 0.0
    merged_observed[-1] += o
    merged_expected[-1] += e
    seen, wanted = np.array(merged_observed), np.array(merged_expected)
    freedom = len(seen) - 1
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    return float(0.5 * erfc(z / np.sqrt(2)))


def erfc(x: float) -> float:
    from math import erfc as one

    return one(x)


def k_table(seeds: np.ndarray, positions: np.ndarray, size: int) -> np.ndarray:
    """k of tokens 0 .. size-1 for each (seed, position): [n, size]."""
    words = sampling.philox4x32(
        (np.arange(-(-size // 4))[None], positions[:, None], 0, 0),
        (seeds[:, None] & np.uint64(0xFFFFFFFF), seeds[:, None] >> np.uint64(32)),
    )
    return (words >> np.uint32(8)).reshape(len(seeds), -1)[:, :size]


def test_the_table_is_the_reference():
    table = k_table(np.array([3, 1 << 40], dtype=np.uint64), np.array([0, 9], dtype=np.uint64), 10)
    assert table[1].tolist() == sampling.uniforms(1 << 40, 9, np.arange(10)).tolist()


@pytest.mark.parametrize("vary", ["position", "seed"])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_draws_follow_softmax(vary, spread):
    logits = (np.random.default_rng(5).standard_normal(61) * spread).astype(np.float32)
    steps = np.arange(DRAWS, dtype=np.uint64)
    seeds = np.full(DRAWS, 0xABCDEF, dtype=np.uint64) if vary == "position" else steps * np.uint64(0x9E3779B97F4A7C15)
    positions = steps if vary == "position" else np.zeros(DRAWS, dtype=np.uint64)
    tokens = (logits.astype(np.float64) + sampling.gumbel(k_table(seeds, positions, 61))).argmax(1)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    assert chi_square_p(np.bincount(tokens, minlength=61), DRAWS * weights / weights.sum()) > P_LEAST


def test_the_test_sees_another_temperature():
    logits = (np.random.default_rng(5).standard_normal(61)).astype(np.float32)
    noise = sampling.gumbel(k_table(np.full(DRAWS, 1, np.uint64), np.arange(DRAWS, dtype=np.uint64), 61))
    tokens = (logits / np.float32(0.9) + noise).argmax(1)
    weights = np.exp(logits.astype(np.float64))
    assert chi_square_p(np.bincount(tokens, minlength=61), DRAWS * weights / weights.sum()) < 1e-6


def test_k_is_uniform():
    k = k_table(np.array([17], np.uint64), np.array([0], np.uint64), 1 << 20).ravel()
    for shift in (16, 8, 0):  # each byte of the 24 bits
        counts = np.bincount((k >> shift) & 255, minlength=256)
        assert chi_square_p(counts, np.full(256, len(k) / 256)) > P_LEAST


def pairs(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Two long vectors of k that differ in one thing only."""
    steps = np.arange(4000, dtype=np.uint64)
    if name == "positions":
        table = k_table(np.full(4000, 9, np.uint64), steps, 32)
        return table[:-1].ravel(), table[1:].ravel()
    if name == "seeds":
        table = k_table(steps, np.zeros(4000, np.uint64), 32)
        return table[:-1].ravel(), table[1:].ravel()
    if name == "high halves of seeds":
        table = k_table(steps << np.uint64(32), np.zeros(4000, np.uint64), 32)
        return table[:-1].ravel(), table[1:].ravel()
    table = k_table(steps, steps, 64)
    distance = {"tokens of one counter": 1, "tokens of neighbouring counters": 4}[name]
    return table[:, :-distance].ravel(), table[:, distance:].ravel()


@pytest.mark.parametrize(
    "name",
    ["positions", "seeds", "high halves of seeds", "tokens of one counter", "tokens of neighbouring counters"],
)
def test_neighbours_are_independent(name):
    first, second = pairs(name)
    counts = np.bincount((first >> 19) * 32 + (second >> 19), minlength=1024)
    assert chi_square_p(counts, np.full(1024, len(first) / 1024)) > P_LEAST
    correlation = np.corrcoef(sampling.gumbel(first), sampling.gumbel(second))[0, 1]
    assert abs(correlation) < 4 / np.sqrt(len(first))


def test_tail_of_the_noise():
    """The share of noise above t is 1 - exp(-exp(-t)), as far out as a million draws can tell."""
    noise = sampling.gumbel(k_table(np.array([23], np.uint64), np.array([4], np.uint64), 1 << 20)).ravel()
    for t in (2.0, 5.0, 8.0):
        expected = len(noise) * -np.expm1(-np.exp(-t))
        assert abs((noise > t).sum() - expected) < 4 * np.sqrt(expected)
