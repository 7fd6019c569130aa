"""What the host remembers of every sample in the engine: the tokens drawn so far and the weights behind them. Pure.

A sample whose weights change on the way is cut back to a multiple of ``limits.SEGMENT_TOKENS`` and goes on from there
under the new root: a new segment. Invariants: segments ascend from 0; only their first tokens are multiples of that
length other than 0; each token belongs to the weights that drew it; a sample is finished, held or in the engine.

Not here: the engine (:mod:`.backend`) and the pipe (:mod:`.pipe`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rollmesh_node.engine.backend import Finish, GroupRequest, Partial, Rollout, SampleRequest
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed

Place = tuple[int, int]
"""Key of the request and index of the sample."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens from ``first_token`` on, to the next span or the end, were drawn under ``root``."""

    first_token: int
    root: bytes


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished completion as the host reports it: tokens uint32[n], logprobs float32[n], n >= 1."""

    key: int
    index: int
    tokens: NDArray[np.uint32]
    logprobs: NDArray[np.float32]
    finish: Finish
    segments: tuple[Span, ...]
    elapsed_s: float
    """Since the sample came to the host."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A sample on its way: ``tokens`` and ``logprobs`` are what the engine was given as begun."""

    request: GroupRequest
    """Without its samples."""
    sample: SampleRequest
    since: float
    tokens: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, dtype=np.uint32))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    segments: tuple[Span, ...] = ()

    def grown(self, more: Partial) -> Draft:
        """The draft with what the engine has drawn behind it."""
        return replace(
            self,
            tokens=np.concatenate([self.tokens, more.tokens]),
            logprobs=np.concatenate([self.logprobs, more.logprobs]),
        )

    def under(self, root: bytes) -> Draft:
        """The draft as it goes on under ``root``: whole under the same weights, else cut back to a boundary."""
        if self.segments and self.segments[-1].root == root:
            return self
        is_full = len(self.segments) >= limits.MAX_SEGMENTS  # no room for another: it begins anew
        kept = 0 if is_full else len(self.tokens) // limits.SEGMENT_TOKENS * limits.SEGMENT_TOKENS
        before = tuple(span for span in self.segments if span.first_token < kept)
        goes_on = bool(before) and before[-1].root == root
        segments = before if goes_on else (*before, Span(first_token=kept, root=root))
        return replace(self, tokens=self.tokens[:kept], logprobs=self.logprobs[:kept], segments=segments)


class Book:
    """Every sample that the host was given and has not reported. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._drafts: dict[Place, Draft] = {}
        self._root = b""

    def __len__(self) -> int:
        return len(self._drafts)

    def reopen(self, root: bytes) -> list[GroupRequest]:
        """From here on ``root`` draws; the held samples as requests, which go on from a boundary."""
        self._root = root
        self._drafts = {place: draft.under(root) for place, draft in self._drafts.items()}
        groups: dict[int, list[Draft]] = {}
        for draft in self._drafts.values():
            groups.setdefault(draft.request.key, []).append(draft)
        return [
            replace(drafts[0].request, samples=tuple(replace(one.sample, begun=one.tokens) for one in drafts))
            for drafts in groups.values()
        ]

    def add(self, request: GroupRequest, *, now: float) -> None:
        """Remember the samples of a request that the engine has taken."""
        bare = replace(request, samples=())
        for sample in request.samples:
            draft = Draft(request=bare, sample=sample, since=now).under(self._root)
            self._drafts[request.key, sample.index] = draft

    def has(self, request: GroupRequest) -> bool:
        """True when a sample of ``request`` is here already."""
        return any((request.key, sample.index) in self._drafts for sample in request.samples)

    def finish(self, rollout: Rollout, *, now: float) -> Completion:
        """Forget a sample that has ended and return all of it. ``ChildFailed`` for one that is not here."""
        draft = self._drafts.pop((rollout.key, rollout.index), None)
        if draft is None:
            raise ChildFailed(f"the engine ended a sample that it was not given ({rollout.key}, {rollout.index})")
        whole = draft.grown(rollout)
        return Completion(
            key=rollout.key,
            index=rollout.index,
            tokens=whole.tokens,
            logprobs=whole.logprobs,
            finish=rollout.finish,
            segments=whole.segments,
            elapsed_s=now - draft.since,
        )

    def hold(self, partials: Iterable[Partial]) -> None:
        """Keep what the engine had drawn of the samples that it gave up."""
        for partial in partials:
            place = partial.key, partial.index
            self._drafts[place] = self._drafts[place].grown(partial)

    def forget(self) -> None:
        """Abandon all samples."""
        self._drafts = {}
