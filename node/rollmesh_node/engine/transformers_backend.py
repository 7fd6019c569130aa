"""The transformers backend: any CPU, CUDA, or Apple machine; the fallback that is always there.

Invariant: the model in memory holds exactly the bits of the image named last (the reload check says so after every
load and swap), or there is no model and ``add`` refuses.

Not here: the decode (:mod:`.decoding`), processes (:mod:`.host`), who verified the image (the daemon).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
import transformers
from transformers import PreTrainedModel

from rollmesh_node.engine import memory, packed_linear
from rollmesh_node.engine.backend import STEP_S, GroupRequest, Partial, Rollout, Stats, Weights, check_request
from rollmesh_node.engine.decoding import Decoder
from rollmesh_node.engine.packed_linear import PackedLinear
from rollmesh_node.engine.passes import Passes
from rollmesh_peer.bit_sums import Sums
from rollmesh_peer.models.image import check_reload, copy_image_into
from rollmesh_peer.models.loader import Arithmetic, best_device, load_model
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.layout import Layout

MAX_ROWS: Final = 64
"""Rows that are decoded side by side; on a CPU more rows do not raise tokens/s any further."""


class TransformersBackend:
    """See :class:`.backend.Backend`."""

    def __init__(
        self,
        *,
        threads: int = 0,
        max_rows: int = 0,
        device: str = "auto",
        dtype: Arithmetic = "bfloat16",
        compile: bool = False,  # noqa: A002 - torch's word
    ) -> None:
        """0 threads are torch's choice, 0 rows :data:`MAX_ROWS`; device 'auto' is CUDA or MPS where present.

        With ``compile`` decode steps are compiled, which wants a C++ compiler on a CPU and minutes at the first one.
        """
        if threads:
            torch.set_num_threads(threads)
        self._max_rows = max_rows or MAX_ROWS
        self._device = best_device() if device == "auto" else device
        self._dtype = dtype
        self._compile = compile
        self._model: PreTrainedModel | None = None
        self._layout: Layout | None = None
        self._passes: Passes | None = None
        self._decoder: Decoder | None = None
        self._packed: list[PackedLinear] = []
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
        self._model, self._decoder, self._packed = None, None, []
        memory.require(weights.layout.image_bytes * (2 if self._dtype == "float32" else 1), device=self._device)
        self._model = load_model(
            weights.config,
            layout=weights.layout,
            image=weights.image,
            sums=weights.sums,
            arithmetic=self._dtype,
            device=self._device,
        )
        self._layout = weights.layout
        if not self._compile and packed_linear.is_useful(self._model):  # the compiler takes no packed layout
            self._packed = packed_linear.install(self._model)
        self._decoder = self._make_decoder(self._model)
        self._loaded(started)

    def swap(self, image: Path, sums: Sequence[Sums] | None = None) -> None:
        """Overwrite the weights in place; see :meth:`.backend.Backend.swap`."""
        started = time.perf_counter()
        model, layout = self._model, self._layout
        if model is None or layout is None:
            raise ChildFailed("the engine has no weights to swap", code="child.weights")
        if self.in_flight:
            raise ChildFailed(f"{self.in_flight} samples are in flight under the old weights", code="child.request")
        self._model = None  # until the check has passed: half-copied weights must not generate
        copy_image_into(model, layout=layout, image=image)
        copied = time.perf_counter()
        check_reload(model, layout=layout, image=image, expected=sums)
        checked = time.perf_counter()
        for linear in self._packed:
            linear.pack()
        packed = time.perf_counter()
        self._model = model
        self._stats.notes["swap"] = (
            f"copy {copied - started:.3f} s, sums {checked - copied:.3f} s, packing {packed - checked:.3f} s"
        )
        self._loaded(started)

    def add(self, requests: Sequence[GroupRequest]) -> None:
        """Queue every sample; see :meth:`.backend.Backend.add`."""
        if self._model is None or self._decoder is None:
            raise ChildFailed("the engine has no weights", code="child.weights")
        config = self._model.config
        for request in requests:
            check_request(request, vocabulary=config.vocab_size, longest=config.max_position_embeddings)
        self._decoder.add(requests)

    def step(self) -> list[Rollout]:
        """Prefill and decode; see :meth:`.backend.Backend.step`."""
        until = time.perf_counter() + STEP_S
        while self._decoder is not None and self._decoder.in_flight:
            ended = self._decoder.advance()
            if ended or time.perf_counter() >= until:
                return ended
        return []

    def drop(self) -> list[Partial]:
        """See :meth:`.backend.Backend.drop`."""
        return self._decoder.drop() if self._decoder else []

    @property
    def in_flight(self) -> int:
        """See :meth:`.backend.Backend.in_flight`."""
        return self._decoder.in_flight if self._decoder else 0

    def stats(self) -> Stats:
        """See :meth:`.backend.Backend.stats`."""
        self._stats.memory_bytes = memory.resident_bytes()
        if self._passes:
            self._stats.notes["compiled"] = self._passes.compiled
        return self._stats

    def _make_decoder(self, model: PreTrainedModel) -> Decoder:
        def cells(held_bytes: int) -> int:
            size = model.dtype.itemsize
            return memory.cells_that_fit(model.config, device=self._device, cell_bytes=size, held_bytes=held_bytes)

        self._passes = Passes(model, compile=self._compile)
        return Decoder(self._passes, max_rows=self._max_rows, cells=cells, stats=self._stats)

    def _loaded(self, started: float) -> None:
        self._stats.loads += 1
        self._stats.load_s = time.perf_counter() - started
