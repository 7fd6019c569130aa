"""The loops of :mod:`.bit_sums`, compiled by numba: one pass at about the speed of memory.

They are written so that the compiler can vectorise them: an index, one accumulator for each sum, no branch.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollmesh_protocol.compiled import compiled

_EXPONENT: Final = np.uint64(0x7F80)
"""Of a bfloat16; all zero for zeros and subnormal numbers."""


@compiled
def plain(words: NDArray[np.uint16]) -> tuple[np.uint64, np.uint64]:
    """Return the sum of the words and of their squares, mod 2^64."""
    total, squares = np.uint64(0), np.uint64(0)
    for index in range(words.size):
        word = np.uint64(words[index])
        total += word
        squares += word * word
    return total, squares


@compiled
def flushed(words: NDArray[np.uint16]) -> tuple[np.uint64, np.uint64]:
    """The same, where a bfloat16 without an exponent counts as zero."""
    total, squares = np.uint64(0), np.uint64(0)
    for index in range(words.size):
        word = np.uint64(words[index])
        word &= np.uint64(0) - np.uint64((word & _EXPONENT) != np.uint64(0))
        total += word
        squares += word * word
    return total, squares
