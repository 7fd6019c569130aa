"""The loop of :mod:`.bit_sums`, compiled by numba: one pass at about the speed of memory.

It is written so that the compiler can vectorise it: an index, one accumulator for each sum, no branch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollmesh_protocol.compiled import compiled


@compiled
def sums(words: NDArray[np.uint16], counted: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return the sum of the words and of their squares, mod 2^64; a word without a bit of ``counted`` is zero."""
    total, squares = np.uint64(0), np.uint64(0)
    for index in range(words.size):
        word = np.uint64(words[index])
        word &= np.uint64(0) - np.uint64((word & counted) != np.uint64(0))
        total += word
        squares += word * word
    return total, squares
