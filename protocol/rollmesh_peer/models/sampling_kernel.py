"""The loop of the seeded draw on a CPU, compiled: the token of every row, and its sum.

The heavy tokens of a row are looked at first, for a good z*. What is left wins only with a noise word below a bound
that all of it shares, so the words of all counters are computed in blocks, without a branch, and a block is looked at
only where one of its words is that low: a few a row. Sums are float64, as in the reference.

Not here: the weights, and why the bound holds (:mod:`.sampling`).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollmesh_protocol import sampling as reference
from rollmesh_protocol.compiled import compiled, inlined

BLOCK: Final = 256
"""Counters computed between two looks."""
_M0, _M1 = (np.uint64(multiplier) for multiplier in reference.MULTIPLIERS)
_W0, _W1 = (np.uint32(increment) for increment in reference.WEYL)
_ROUNDS: Final = reference.ROUNDS
_HALF: Final = np.uint64(32)
_SHIFT: Final = np.uint32(32 - reference.K_BITS)
_LATTICE: Final = 2.0**reference.K_BITS
_MOST_WORD: Final = 2.0**32 - 1.0
_ZERO: Final = np.uint32(0)


@compiled
def draw_rows(  # noqa: PLR0917 - numba takes no keywords
    values: NDArray[np.float32],
    heavy: NDArray[np.int32],
    largest: NDArray[np.float32],
    keys: NDArray[np.uint32],
    most_left: float,
    slack: float,
    tokens: NDArray[np.int64],
    best: NDArray[np.float64],
) -> None:
    """Fill ``tokens`` [B] and ``best`` [B] for ``values`` [B, V], V a multiple of four.

    ``largest`` [B] is each row's largest value, ``keys`` [B, 3] position and seed (low, high). ``heavy`` [B, V / 4] is
    not zero where one of four tokens is to be looked at first; of the others none weighs more than ``most_left``, as
    exp(value - largest). ``slack`` in nats widens the bound for them.
    """
    words = np.empty((4, BLOCK), np.uint32)
    words0, words1, words2, words3 = words[0], words[1], words[2], words[3]
    counters = values.shape[1] // 4
    for row in range(values.shape[0]):
        position, low, high = keys[row, 0], keys[row, 1], keys[row, 2]
        token, most = np.int64(0), -math.inf
        for counter in range(counters):
            if heavy[row, counter]:
                four = _philox(np.uint32(counter), position, low, high)
                for column in range(4):
                    total = values[row, 4 * counter + column] + _gumbel(four[column])
                    if total > most:
                        token, most = np.int64(4 * counter + column), total
        # v <= most_left * exp(largest - z*), and a word's own v is a step of the lattice coarser than the word.
        bound = np.uint32(min(_MOST_WORD, (math.exp(largest[row] - most + slack) * most_left * _LATTICE + 1.0) * 256.0))
        for start in range(0, counters, BLOCK):
            low_words = _ZERO
            for index in range(BLOCK):
                w0, w1, w2, w3 = _philox(np.uint32(start + index), position, low, high)
                words0[index], words1[index], words2[index], words3[index] = w0, w1, w2, w3
                low_words += np.uint32(w0 <= bound) + np.uint32(w1 <= bound)
                low_words += np.uint32(w2 <= bound) + np.uint32(w3 <= bound)
            if low_words == _ZERO:
                continue
            for index in range(min(BLOCK, counters - start)):
                for column in range(4):
                    if words[column, index] <= bound:
                        here = 4 * (start + index) + column
                        total = values[row, here] + _gumbel(words[column, index])
                        if total > most or (total == most and here < token):  # of equal sums the lowest id wins
                            token, most = np.int64(here), total
        tokens[row], best[row] = token, most


@inlined
def _philox(
    c0: np.uint32, c1: np.uint32, k0: np.uint32, k1: np.uint32
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    """Philox4x32-10 of counter (c0, c1, 0, 0) and key (k0, k1)."""
    c2, c3 = _ZERO, _ZERO
    for _ in range(_ROUNDS):
        p0, p1 = np.uint64(c0) * _M0, np.uint64(c2) * _M1
        c0, c2 = np.uint32(np.uint32(p1 >> _HALF) ^ c1 ^ k0), np.uint32(np.uint32(p0 >> _HALF) ^ c3 ^ k1)
        c1, c3 = np.uint32(p1), np.uint32(p0)
        k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
    return c0, c1, c2, c3


@inlined
def _gumbel(word: np.uint32) -> float:
    return -math.log(-math.log1p(-((np.float64(word >> _SHIFT) + 0.5) / _LATTICE)))
