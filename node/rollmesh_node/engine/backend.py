"""The seam of the engine: what a backend takes and gives. One conformance suite runs over every backend.

Invariants of any backend: the token at completion position t is ``argmax(logits + noise(seed, t))`` (see
rollmesh_protocol.sampling) under the weights last loaded; a rollout ends with its first stop token, which it
includes, or at the length limit; log-probs are of the sampled token under softmax(logits), before noise. Neither
depends on what else is in flight, but for kernel rounding.

No torch here: daemon, host and tests import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rollmesh_peer.bit_sums import Sums
from rollmesh_peer.models.folder import Json
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.layout import Layout

Finish = Literal["stop", "length"]
STEP_S: Final = 1.0
"""After so long ``step`` returns even if nothing has ended: the host looks at its pipe and gives a sign of life."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Which model, and the verified file that holds its weights."""

    config: Json
    """The object of the model's config.json."""
    layout: Layout
    image: Path
    """The flat image; it stays as it is until ``load`` or ``swap`` returns."""
    sums: Sequence[Sums] | None = None
    """Its reload sums, where they are known: then the image is not read for them."""


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One completion to draw: its index in the group, and its 64-bit seed."""

    index: int
    seed: int
    begun: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, dtype=np.uint32))
    """Tokens of the completion that are already drawn: fewer than the length limit, no stop token among them.
    The engine goes on behind them, at position ``len(begun)``, and reports only what it draws itself."""


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """Samples of one prompt."""

    key: int
    """Opaque to the engine, and no other request in flight has it; comes back with every rollout."""
    prompt: NDArray[np.uint32]
    samples: tuple[SampleRequest, ...]
    max_new_tokens: int
    """Of a whole completion, ``begun`` included."""
    stop: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Partial:
    """What the engine has drawn of one completion so far, behind ``begun``; ``tokens`` may be empty."""

    key: int
    index: int
    tokens: NDArray[np.uint32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Rollout(Partial):
    """One finished completion; ``tokens`` with the final stop token, where there is one."""

    finish: Finish


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
    """Turns requests into rollouts, continuously. Called by one thread; requests are added between any two steps."""

    def load(self, weights: Weights) -> None:
        """Build the model and fill in its weights. ``Refused`` for the config, ``HostError`` for too little memory."""

    def swap(self, image: Path, sums: Sequence[Sums] | None = None) -> None:
        """Take other weights of the same layout, while nothing is in flight; no cache of the old ones survives.

        ``sums`` as in :class:`Weights`.
        """

    def add(self, requests: Sequence[GroupRequest]) -> None:
        """Take more work; how much of it is computed side by side is the backend's business.

        ``ChildFailed("child.request")`` for what the model cannot do, before any of ``requests`` is taken.
        """

    def step(self) -> list[Rollout]:
        """Compute until a rollout has ended, or for :data:`STEP_S`; return those that ended, in any order."""

    def drop(self) -> list[Partial]:
        """Abandon everything in flight and return how far each unfinished sample had come."""

    @property
    def in_flight(self) -> int:
        """Samples that were added and have neither ended nor been dropped."""

    def stats(self) -> Stats:
        """Return the totals so far."""


def check_request(request: GroupRequest, *, vocabulary: int, longest: int) -> None:
    """Refuse what a model of so many token ids and positions cannot do, before anything is computed.

    Raises:
        ChildFailed: ``child.request``, with what is wrong.
    """
    if not len(request.prompt):
        raise ChildFailed("a prompt is empty", code="child.request")
    if any(len(sample.begun) >= request.max_new_tokens for sample in request.samples):
        raise ChildFailed(f"a sample has begun and has no token of {request.max_new_tokens} left", code="child.request")
    given = [request.prompt, *(sample.begun for sample in request.samples)]
    if int(np.concatenate(given).max()) >= vocabulary:
        raise ChildFailed(f"a prompt has a token id beyond the vocabulary of {vocabulary}", code="child.request")
    if len(request.prompt) + request.max_new_tokens > longest:
        raise ChildFailed(
            f"{len(request.prompt)} prompt and {request.max_new_tokens} new tokens do not fit the model's {longest}",
            code="child.request",
        )
