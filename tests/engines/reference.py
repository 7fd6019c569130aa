"""The plainest backend there could be: one sample after the other, every token recomputed from the whole text.

It is what the other backends are compared with, and it runs through the same tests, so that the tests are tested too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from rollmesh_node.engine.backend import STEP_S, Finish, GroupRequest, Partial, Rollout, SampleRequest, Stats, Weights
from rollmesh_peer.bit_sums import Sums
from rollmesh_peer.models.image import check_reload, copy_image_into
from rollmesh_peer.models.loader import Arithmetic, load_model
from rollmesh_protocol import sampling
from rollmesh_protocol.errors import ChildFailed


@dataclass
class _Sample:
    request: GroupRequest
    sample: SampleRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def finish(self) -> Finish | None:
        if self.tokens and self.tokens[-1] in self.request.stop:
            return "stop"
        length = len(self.sample.begun) + len(self.tokens)
        return "length" if length == self.request.max_new_tokens else None

    def so_far(self) -> dict[str, object]:
        return {
            "key": self.request.key,
            "index": self.sample.index,
            "tokens": np.array(self.tokens, dtype=np.uint32),
            "logprobs": np.array(self.logprobs, dtype=np.float32),
        }


class ReferenceBackend:
    """See :class:`rollmesh_node.engine.backend.Backend`."""

    def __init__(self, *, dtype: Arithmetic = "float32") -> None:
        self._dtype: Arithmetic = dtype
        self._model: PreTrainedModel | None = None
        self._weights: Weights | None = None
        self._flight: list[_Sample] = []
        self._stats = Stats()

    def load(self, weights: Weights) -> None:
        self._model, self._weights = None, weights
        self._model = load_model(weights.config, layout=weights.layout, image=weights.image, arithmetic=self._dtype)
        self._stats.loads += 1

    def swap(self, image: Path, sums: Sequence[Sums] | None = None) -> None:
        if self._model is None or self._weights is None:
            raise ChildFailed("the engine has no weights to swap", code="child.weights")
        if self._flight:
            raise ChildFailed("samples are in flight under the old weights", code="child.request")
        model, self._model = self._model, None
        copy_image_into(model, layout=self._weights.layout, image=image)
        check_reload(model, layout=self._weights.layout, image=image, expected=sums)
        self._model = model
        self._stats.loads += 1

    def add(self, requests: Sequence[GroupRequest]) -> None:
        if self._model is None:
            raise ChildFailed("the engine has no weights", code="child.weights")
        for request in requests:
            _check(request, self._model)
        for request in requests:
            self._stats.prompt_tokens += len(request.prompt)
            self._flight += [_Sample(request, sample) for sample in request.samples]

    def step(self) -> list[Rollout]:
        until = time.perf_counter() + STEP_S
        while self._flight and time.perf_counter() < until:
            one = self._flight[0]
            self._draw(one)
            if (finish := one.finish) is not None:
                self._flight.pop(0)
                self._stats.rollouts += 1
                return [Rollout(**one.so_far(), finish=finish)]
        return []

    def drop(self) -> list[Partial]:
        dropped, self._flight = self._flight, []
        return [Partial(**one.so_far()) for one in dropped]

    @property
    def in_flight(self) -> int:
        return len(self._flight)

    def stats(self) -> Stats:
        return self._stats

    @torch.no_grad()
    def _draw(self, one: _Sample) -> None:
        begun = one.sample.begun
        ids = np.concatenate([one.request.prompt, begun, np.array(one.tokens, dtype=np.uint32)]).astype(np.int64)
        assert self._model is not None
        logits = self._model(input_ids=torch.from_numpy(ids)[None], use_cache=False, logits_to_keep=1).logits[0, -1]
        logits = logits.float()
        token = sampling.sample_token(logits.numpy(), one.sample.seed, len(begun) + len(one.tokens))
        one.tokens.append(token)
        one.logprobs.append(float(logits.log_softmax(-1)[token]))
        self._stats.tokens += 1
        self._stats.steps += 1


def _check(request: GroupRequest, model: PreTrainedModel) -> None:
    if not len(request.prompt):
        raise ChildFailed("a prompt is empty", code="child.request")
    if any(len(sample.begun) >= request.max_new_tokens for sample in request.samples):
        raise ChildFailed("a sample has begun and has no token left", code="child.request")
    if max(int(ids.max()) for ids in (request.prompt, *(s.begun for s in request.samples)) if len(ids)) >= (
        model.config.vocab_size
    ):
        raise ChildFailed(f"a token id is beyond the vocabulary of {model.config.vocab_size}", code="child.request")
    if len(request.prompt) + request.max_new_tokens > model.config.max_position_embeddings:
        raise ChildFailed("prompt and new tokens do not fit the model", code="child.request")
