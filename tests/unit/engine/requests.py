"""Requests for the tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmesh_node.engine.backend import Backend, GroupRequest, Rollout, SampleRequest


def drained(backend: Backend, requests: Sequence[GroupRequest]) -> list[Rollout]:
    """All rollouts of ``requests``, as they end."""
    backend.add(requests)
    rollouts: list[Rollout] = []
    while backend.in_flight:
        rollouts += backend.step()
    return rollouts


def group(
    key: int,
    prompt: Sequence[int],
    *,
    seeds: Sequence[int],
    max_new_tokens: int = 8,
    stop: Sequence[int] = (),
) -> GroupRequest:
    """Samples 0, 1, ... of one prompt."""
    return GroupRequest(
        key=key,
        prompt=np.array(prompt, dtype=np.uint32),
        samples=tuple(SampleRequest(index=index, seed=seed) for index, seed in enumerate(seeds)),
        max_new_tokens=max_new_tokens,
        stop=frozenset(stop),
    )


def random_groups(
    seed: int,
    *,
    prompts: Sequence[int],
    samples: int,
    max_new_tokens: int = 10,
    stop: Sequence[int] = (),
    shared: int = 0,
) -> list[GroupRequest]:
    """Groups whose prompts have these lengths and begin with the same ``shared`` tokens."""
    generator = np.random.default_rng(seed)
    beginning = generator.integers(0, 256, shared)
    return [
        group(
            key,
            [*beginning, *generator.integers(0, 256, length - shared)],
            seeds=[seed * 1000 + key * 100 + index for index in range(samples)],
            max_new_tokens=max_new_tokens,
            stop=stop,
        )
        for key, length in enumerate(prompts)
    ]
