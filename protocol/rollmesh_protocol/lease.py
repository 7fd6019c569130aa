"""A lease: the learner's signed order for some samples of one prompt group.

The learner chooses everything that decides the answer: prompt, seeds, length and weights. A completion is then a
function of the lease up to floating-point noise, which is what makes work from strangers checkable.
"""

from __future__ import annotations

import struct
from typing import Final, Literal

import numpy as np
from blake3 import blake3
from pydantic import Field

from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.record import Record

LEASE_ID_BYTES: Final = 16
DIGEST_BYTES: Final = 32
SEED_KEY_BYTES: Final = 32
TOKEN_DTYPE: Final = np.dtype("<u4")
LOGPROB_DTYPE: Final = np.dtype("<f4")
MAX_SEED: Final = (1 << 64) - 1

SwapMode = Literal["drain", "recompute"]
"""What may become of a completion whose node takes newer weights: it is finished first, or goes on in a new segment."""


class LeasedSample(Record):
    """One completion to make: its index in the group and the seed of its noise."""

    index: int = Field(ge=0, lt=limits.MAX_SAMPLES_PER_GROUP)
    seed: int = Field(ge=0, le=MAX_SEED)


class Lease(Record):
    """What to generate, with which weights, and for how long the order stands."""

    lease_id: bytes = Field(min_length=LEASE_ID_BYTES, max_length=LEASE_ID_BYTES)
    node: str
    group: int = Field(ge=0)
    samples: tuple[LeasedSample, ...] = Field(min_length=1, max_length=limits.MAX_SAMPLES_PER_GROUP)
    version: int = Field(ge=1)
    step: int = Field(ge=0)
    root: bytes = Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)
    prompt: bytes = Field(min_length=4, max_length=4 * limits.MAX_PROMPT_TOKENS)
    """Little-endian uint32 token ids."""
    max_new_tokens: int = Field(ge=1, le=limits.MAX_NEW_TOKENS)
    temperature: float = Field(ge=1.0, le=1.0)
    """1 in this protocol: truncation and other temperatures make recomputation discontinuous or biased."""
    duration_s: float = Field(gt=0, le=limits.MAX_LEASE_S)
    """Counted by the node from receipt and by the learner from sending; nobody's wall clock is trusted."""
    swap_mode: SwapMode

    @property
    def prompt_ids(self) -> np.ndarray:
        """uint32[prompt tokens]."""
        return token_ids(self.prompt)


def token_ids(raw: bytes) -> np.ndarray:
    """uint32[n] from 4n little-endian bytes, or :class:`Refused` when the length is not a multiple of four."""
    if len(raw) % TOKEN_DTYPE.itemsize:
        raise Refused("request.invalid", "token ids take four bytes each")
    return np.frombuffer(raw, TOKEN_DTYPE)


def seed_of(seed_key: bytes, *, run: str, group: int, sample: int) -> int:
    """The 64-bit seed of one sample: keyed blake3 over run, group and sample.

    Only the learner holds ``seed_key`` (32 bytes), so a node cannot know seeds before they are leased; and the same
    sample leased again has the same seed.
    """
    name = run.encode()
    statement = struct.pack("<I", len(name)) + name + struct.pack("<QI", group, sample)
    return int.from_bytes(blake3(statement, key=seed_key).digest(8), "little")
