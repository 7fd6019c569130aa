"""Rollouts for the tests of this folder: random tokens with shared beginnings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmesh_learner.training.batch import RolloutRecord, Sample


def sample(prompt: Sequence[int], tokens: Sequence[int], *, group: str = "g", reward: float = 0.0) -> Sample:
    return Sample(
        id=f"{group}/{'.'.join(map(str, tokens))}",
        group=group,
        prompt=np.array(prompt, np.uint32),
        tokens=np.array(tokens, np.uint32),
        mu=np.full(len(tokens), -1.0, np.float32),
        exact=False,
        reward=reward,
    )


def random_samples(
    seed: int, *, groups: int = 3, size: int = 4, longest: int = 9, vocabulary: int = 250, common: int = 5
) -> list[Sample]:
    """``groups`` prompts with ``common`` first tokens in common; answers begin alike too."""
    generator = np.random.default_rng(seed)
    first = generator.integers(0, vocabulary, common)
    found = []
    for group in range(groups):
        prompt = np.concatenate([first, generator.integers(0, vocabulary, 1 + int(generator.integers(0, 6)))])
        for _ in range(size):
            length = int(generator.integers(1, longest + 1))
            tokens = np.concatenate([generator.integers(0, 3, min(3, length)), generator.integers(0, vocabulary, 20)])
            found.append(
                sample(
                    prompt.tolist(), tokens[:length].tolist(), group=f"g{group}", reward=float(generator.integers(0, 2))
                )
            )
    return found


def record(sample: Sample, *, mu: np.ndarray | None = None, number: int = 0) -> RolloutRecord:
    return RolloutRecord(
        id=f"{sample.id}#{number}",
        group=sample.group,
        prompt=sample.prompt.astype("<u4").tobytes(),
        tokens=sample.tokens.astype("<u4").tobytes(),
        mu=(sample.mu if mu is None else mu).astype("<f4").tobytes(),
        exact=sample.exact,
        reward=sample.reward,
    )
