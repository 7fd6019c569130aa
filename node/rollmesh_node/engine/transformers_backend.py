"""The transformers backend: any CPU, CUDA, or Apple machine; the fallback that is always there.

Invariant: the model in memory holds exactly the bits of the image named last (the reload check says so after every
load and swap), or there is no model and ``add`` refuses.

Not here: the decode loop (:mod:`.decoding`), processes (:mod:`.host`), who verified the image (the daemon).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from rollmesh_node.engine import memory, packed_linear
from rollmesh_node.engine.backend import GroupRequest, Partial, Rollout, Stats, Weights
from rollmesh_node.engine.decoding import Decoder
from rollmesh_node.engine.packed_linear import PackedLinear
from rollmesh_peer.models.image import check_reload, copy_image_into
from rollmesh_peer.models.loader import Arithmetic, best_device, load_model
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.layout import Layout

MAX_ROWS: Final = 64
"""Rows of one decode batch; on a CPU more rows do not raise tokens/s any further."""


class TransformersBackend:
    """See :class:`.backend.Backend`."""

    def __init__(
        self, *, threads: int = 0, max_rows: int = 0, device: str = "auto", dtype: Arithmetic = "bfloat16"
    ) -> None:
        """0 threads are torch's choice, 0 rows :data:`MAX_ROWS`; device 'auto' is CUDA or MPS where present."""
        if threads:
            torch.set_num_threads(threads)
        self._max_rows = max_rows or MAX_ROWS
        self._device = best_device() if device == "auto" else device
        self._dtype = dtype
        self._model: PreTrainedModel | None = None
        self._layout: Layout | None = None
        self._packed: list[PackedLinear] = []
        self._waiting: list[GroupRequest] = []
        self._batches_left: list[list[GroupRequest]] = []
        self._decoder: Decoder | None = None
        self._decoding: Iterator[Rollout] = iter(())
        self._in_flight = 0
        self._stats = Stats(
            notes={
                "device": self._device,
                "dtype": dtype,
                "threads": str(torch.get_num_threads()),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            }
        )

    def load(self, weights: Weights) -> None:
        """Build the model; see :meth:`.backend.Backend.load`."""
        started = time.perf_counter()
        self._model, self._packed = None, []
        memory.require(weights.layout.image_bytes * (2 if self._dtype == "float32" else 1), device=self._device)
        self._model = load_model(
            weights.config, layout=weights.layout, image=weights.image, arithmetic=self._dtype, device=self._device
        )
        self._layout = weights.layout
        if packed_linear.is_useful(self._model):
            self._packed = packed_linear.install(self._model)
        self._loaded(started)

    def swap(self, image: Path) -> None:
        """Overwrite the weights in place; see :meth:`.backend.Backend.swap`."""
        started = time.perf_counter()
        model, layout = self._model, self._layout
        if model is None or layout is None:
            raise ChildFailed("the engine has no weights to swap", code="child.weights")
        self._model = None  # until the check has passed: half-copied weights must not generate
        copy_image_into(model, layout=layout, image=image)
        check_reload(model, layout=layout, image=image)
        for linear in self._packed:
            linear.pack()
        self._model = model
        self._loaded(started)

    def add(self, requests: Sequence[GroupRequest]) -> None:
        """See :meth:`.backend.Backend.add`."""
        if self._model is None:
            raise ChildFailed("the engine has no weights", code="child.weights")
        for request in requests:
            _check(request, self._model)
        for request in requests:
            self._waiting += _begun_apart(request)
            self._in_flight += len(request.samples)

    def step(self) -> list[Rollout]:
        """Decode in batches of similar prompt length, one after the other; see :meth:`.backend.Backend.step`."""
        while self._in_flight:
            rollout = next(self._decoding, None)
            if rollout is not None:
                self._in_flight -= 1
                return [rollout]
            self._next_batch()
        return []

    def drop(self) -> list[Partial]:
        """See :meth:`.backend.Backend.drop`."""
        partials = self._decoder.partials() if self._decoder is not None else []
        nothing = np.zeros(0, dtype=np.uint32)
        partials += [
            Partial(key=group.key, index=sample.index, tokens=nothing, logprobs=nothing.astype(np.float32))
            for batch in (*self._batches_left, self._waiting)
            for group in batch
            for sample in group.samples
        ]
        self._waiting, self._batches_left, self._in_flight = [], [], 0
        self._decoder, self._decoding = None, iter(())
        return partials

    @property
    def in_flight(self) -> int:
        """See :meth:`.backend.Backend.in_flight`."""
        return self._in_flight

    def _next_batch(self) -> None:
        """Begin the next batch, of what has come meanwhile when the ones before are done."""
        if self._model is None:
            raise ChildFailed("the engine has no weights", code="child.weights")
        if not self._batches_left:
            self._batches_left, self._waiting = list(self._batches(self._waiting)), []
        self._decoder = self._decoder_of(self._model, self._batches_left.pop(0))
        self._decoding = self._decoder.run()

    def _decoder_of(self, model: PreTrainedModel, batch: Sequence[GroupRequest]) -> Decoder:
        return Decoder(model, batch, stats=self._stats)

    def stats(self) -> Stats:
        """See :meth:`.backend.Backend.stats`."""
        self._stats.memory_bytes = memory.resident_bytes()
        return self._stats

    def _batches(self, requests: Sequence[GroupRequest]) -> Iterator[list[GroupRequest]]:
        """Yield groups, shortest prompts first, split so that rows and their cache fit."""
        assert self._model is not None
        batch: list[GroupRequest] = []
        rows = 0
        for request in sorted(requests, key=lambda request: len(request.prompt)):
            columns = len(request.prompt) + request.max_new_tokens
            room = max(1, min(self._max_rows, memory.rows_that_fit(self._model.config, columns, device=self._device)))
            samples = request.samples
            while samples:
                if rows >= room:
                    yield batch
                    batch, rows = [], 0
                taken, samples = samples[: room - rows], samples[room - rows :]
                batch.append(replace(request, samples=taken))
                rows += len(taken)
        if batch:
            yield batch

    def _loaded(self, started: float) -> None:
        self._stats.loads += 1
        self._stats.load_s = time.perf_counter() - started


def _begun_apart(request: GroupRequest) -> list[GroupRequest]:
    """The request with the samples that are begun as requests of their own, whose prompt ends with what is drawn."""
    begun = [sample for sample in request.samples if len(sample.begun)]
    fresh = tuple(sample for sample in request.samples if not len(sample.begun))
    return [
        *([replace(request, samples=fresh)] if fresh else []),
        *(
            replace(
                request,
                prompt=np.concatenate([request.prompt, sample.begun]),
                samples=(sample,),
                max_new_tokens=request.max_new_tokens - len(sample.begun),
            )
            for sample in begun
        ),
    ]


def _check(request: GroupRequest, model: PreTrainedModel) -> None:
    """Refuse what the model cannot do, before anything is computed."""
    vocabulary, longest = model.config.vocab_size, model.config.max_position_embeddings
    if int(request.prompt.max()) >= vocabulary:
        raise ChildFailed(f"a prompt has a token id beyond the vocabulary of {vocabulary}", code="child.request")
    if len(request.prompt) + request.max_new_tokens > longest:
        raise ChildFailed(
            f"{len(request.prompt)} prompt and {request.max_new_tokens} new tokens do not fit the model's {longest}",
            code="child.request",
        )
