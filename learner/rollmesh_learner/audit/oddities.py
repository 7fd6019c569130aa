"""What looks odd about one rollout (layer L3): marks that make an audit more likely. They never reject anything.

A converged model repeats itself and answers briefly and alike whatever the seed, and a trained one may be sure of every
token: each of these marks is found on honest work too. Pure; what other rollouts looked like is :mod:`.twins`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

NGRAM: Final = 8
LEAST_TOKENS: Final = 32
"""Shorter answers are not looked at: there is too little of them to be odd."""
LOOPED_SHARE: Final = 0.5
"""From so large a share of n-grams that stood in the answer before, it counts as a loop."""
LEAST_FLAT: Final = 8
"""So many log-probabilities that are all one number are nobody's."""
IMPROBABLE_NATS: Final = 6.0
"""Mean surprise of a token: a uniform choice among 400. What is drawn at temperature 1 stays far below."""


def marks_of(tokens: NDArray[np.uint32], logprobs: NDArray[np.float32]) -> tuple[str, ...]:
    """The marks of a completion: ``loop``, ``flat``, ``improbable``. Both arrays [n], log-probabilities in nats."""
    marks = []
    if looped_share(tokens) >= LOOPED_SHARE:
        marks.append("loop")
    if len(logprobs) >= LEAST_FLAT and float(logprobs.min()) == float(logprobs.max()) != 0.0:
        marks.append("flat")
    if len(logprobs) >= LEAST_TOKENS and float(-logprobs.mean(dtype=np.float64)) > IMPROBABLE_NATS:
        marks.append("improbable")
    return tuple(marks)


def looped_share(tokens: NDArray[np.uint32]) -> float:
    """The share of a completion's ``NGRAM``-grams that occurred in it before; 0 for fewer than ``LEAST_TOKENS``."""
    if len(tokens) < LEAST_TOKENS:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(tokens), NGRAM)
    return 1.0 - len(np.unique(grams, axis=0)) / len(grams)
