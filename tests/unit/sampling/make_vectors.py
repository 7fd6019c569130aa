"""Writes tests/vectors/sampling.json. Run by hand, and only when the noise is meant to change: that breaks every peer.

python tests/unit/sampling/make_vectors.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rollmesh_protocol import sampling

VECTORS = Path(__file__).parents[2] / "vectors" / "sampling.json"
SEEDS = [0, 1, 0xFFFF_FFFF, 0x1_0000_0000, 0x0123_4567_89AB_CDEF, 0xFFFF_FFFF_FFFF_FFFF]
POSITIONS = [0, 1, 255, 0xFFFF_FFFF]
TOKENS = [0, 1, 2, 3, 4, 7, 4095, 49_151, 151_935, 1_048_575]
EXTREMES = {"k_least": [463, 0, 28_180], "k_most": [207, 0, 39_758]}
"""(seed, position, token) with k = 0 and k = 2^24 - 1, found by search."""


def logits(size: int, spread: float) -> np.ndarray:
    """Logits that are exact in bf16 as well: multiples of 1/8 below 16 in size."""
    return ((np.arange(size) * 7919) % 251 - 125).astype(np.float32) / 125 // (1 / 64) / 64 * np.float32(spread)


def make() -> dict[str, object]:
    rows = [
        {
            "seed": seed,
            "position": position,
            "tokens": TOKENS,
            "k": sampling.uniforms(seed, position, TOKENS).tolist(),
            "noise": [float(g).hex() for g in sampling.noise(seed, position, TOKENS)],
        }
        for seed in SEEDS
        for position in POSITIONS
    ]
    draws = [
        {
            "vocabulary": size,
            "spread": spread,
            "seed": seed,
            "tokens": [sampling.sample_token(logits(size, spread), seed, position) for position in range(16)],
        }
        for size in (5, 1003, 49_152)
        for spread in (0.0, 4.0, 16.0)
        for seed in (7, 0xFEDC_BA98_7654_3210)
    ]
    return {"noise": rows, "extremes": EXTREMES, "draws": draws}


if __name__ == "__main__":
    VECTORS.write_text(json.dumps(make(), indent=1) + "\n")
