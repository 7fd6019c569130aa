"""Seeded sampling: the noise that makes a completion a function of weights, prompt and seed. The numpy reference.

A token is drawn by the Gumbel-max trick at temperature 1::

    token = argmax over j of  logits[j] + g(seed, position, j)

where ``position`` counts the tokens of the completion from 0. The noise is counter-based, so that any element can be
computed alone, in any order, on any device:

* Philox4x32-10 (Salmon et al., SC 2011) with counter ``(j // 4, position, 0, 0)`` and key ``(seed mod 2^32,
  seed >> 32)`` gives four 32-bit words; token j takes word ``j % 4``.
* ``k = word >> 8`` (24 bits), ``v = (k + 0.5) 2^-24``, ``g = -log(-log1p(-v))``.

``v`` lies strictly inside (0, 1), so ``g`` is finite: it falls from :data:`G_MAX` at k = 0 to :data:`G_MIN` at
k = 2^24 - 1. (``-log(-log(u))`` in float32 rounds the top ``u`` to 1 and gives infinite noise.)

**Precision.** Logits are converted to float32 first; noise and sums are float64 here and in the torch version, so both
choose the same token; of equal sums the lowest token id wins. A backend that must stay in float32 computes
``E = -log1p(-v)`` for k < 2^23 and ``E = -log((2^24 - k - 0.5) 2^-24)`` above, both exact in their argument, and
then ``g = -log(E)``: within :data:`FLOAT32_TOLERANCE` of the reference (k + 0.5 itself does not fit above 2^23).

**The tail that 24 bits cut.** True Gumbel noise passes G_MAX = 17.33 with probability 2^-25 (3.0e-8) and falls below
G_MIN = -2.85 with as much; here never. Whatever the other tokens' noise, the lattice of v moves the chance that a
token wins by at most 2^-25, and a token whose logit is G_MAX - G_MIN = 20.18 below the largest is never drawn (its
probability is below 1.8e-9).

Not here: the batched torch version (rollmesh_peer.models.sampling), and who chooses the seeds (the lease).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUNDS: Final = 10
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
"""Philox4x32 round multipliers."""
WEYL: Final = (0x9E3779B9, 0xBB67AE85)
"""Philox4x32 key increments."""
PHILOX_BLOCK: Final = 8192
"""Counters worked on at a time: eight arrays of 64 KiB stay in a core's second-level cache."""
TOKENS_PER_COUNTER: Final = 4
K_BITS: Final = 24
"""Bits of noise; as many as a float32 can tell apart."""
G_MAX: Final = -math.log(-math.log1p(-(2.0**-25)))
"""The largest noise, 17.3287 (k = 0): a token further than this below the best sum cannot win."""
G_MIN: Final = -math.log(25 * math.log(2.0))
"""The smallest noise, -2.8524 (k = 2^24 - 1)."""
FLOAT32_TOLERANCE: Final = 4e-6
"""Largest difference of noise computed in float32 as described above; four units in the last place at 17."""

_WORD: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_MULTIPLIERS: Final = (np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1]))
_WEYL: Final = (np.uint64(WEYL[0]), np.uint64(WEYL[1]))

Words = NDArray[np.uint32]
Column = NDArray[np.uint64]


def philox4x32(counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[ArrayLike, ArrayLike]) -> Words:
    """Return Philox4x32-10 of broadcast 32-bit counter words and key words: uint32, one more axis of 4 at the end."""
    shape = np.broadcast_shapes(*(np.shape(word) for word in (*counter, *key)))
    flat = [np.broadcast_to(np.asarray(word, dtype=np.uint64), shape).reshape(-1) for word in (*counter, *key)]
    words = np.empty((flat[0].size, 4), dtype=np.uint32)
    for start in range(0, len(words), PHILOX_BLOCK):
        block = slice(start, start + PHILOX_BLOCK)
        columns = [column[block].copy() for column in flat]
        words[block] = np.stack(philox_columns(columns[:4], key=columns[4:]), axis=-1)
    return words.reshape(*shape, 4)


def philox_columns(counter: Sequence[Column], *, key: Sequence[Column]) -> tuple[Column, Column, Column, Column]:
    """Return the four output words of each counter (four columns) and key (two): uint64 [n], each below 2^32.

    The six inputs, uint64 [n] below 2^32, are scratch space and are overwritten.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    p0, p1 = np.empty_like(c0), np.empty_like(c0)
    for _ in range(ROUNDS):
        # c1, c3 and the key may carry bits above 32: whatever they are XORed into is masked afterwards.
        np.multiply(c0, _MULTIPLIERS[0], out=p0)
        np.multiply(c2, _MULTIPLIERS[1], out=p1)
        np.right_shift(p1, _HALF, out=c0)
        c0 ^= c1
        c0 ^= k0
        c0 &= _WORD
        np.right_shift(p0, _HALF, out=c2)
        c2 ^= c3
        c2 ^= k1
        c2 &= _WORD
        c1, p1 = p1, c1
        c3, p0 = p0, c3
        k0 += _WEYL[0]
        k1 += _WEYL[1]
    c1 &= _WORD
    c3 &= _WORD
    return c0, c1, c2, c3


def split_seed(seed: int) -> tuple[int, int]:
    """Return the Philox key (low word, high word) of a seed in [0, 2^64); ValueError outside."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"a seed is an unsigned 64-bit number, got {seed}")
    return seed & 0xFFFFFFFF, seed >> 32


def uniforms(seed: int, position: int, token_ids: ArrayLike) -> Words:
    """Return the 24-bit numbers k of these tokens, uint32, in the shape of ``token_ids``."""
    if not 0 <= position < 1 << 32:
        raise ValueError(f"a position is an unsigned 32-bit number, got {position}")
    ids = np.asarray(token_ids, dtype=np.int64)
    words = philox4x32((ids // TOKENS_PER_COUNTER, position, 0, 0), split_seed(seed))
    chosen: Words = np.take_along_axis(words, (ids % TOKENS_PER_COUNTER)[..., None], axis=-1)[..., 0]
    return chosen >> np.uint32(32 - K_BITS)


def gumbel(k: ArrayLike) -> NDArray[np.float64]:
    """Return the noise of 24-bit numbers k, float64."""
    v = (np.asarray(k, dtype=np.float64) + 0.5) * 2.0**-K_BITS
    noise: NDArray[np.float64] = -np.log(-np.log1p(-v))
    return noise


def noise(seed: int, position: int, token_ids: ArrayLike) -> NDArray[np.float64]:
    """Return g(seed, position, token) for each token id, float64, in the shape of ``token_ids``."""
    return gumbel(uniforms(seed, position, token_ids))


def sample_token(logits: ArrayLike, seed: int, position: int) -> int:
    """Return the token that these logits, 1-D over the vocabulary, and this seed give at this position."""
    values = np.asarray(logits, dtype=np.float32).astype(np.float64)
    return int(np.argmax(values + noise(seed, position, np.arange(values.size))))


def sampling_margin(logits: ArrayLike, seed: int, position: int, token: int) -> float:
    """Return max_j z_j - z_token for z = logits + noise: 0 where ``token`` is the honest draw, else above 0."""
    values = np.asarray(logits, dtype=np.float32).astype(np.float64)
    z = values + noise(seed, position, np.arange(values.size))
    return float(z.max() - z[token])
