"""One running vLLM: its settings, its event loop in a thread of its own, and what comes out of it.

Invariants: nothing is fetched and nothing is reported to anyone; the model folder holds a config that this loader has
read and nothing else; compiled code is kept in a folder that only this user can write. vLLM's processes (the scheduler,
and a worker per GPU) are started afresh rather than forked, so they hold none of our pipes, and they end with us.

Requests go in by :meth:`Engine.submit`, and each comes out of :attr:`Engine.ended` once, whether it ended or was
dropped. Not here: what a request means (:mod:`.vllm_backend`). This module imports vllm: import it when it is needed,
after :func:`.vllm_settings.prepare`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import psutil
import uvloop
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from rollmesh_node.engine.backend import Stats
from rollmesh_node.engine.vllm_plugin import WEIGHTS_NAME
from rollmesh_node.engine.vllm_settings import Settings
from rollmesh_node.engine.vllm_sums import Held, check
from rollmesh_peer.bit_sums import Sums, pack_sums
from rollmesh_protocol.layout import Layout

T = TypeVar("T")
_HANDED_OVER_S: Final = 0.05
"""Within which vLLM has usually been told of an order."""
_IDLE_S: Final = 10.0
"""A pause longer than this between two steps was no computation."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One completion to draw."""

    name: str
    """Unique among those in flight."""
    prompt: list[int]
    """With what is drawn already behind it."""
    seed: int
    first: int
    """Completion position of the next token."""
    most: int
    """Tokens to draw at most; at least 1."""
    stop: list[int]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What became of an order: its tokens so far, or the error that took it."""

    name: str
    tokens: list[int]
    logprobs: list[float]
    dropped: bool = False
    error: BaseException | None = None


class Engine:
    """vLLM with a model whose weights are still missing, until :meth:`update` has brought them."""

    def __init__(self, folder: Path, settings: Settings, *, stats: Stats) -> None:
        """Start vLLM's processes for the model config in ``folder``; raises what vLLM raises."""
        self.ended: SimpleQueue[Ended] = SimpleQueue()
        self._loop = uvloop.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._loop.run_forever, name="rollmesh-vllm", daemon=True).start()
        self._llm: AsyncLLM = self._call(self._start(folder, settings, stats))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that model and cache hold."""
        return int(self._llm.model_config.max_model_len)

    def submit(self, orders: Sequence[Order]) -> None:
        """Take work; returns at once."""
        self._loop.call_soon_threadsafe(self._spawn, orders)

    def drop(self, names: Sequence[str]) -> None:
        """Abandon orders; each comes out of :attr:`ended` with its tokens so far."""
        self._call(self._drop(frozenset(names)))

    def update(self, image: Path, layout: Layout, sums: Sequence[Sums] | None = None) -> Mapping[str, float]:
        """Load an image into all workers, compare, forget every cached key and value; return the parts in seconds.

        ``ChildFailed("child.weights")`` when the parameters do not hold the image's bits.
        """
        return self._call(self._update(image, layout, pack_sums(sums or ())))

    def sampler_cost(self) -> tuple[float, int]:
        """Return (seconds, tokens) that seeded sampling has taken in the first worker so far."""
        spent = self._call(self._llm.collective_rpc("rollmesh_spent"))
        return spent[0][0], int(spent[0][1])

    def resident_bytes(self) -> int:
        """Return the resident memory of vLLM's processes; pages that they share are counted in each."""
        total = 0
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                total += process.memory_info().rss
        return total

    def close(self) -> None:
        """End vLLM's processes and the loop."""

        async def end() -> None:
            if self._llm.output_handler is not None:
                self._llm.output_handler.cancel()  # or it would report the end of the others as a failure
            self._llm.shutdown()

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _start(self, folder: Path, settings: Settings, stats: Stats) -> AsyncLLM:
        arguments = AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            generation_config="vllm",
            weight_transfer_config=WeightTransferConfig(backend=WEIGHTS_NAME),
            worker_extension_cls="rollmesh_node.engine.vllm_weights.WorkerReport",
            enable_prefix_caching=True,
            disable_log_stats=True,
            **settings.engine_arguments(),
        )
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda *_: _Meter(stats)])

    async def _update(self, image: Path, layout: Layout, sums: bytes) -> Mapping[str, float]:
        started = time.perf_counter()
        await self._llm.start_weight_update()
        update = {"image": str(image), "layout": layout.encode(), "sums": sums}
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        await self._llm.finish_weight_update()
        loaded = time.perf_counter()
        held = [Held.decode(body) for body in await self._llm.collective_rpc("rollmesh_sums")]
        check(held, names=[spec.name for spec in layout.tensors])
        checked = time.perf_counter()
        if not await self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept cached keys and values of the old weights: something is still in flight")
        ended = time.perf_counter()
        image_s = held[0].image_s
        return {
            "copy": loaded - started - image_s,
            "sums of the image": image_s,
            "sums of the parameters": checked - loaded,
            "cache": ended - checked,
        }

    async def _drop(self, names: frozenset[str]) -> None:
        waiting = [task for task in self._tasks if task.get_name() in names]
        while waiting:  # vLLM does not know an order yet that is just being handed over: tell it again
            await self._llm.abort(list(names))
            _, pending = await asyncio.wait(waiting, timeout=_HANDED_OVER_S)
            waiting = list(pending)

    def _spawn(self, orders: Sequence[Order]) -> None:
        for order in orders:
            task = self._loop.create_task(self._follow(order), name=order.name)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _follow(self, order: Order) -> None:
        tokens: list[int] = []
        logprobs: list[float] = []
        dropped = False
        try:
            async for output in self._llm.generate(
                TokensPrompt(prompt_token_ids=order.prompt), _sampling(order), order.name
            ):
                completion = output.outputs[0]
                tokens, dropped = list(completion.token_ids), completion.finish_reason == "abort"
                logprobs = list(completion.logprobs.logprobs) if completion.logprobs is not None else []
        except Exception as error:  # noqa: BLE001 - whatever it is, the thread that waits for the order must see it
            self.ended.put(Ended(name=order.name, tokens=[], logprobs=[], error=error))
        else:
            self.ended.put(Ended(name=order.name, tokens=tokens, logprobs=logprobs, dropped=dropped))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _sampling(order: Order) -> SamplingParams:
    """Greedy over what the seeded sampler leaves, the log-prob of that token, and nothing but ids."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=order.most,
        stop_token_ids=order.stop,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        extra_args={"seed": order.seed, "first": order.first},
    )


class _Meter(StatLoggerBase):  # type: ignore[misc]
    """Adds vLLM's counts of every step to our totals."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._last = time.perf_counter()

    def record(
        self,
        scheduler_stats: SchedulerStats | None,  # noqa: ARG002 - passed by name
        iteration_stats: IterationStats | None,
        *_: object,
        **__: object,
    ) -> None:
        """Count one step; its time is the prefill's where it computed any prompt."""
        now = time.perf_counter()
        if iteration_stats is not None:
            prompts = iteration_stats.prompt_token_stats.computed
            self._stats.steps += 1
            self._stats.tokens += iteration_stats.num_generation_tokens
            self._stats.prompt_tokens += prompts
            passed = min(now - self._last, _IDLE_S)
            if prompts:
                self._stats.prefill_s += passed
            else:
                self._stats.decode_s += passed
        self._last = now

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
