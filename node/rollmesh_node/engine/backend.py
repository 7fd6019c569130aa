"""The seam of the engine: what a backend takes and gives. One conformance suite runs over every backend.

Invariants of any backend: the token at completion position t is ``argmax(logits + noise(seed, t))`` (see
rollmesh_protocol.sampling) under the weights last loaded; a rollout ends with its first stop token, which it
includes, or at the length limit; log-probs are of the sampled token under softmax(logits), before noise.

No torch here: daemon, host and tests import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rollmesh_peer.models.folder import Json
from rollmesh_protocol.layout import Layout

Finish = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Which model, and the verified file that holds its weights."""

    config: Json
    """The object of the model's config.json."""
    layout: Layout
    image: Path
    """The flat image; it stays as it is until ``load`` or ``swap`` returns."""


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One completion to draw: its index in the group, and its 64-bit seed."""

    index: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """Samples of one prompt."""

    key: int
    """Opaque to the engine; comes back with every rollout."""
    prompt: NDArray[np.uint32]
    samples: tuple[SampleRequest, ...]
    max_new_tokens: int
    stop: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One finished completion."""

    key: int
    index: int
    tokens: NDArray[np.uint32]
    """With the final stop token, where there is one."""
    logprobs: NDArray[np.float32]
    finish: Finish
    elapsed_s: float
    """Since ``generate`` was called."""


@dataclass(kw_only=True)
class Stats:
    """Totals since the process began; whoever wants rates takes differences."""

    rollouts: int = 0
    tokens: int = 0
    """Completion tokens."""
    prompt_tokens: int = 0
    """Prompt tokens as computed: once per group, common beginnings once per batch."""
    steps: int = 0
    """Decode steps; tokens / steps is the mean batch."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    """Model and sampler, prefill left out."""
    sampler_s: float = 0.0
    loads: int = 0
    load_s: float = 0.0
    """Of the last load or swap."""
    memory_bytes: int = 0
    """Resident memory of this process, where it can be told; else 0."""
    notes: dict[str, str] = field(default_factory=dict)
    """What a person may want to know: device, threads, library versions."""


class Backend(Protocol):
    """Turns requests into rollouts. Called by one thread."""

    def load(self, weights: Weights) -> None:
        """Build the model and fill in its weights. ``Refused`` for the config, ``HostError`` for too little memory."""

    def swap(self, image: Path) -> None:
        """Take other weights of the same layout, while nothing is generated; no cache of the old ones survives."""

    def generate(self, requests: Sequence[GroupRequest]) -> Iterator[Rollout]:
        """Yield each rollout as soon as it has ended, in any order. Closing the iterator abandons the rest."""

    def stats(self) -> Stats:
        """Return the totals so far."""
