"""The parts of a rollout that are recomputed by themselves: what each version of the weights has drawn of it.

Invariant: the pieces of a rollout are all of its tokens, in order; each stands behind the prompt and all tokens before
it, as its engine saw them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rollmesh_protocol.lease import TOKEN_DTYPE
from rollmesh_protocol.rollout import Rollout


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Tokens drawn under one root. ``tokens`` and ``logprobs`` are [n]; ``prompt`` is little-endian uint32 bytes."""

    root: bytes
    prompt: bytes
    tokens: NDArray[np.uint32]
    logprobs: NDArray[np.float32]
    seed: int
    first: int
    """The place of its first token in the completion."""
    ends_with_stop: bool
    number: int
    """Of its rollout, in the order in which rollouts were made."""


def pieces_of(rollout: Rollout, *, number: int = 0) -> list[Piece]:
    """One piece for each segment."""
    firsts = [segment.first_token for segment in rollout.segments]
    spans = pairwise([*firsts, len(rollout.tokens)])
    return [
        Piece(
            root=segment.root,
            prompt=rollout.lease.prompt + rollout.tokens[:first].astype(TOKEN_DTYPE).tobytes(),
            tokens=rollout.tokens[first:end],
            logprobs=rollout.logprobs[first:end],
            seed=rollout.seed,
            first=first,
            ends_with_stop=rollout.finish == "stop" and end == len(rollout.tokens),
            number=number,
        )
        for segment, (first, end) in zip(rollout.segments, spans, strict=True)
    ]
