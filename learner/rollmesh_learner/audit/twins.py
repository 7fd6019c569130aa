"""Long answers that came before, word for word, under another seed: copied, or drawn by no seed at all (layer L3).

Invariant: only an answer so improbable that two seeds do not give it by chance has a twin; the same seed given to
another node is expected to give the same answer and is none. The memory is bounded and that of one process: a mark
raises a rate and decides nothing, so a restart may forget it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

LEAST_TOKENS: Final = 32
LEAST_NATS: Final = 16.0
"""Half a nat a token over 32 of them: two honest draws agree by chance with a probability of about exp(-16)."""
KEPT: Final = 50_000
"""Answers remembered, the newest; 16 bytes of digest and a seed each."""


class Twins:
    """The digests of the last long answers, with the seed of each."""

    def __init__(self, *, kept: int = KEPT) -> None:
        self._kept = kept
        self._seeds: OrderedDict[bytes, int] = OrderedDict()

    def has_twin(self, tokens: NDArray[np.uint32], logprobs: NDArray[np.float32], *, seed: int) -> bool:
        """Remember a completion; True when the same one came before under another seed."""
        if len(tokens) < LEAST_TOKENS or float(-logprobs.sum(dtype=np.float64)) < LEAST_NATS:
            return False
        digest = blake3(np.ascontiguousarray(tokens, dtype="<u4").tobytes()).digest(16)
        first = self._seeds.setdefault(digest, seed)
        self._seeds.move_to_end(digest)
        if len(self._seeds) > self._kept:
            self._seeds.popitem(last=False)
        return first != seed
