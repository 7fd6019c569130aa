"""Answers that no model has drawn, for the run that adds numbers: work that costs nothing and is meant to do harm.

Half of them are one wrong sentence, claimed to be right; the others are right, and claimed to be worthless. Under a
learner that believes the claims, every such group has the largest variance that there is.
"""

from __future__ import annotations

import re
from random import Random
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from rollmesh_protocol.lease import Lease
from rollmesh_protocol.rollout import SampleResult
from tests.support.attacker import sample_of

WRONG: Final = "The answer is 0."
"""No sum of the run is 0."""
QUESTION: Final = re.compile(r"What is (\d+) \+ (\d+)\?")
SURPRISE: Final = 3.0
"""Made-up log-probabilities are exponential with a mean of 1/3 nat."""

Made = tuple[list[SampleResult], list[float]]
"""Samples, and the rewards that are claimed for them."""


def fabricated(lease: Lease, *, tokenizer: Tokenizer, end: int) -> Made:
    """Answers that no model has drawn: a wrong one that is said to be right, and the right one, said to be wrong."""
    asked = QUESTION.search(tokenizer.decode(lease.prompt_ids.tolist()))
    assert asked is not None
    a, b = map(int, asked.groups())
    random = Random(lease.lease_id)
    samples, rewards = [], []
    for place, leased in enumerate(lease.samples):
        is_wrong = place % 2 == 0
        text = WRONG if is_wrong else f"{a} + {b} = {a + b}"
        tokens = [*tokenizer.encode(text, add_special_tokens=False).ids, end][: lease.max_new_tokens]
        logprobs = np.array([-random.expovariate(SURPRISE) for _ in tokens], "<f4")
        finish = "stop" if tokens[-1] == end else "length"
        samples.append(sample_of(lease, leased.index, tokens=tokens, logprobs=logprobs, finish=finish))
        rewards.append(1.0 if is_wrong else 0.0)
    return samples, rewards
