"""Seeded sampling inside vLLM: the draw of rollmesh_peer.models.sampling as a logits processor, for both runners.

Invariants: a request's token at completion position t is the one that ``draw`` chooses for its float32 logits, its
seed and t; t is the request's first position plus what the engine itself has recorded as drawn. The processor decides
and vLLM obeys: a row leaves with one finite entry, so that greedy selection can only take it. That entry is the
token's log-prob under softmax(logits) before noise, and with ``logprobs_mode="processed_logits"`` it is what vLLM
reports: no second softmax over the vocabulary, and no way to read a log-prob that our noise has touched.

A request brings ``extra_args = {"seed": 64 bits, "first": position of its first token}`` and temperature 0, which is
how vLLM says greedy; the policy's own temperature stays 1.

**The position.** The V1 runner (CPU, and where Triton is missing) keeps a list of output tokens per request; it is
complete before each draw, because asynchronous scheduling is off there. The V2 runner (CUDA) schedules ahead, but
knows the length that each row's sequence has when its token is drawn: that length less the prompt is the position.
Neither counts steps, so preemption and recomputation cannot shift it.

Not here: processes, requests and weights. This module is imported by vLLM's processes only, and imports vllm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as V1Processor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2Processor

from rollmesh_peer.models.sampling import draw
from rollmesh_protocol.sampling import split_seed

LOGPROBS_MODE = "processed_logits"
"""What the engine must be started with, for the log-probs to be those written here."""


@dataclass
class Spent:
    """What sampling has cost this process; on a GPU the host's part, which is to launch it."""

    seconds: float = 0.0
    tokens: int = 0


spent = Spent()


@dataclass(frozen=True)
class _Stream:
    """One request's randomness."""

    seed: int
    first: int


class V1SeededSampler(V1Processor):  # type: ignore[misc]
    """The processor for vLLM's V1 model runner, which tells of every change of the batch."""

    def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002, FBT001
        self._rows: dict[int, tuple[_Stream, list[int]]] = {}
        """Row of the batch -> its stream, and vLLM's own list of the tokens drawn so far."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for a request whose seed or position is not one."""
        _stream(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """No: it decides the greedy choice."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch: removed, then added, then moved, as vLLM orders them."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, drawn in batch_update.added:
            stream = _stream(params)
            if stream is None:
                self._rows.pop(row, None)
            else:
                self._rows[row] = (stream, drawn)
        for source, target, how in batch_update.moved:
            moving, staying = self._rows.pop(source, None), self._rows.pop(target, None)
            if moving is not None:
                self._rows[target] = moving
            if staying is not None and how == MoveDirectionality.SWAP:
                self._rows[source] = staying

    def apply(self, logits: Tensor) -> Tensor:
        """Decide every row of ``logits`` [rows, V], in place."""
        rows = [row for row in sorted(self._rows) if row < len(logits)]
        streams = [self._rows[row][0] for row in rows]
        positions = [stream.first + len(self._rows[row][1]) for stream, row in zip(streams, rows, strict=True)]
        return _decide(logits, rows=rows, seeds=[stream.seed for stream in streams], positions=positions)


class V2SeededSampler(V2Processor):  # type: ignore[misc]
    """The processor for vLLM's V2 model runner, whose requests live in numbered slots."""

    def __init__(self, vllm_config: object, req_states: LogitsProcRequestState) -> None:  # noqa: ARG002
        self._prompt_lengths = req_states.prompt_len
        self._streams: list[_Stream | None] = [None] * req_states.max_num_reqs

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for a request whose seed or position is not one."""
        _stream(sampling_params)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Note what a slot's new request draws with; whether it is one of ours."""
        self._streams[req_idx] = _stream(sampling_params)
        return self._streams[req_idx] is not None

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Decide every row of ``logits`` [rows, V], in place; ``RuntimeError`` where a request owns several rows."""
        slots = ctx.idx_mapping_np
        if len(slots) != len(logits):
            raise RuntimeError("seeded sampling draws one token per request and step: no speculative decoding")
        # A row in the middle of its prompt is below its first position; vLLM throws away what is drawn there.
        drawn = np.maximum(ctx.seq_lens_upper_bound_np[: len(slots)] - self._prompt_lengths.np[slots], 0)
        ours = [(row, self._streams[slot]) for row, slot in enumerate(slots.tolist())]
        rows = [row for row, stream in ours if stream is not None]
        streams = [stream for _, stream in ours if stream is not None]
        positions = [stream.first + int(drawn[row]) for row, stream in zip(rows, streams, strict=True)]
        return _decide(logits, rows=rows, seeds=[stream.seed for stream in streams], positions=positions)


def _decide(logits: Tensor, *, rows: Sequence[int], seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Draw for ``rows`` of ``logits`` and leave in each nothing but its token's log-prob."""
    if not rows:
        return logits
    started = time.perf_counter()
    whole = len(rows) == len(logits)
    where = _sent(np.array(rows), logits.device)
    tokens, logprobs = _drawn(logits if whole else logits[where], seeds=seeds, positions=positions)
    if whole:
        logits.fill_(-math.inf)
    else:
        logits[where] = -math.inf
    logits[where, tokens] = logprobs.to(logits.dtype)
    spent.seconds += time.perf_counter() - started
    spent.tokens += len(rows)
    return logits


def _drawn(logits: Tensor, *, seeds: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return (tokens, log-probs) of the rows: on a GPU without making the host wait, elsewhere in torch and numpy."""
    if not logits.is_cuda:
        draws = draw(logits, seeds=seeds, positions=positions)
        return draws.tokens, draws.logprobs
    from rollmesh_node.engine.vllm_draw import draw_without_waiting

    keys = [(position, *split_seed(seed)) for position, seed in zip(positions, seeds, strict=True)]
    return draw_without_waiting(logits.float(), keys=_sent(np.array(keys), logits.device))


def _sent(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return an array on the device; from pinned memory a copy does not wait for what the device still computes."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _stream(params: SamplingParams) -> _Stream | None:
    """Return what a request draws with, None for one that is not ours (vLLM's own warm-up)."""
    extra = params.extra_args or {}
    if "seed" not in extra:
        return None
    seed, first = extra["seed"], extra.get("first", 0)
    if not (isinstance(seed, int) and 0 <= seed < 1 << 64 and isinstance(first, int) and 0 <= first < 1 << 31):
        raise ValueError(f"no seed and first position: {seed!r}, {first!r}")
    return _Stream(seed=seed, first=first)
