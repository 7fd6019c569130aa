"""Rollouts as the trainer sees them: records from the pipe, checked and decoded, and their division into minibatches.

Invariant: what passes :func:`open_rollout` can be computed with; the same rollouts in the same order and the same
generator always give the same division, so that a resumed trainer repeats its steps bit for bit. Pure numpy.
Micro-batches (what fits into one forward pass) are the business of :mod:`.forest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from rollmesh_protocol.errors import ChildFailed

INVALID: Final = "trainer.rollout"
"""The code of a rollout that cannot be trained on; intake should have refused it."""

TokenIds = NDArray[np.uint32]


class RolloutRecord(BaseModel):
    """One rollout on the pipe. Byte strings are little-endian arrays."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(min_length=1)
    group: str = Field(min_length=1)
    prompt: bytes = Field(min_length=4)
    """uint32 token ids."""
    tokens: bytes = Field(min_length=4)
    """uint32 token ids of the completion, the end-of-text token included."""
    mu: bytes = Field(min_length=4)
    """float32 log-probabilities of the tokens under the weights that generated them, in nats."""
    exact: bool
    """Whether the learner recomputed ``mu``; otherwise it is the node's word."""
    reward: float = Field(allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A rollout with its arrays."""

    id: str
    group: str
    prompt: TokenIds
    tokens: TokenIds
    mu: NDArray[np.float32]
    exact: bool
    reward: float

    @property
    def read(self) -> TokenIds:
        """What the model reads: everything but the last token, which is only predicted."""
        return np.concatenate([self.prompt, self.tokens[:-1]])


def open_rollout(record: RolloutRecord, *, vocabulary: int) -> Sample:
    """Decode a record.

    Raises ``ChildFailed`` for torn arrays, tokens outside the vocabulary and log-probabilities that are not finite.
    """
    if any(len(raw) % 4 for raw in (record.prompt, record.tokens, record.mu)):
        raise ChildFailed(f"rollout {record.id} holds half a number", code=INVALID)
    prompt, tokens = np.frombuffer(record.prompt, dtype="<u4"), np.frombuffer(record.tokens, dtype="<u4")
    mu = np.frombuffer(record.mu, dtype="<f4")
    if len(mu) != len(tokens):
        raise ChildFailed(f"rollout {record.id} has {len(mu)} log-probabilities for {len(tokens)} tokens", code=INVALID)
    if int(prompt.max()) >= vocabulary or int(tokens.max()) >= vocabulary:
        raise ChildFailed(f"rollout {record.id} has a token outside the vocabulary of {vocabulary}", code=INVALID)
    if not np.isfinite(mu).all():
        raise ChildFailed(f"rollout {record.id} has a log-probability that is not finite", code=INVALID)
    return Sample(
        id=record.id,
        group=record.group,
        prompt=prompt.astype(np.uint32),
        tokens=tokens.astype(np.uint32),
        mu=mu.astype(np.float32),
        exact=record.exact,
        reward=record.reward,
    )


def split_groups(samples: Sequence[Sample], *, parts: int, generator: np.random.Generator) -> list[list[int]]:
    """Return at most ``parts`` lists of positions, none empty, with whole groups in each, shuffled by ``generator``."""
    members: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        members.setdefault(sample.group, []).append(index)
    names = list(members)
    order = generator.permutation(len(names))
    pieces = np.array_split(order, min(parts, len(names))) if names else []
    return [[index for name in piece for index in members[names[name]]] for piece in pieces]
