"""An engine without a model: tokens and log-probs are a function of seed and position. For tests of everything else.

Invariant: the same request gives the same rollouts, in any batch and on any machine; rollouts have the form that an
honest engine's have (stop rules, lengths, finite log-probs), so only an audit can tell. Where the script says so, the
weights count too, as they do in a real engine. Knobs make it slow or broken at a chosen point. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from rollmesh_node.engine.backend import STEP_S, GroupRequest, Partial, Rollout, SampleRequest, Stats, Weights
from rollmesh_peer.bit_sums import Sums
from rollmesh_protocol import sampling
from rollmesh_protocol.errors import ChildFailed

VOCABULARY: Final = 256
"""Token ids that it writes, where the config names no smaller vocabulary: bytes of the tiny model's tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """How the engine behaves. Counts are over the life of the process."""

    load_s: float = 0.0
    """Pause in ``load`` and ``swap``."""
    rollout_s: float = 0.0
    """Pause before each rollout; they are made one after the other."""
    token_s: float = 0.0
    """Pause before each token; samples are drawn side by side. 0: a rollout has all its tokens at once."""
    fail_after: int | None = None
    """Rollouts after which ``step`` raises."""
    stop_chance: float = 0.1
    """Of each token to be a stop token, where the request names any."""
    heeds_weights: bool = False
    """Tokens are a function of the weights' bytes, too."""


@dataclass(kw_only=True)
class _Sample:
    """One sample in flight: what it will be in the end, behind ``begun``, and how much of that is drawn."""

    request: GroupRequest
    sample: SampleRequest
    tokens: NDArray[np.uint32]
    logprobs: NDArray[np.float32]
    drawn: int = 0
    waited_s: float = 0.0


class ScriptedBackend:
    """See :class:`.backend.Backend`."""

    def __init__(self, script: Script | None = None) -> None:
        self._script = script or Script()
        self._vocabulary = 0
        self._weights = 0
        self._flight: list[_Sample] = []
        self._stats = Stats(notes={"device": "none", "script": "yes"})

    def load(self, weights: Weights) -> None:
        """Note the vocabulary; see :meth:`.backend.Backend.load`."""
        size = weights.config.get("vocab_size")
        self._vocabulary = min(size, VOCABULARY) if isinstance(size, int) else VOCABULARY
        self.swap(weights.image)

    def swap(self, image: Path, sums: Sequence[Sums] | None = None) -> None:
        """Check that the file is there; see :meth:`.backend.Backend.swap`."""
        del sums
        time.sleep(self._script.load_s)
        if not image.exists():
            raise ChildFailed(f"there is no weights file at {image}", code="child.weights")
        if self._script.heeds_weights:
            self._weights = int.from_bytes(blake3(image.read_bytes()).digest(8), "little")
        self._stats.loads += 1
        self._stats.load_s = self._script.load_s

    def add(self, requests: Sequence[GroupRequest]) -> None:
        """See :meth:`.backend.Backend.add`."""
        if not self._vocabulary:
            raise ChildFailed("the engine has no weights", code="child.weights")
        for request in requests:
            self._stats.prompt_tokens += len(request.prompt)
            for sample in request.samples:
                tokens, logprobs = self._completion(request, sample)
                self._flight.append(_Sample(request=request, sample=sample, tokens=tokens, logprobs=logprobs))

    def step(self) -> list[Rollout]:
        """Draw on until a rollout has ended; see :meth:`.backend.Backend.step`."""
        until = time.perf_counter() + STEP_S
        while self._flight and time.perf_counter() < until:
            if self._stats.rollouts == self._script.fail_after:
                raise ChildFailed("the scripted engine fails here", code="engine.scripted")
            self._stats.steps += 1
            if self._script.token_s:
                time.sleep(self._script.token_s)
                for sample in self._flight:
                    self._draw(sample, 1)
            else:
                self._wait_and_draw(self._flight[0], until)
            if ended := [sample for sample in self._flight if sample.drawn == len(sample.tokens)]:
                self._flight = [sample for sample in self._flight if sample.drawn < len(sample.tokens)]
                return [self._rollout(sample) for sample in ended]
        return []

    def drop(self) -> list[Partial]:
        """See :meth:`.backend.Backend.drop`."""
        dropped, self._flight = self._flight, []
        return [
            Partial(
                key=one.request.key,
                index=one.sample.index,
                tokens=one.tokens[: one.drawn],
                logprobs=one.logprobs[: one.drawn],
            )
            for one in dropped
        ]

    @property
    def in_flight(self) -> int:
        """See :meth:`.backend.Backend.in_flight`."""
        return len(self._flight)

    def stats(self) -> Stats:
        """See :meth:`.backend.Backend.stats`."""
        return self._stats

    def _wait_and_draw(self, sample: _Sample, until: float) -> None:
        pause_s = min(self._script.rollout_s - sample.waited_s, max(0.0, until - time.perf_counter()))
        time.sleep(pause_s)
        sample.waited_s += pause_s
        if sample.waited_s >= self._script.rollout_s:
            self._draw(sample, len(sample.tokens))

    def _draw(self, sample: _Sample, count: int) -> None:
        sample.drawn += count
        self._stats.tokens += count

    def _rollout(self, done: _Sample) -> Rollout:
        self._stats.rollouts += 1
        return Rollout(
            key=done.request.key,
            index=done.sample.index,
            tokens=done.tokens,
            logprobs=done.logprobs,
            finish="stop" if int(done.tokens[-1]) in done.request.stop else "length",
        )

    def _completion(
        self, request: GroupRequest, sample: SampleRequest
    ) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """What comes behind ``begun``: each position's words decide its token, whether it stops, and its log-prob."""
        begun, beyond = len(sample.begun), request.max_new_tokens
        key = sampling.split_seed(sample.seed ^ self._weights)
        words = sampling.philox4x32((np.arange(begun, beyond), 0, 0, 0), key)
        ordinary = np.array([token for token in range(self._vocabulary) if token not in request.stop], dtype=np.uint32)
        tokens = ordinary[words[:, 0] % len(ordinary)]
        stops = np.flatnonzero(words[:, 1] < self._script.stop_chance * 2**32)
        if request.stop and stops.size:
            tokens = tokens[: int(stops[0]) + 1]
            tokens[-1] = min(request.stop)
        logprobs = -(words[: len(tokens), 2] / 2**32).astype(np.float32) * 4
        return tokens.astype(np.uint32), logprobs
