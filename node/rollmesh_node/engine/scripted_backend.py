"""An engine without a model: tokens and log-probs are a function of the seed alone. For tests of everything else.

Invariant: the same request gives the same rollouts, in any batch and on any machine; rollouts have the form that an
honest engine's have (stop rules, lengths, finite log-probs), so only an audit can tell. Knobs make it slow or broken
at a chosen point. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from rollmesh_node.engine.backend import GroupRequest, Rollout, SampleRequest, Stats, Weights
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
    """Pause before each rollout."""
    fail_after: int | None = None
    """Rollouts after which ``generate`` raises."""
    stop_chance: float = 0.1
    """Of each token to be a stop token, where the request names any."""


class ScriptedBackend:
    """See :class:`.backend.Backend`."""

    def __init__(self, script: Script | None = None) -> None:
        self._script = script or Script()
        self._vocabulary = 0
        self._stats = Stats(notes={"device": "none", "script": "yes"})

    def load(self, weights: Weights) -> None:
        """Note the vocabulary; see :meth:`.backend.Backend.load`."""
        size = weights.config.get("vocab_size")
        self._vocabulary = min(size, VOCABULARY) if isinstance(size, int) else VOCABULARY
        self.swap(weights.image)

    def swap(self, image: Path) -> None:
        """Check that the file is there; see :meth:`.backend.Backend.swap`."""
        time.sleep(self._script.load_s)
        if not image.exists():
            raise ChildFailed(f"there is no weights file at {image}", code="child.weights")
        self._stats.loads += 1
        self._stats.load_s = self._script.load_s

    def generate(self, requests: Sequence[GroupRequest]) -> Iterator[Rollout]:
        """Yield rollouts in the order of the requests; see :meth:`.backend.Backend.generate`."""
        began = time.perf_counter()
        if not self._vocabulary:
            raise ChildFailed("the engine has no weights", code="child.weights")
        for request in requests:
            self._stats.prompt_tokens += len(request.prompt)
            for sample in request.samples:
                if self._stats.rollouts == self._script.fail_after:
                    raise ChildFailed("the scripted engine fails here", code="engine.scripted")
                time.sleep(self._script.rollout_s)
                tokens, logprobs = self._completion(request, sample)
                self._stats.rollouts += 1
                self._stats.tokens += len(tokens)
                yield Rollout(
                    key=request.key,
                    index=sample.index,
                    tokens=tokens,
                    logprobs=logprobs,
                    finish="stop" if int(tokens[-1]) in request.stop else "length",
                    elapsed_s=time.perf_counter() - began,
                )

    def stats(self) -> Stats:
        """See :meth:`.backend.Backend.stats`."""
        return self._stats

    def _completion(self, request: GroupRequest, sample: SampleRequest) -> tuple[np.ndarray, np.ndarray]:
        length = request.max_new_tokens
        words = sampling.philox4x32((np.arange(length), 0, 0, 0), sampling.split_seed(sample.seed))
        ordinary = np.array([token for token in range(self._vocabulary) if token not in request.stop], dtype=np.uint32)
        tokens = ordinary[words[:, 0] % len(ordinary)]
        stops = np.flatnonzero(words[:, 1] < self._script.stop_chance * 2**32)
        if request.stop and stops.size:
            length = int(stops[0]) + 1
            tokens[length - 1] = min(request.stop)
        logprobs = -(words[:length, 2] / 2**32).astype(np.float32) * 4
        return tokens[:length].astype(np.uint32), logprobs
