"""One sample on its way through the engine, as numbers: what it began with, what was drawn, when it ends.

Invariant: ``tokens`` and ``logprobs`` are what was drawn here, behind ``begun``; a row has ended at its first stop
token or at its group's length, whichever comes first. No torch.

Not here: where its keys and values are (:mod:`.decoding` and :mod:`.kv_cache`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rollmesh_node.engine.backend import Finish, GroupRequest, Partial, Rollout, SampleRequest


@dataclass(kw_only=True, eq=False)
class Row:
    """One sample of one group."""

    group: GroupRequest
    sample: SampleRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @cached_property
    def start(self) -> NDArray[np.int64]:
        """Return what is computed before the first draw, int64 [n]: the prompt and what had begun."""
        return np.concatenate([self.group.prompt, self.sample.begun]).astype(np.int64)

    @property
    def position(self) -> int:
        """The completion position of the next draw."""
        return len(self.sample.begun) + len(self.tokens)

    @property
    def cached(self) -> int:
        """Columns of the cache that hold this row once its first token is drawn: all of it but the last token."""
        return len(self.group.prompt) + self.position - 1

    @property
    def longest(self) -> int:
        """Tokens of prompt and completion at their most."""
        return len(self.group.prompt) + self.group.max_new_tokens

    @property
    def finish(self) -> Finish | None:
        """Why the row has ended; None while it has not."""
        if self.tokens and self.tokens[-1] in self.group.stop:
            return "stop"
        return "length" if self.position >= self.group.max_new_tokens else None

    def rollout(self, finish: Finish) -> Rollout:
        """Return the completion, which has ended."""
        return Rollout(
            key=self.group.key, index=self.sample.index, tokens=self._tokens, logprobs=self._logprobs, finish=finish
        )

    def partial(self) -> Partial:
        """Return how far it has come."""
        return Partial(key=self.group.key, index=self.sample.index, tokens=self._tokens, logprobs=self._logprobs)

    @property
    def _tokens(self) -> NDArray[np.uint32]:
        return np.array(self.tokens, dtype=np.uint32)

    @property
    def _logprobs(self) -> NDArray[np.float32]:
        return np.array(self.logprobs, dtype=np.float32)
