"""What fits on a device before anything is loaded: weights + key/value cache + runtime against free memory. Pure.

The invariant: a plan that is returned fits the memory it was made for with at least one row; else there is a refusal
with every number in one sentence. The alternative is a kill by the kernel that names nothing. No torch here: how much
is free is measured elsewhere (``engine.memory`` in the child, ``gpus`` in the daemon).

    weights   the image, twice as much in float32; on the GPUs of one tensor-parallel engine a share each
    cache     keys and values of every layer, for every token of a row; one row of the longest kind must fit, the others
              are counted at their usual length, as a backend keeps its cache within what is free
    step      logits and noise of one decode step, float32, for every row
    runtime   the libraries, a CUDA context, the activations of a prefill
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError

CPU_RUNTIME_BYTES: Final = 512 * limits.MIB
"""Libraries and activations in main memory, measured of torch and transformers with a model of 135 M parameters."""
GPU_RUNTIME_BYTES: Final = 1536 * limits.MIB
"""A CUDA context, the kernels' workspaces, and the fragmentation of the allocator."""
STEP_COPIES: Final = 3
"""Arrays of rows x vocabulary in float32 that one sampled step holds at a time: logits, noise, and their sum."""
CACHE_ITEM_BYTES: Final = 2
"""Of a key or value, bfloat16."""
GROWTH: Final = 1.25
"""A cache that grows holds an old and a new buffer of one layer for a moment, and grows ahead of its need."""
USUAL_SHARE: Final = 0.5
"""Of the longest rollout's tokens that the rows of a full engine hold in the mean: they begin one after the other."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What of a model counts for memory, from its config.json."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int

    @property
    def cache_token_bytes(self) -> int:
        """Keys and values of one token, over all layers."""
        return 2 * CACHE_ITEM_BYTES * self.layers * self.kv_heads * self.head_size


@dataclass(frozen=True, kw_only=True)
class Need:
    """What is to be loaded, and what for. Bytes and tokens; of one device."""

    weights_bytes: int
    runtime_bytes: int
    row_bytes: int
    """Cache and step of one rollout of the longest kind."""
    usual_row_bytes: int
    """The same of the mean rollout in flight."""
    columns: int
    """Tokens of that rollout, its prompt included."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Rows that fit beside each other, and the bytes that all of it comes to."""

    rows: int
    cache_bytes: int
    """What is left for the cache beside weights and runtime; ``rows`` rows need no more than that."""
    free_bytes: int


def model_shape(config: Mapping[str, object]) -> ModelShape | None:
    """The shape in a config.json; a field that is not there counts as the model library's own default would.

    None where it does not tell its layers, heads or width: nothing can be planned, and a backend refuses it by name.
    """
    inner = config.get("text_config")
    fields = inner if isinstance(inner, Mapping) else config
    layers, heads = _whole(fields, "num_hidden_layers"), _whole(fields, "num_attention_heads")
    width = _whole(fields, "hidden_size")
    if not (layers and heads and width):
        return None
    return ModelShape(
        layers=layers,
        heads=heads,
        kv_heads=_whole(fields, "num_key_value_heads") or heads,
        head_size=_whole(fields, "head_dim") or width // heads,
        vocabulary=_whole(fields, "vocab_size"),
    )


def need_of(
    shape: ModelShape,
    *,
    image_bytes: int,
    columns: int,
    on_gpu: bool,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    parts: int = 1,
) -> Need:
    """What rollouts of ``columns`` tokens need on each of ``parts`` devices that share the model.

    Where ``parts`` do not divide the key/value heads, each device holds a whole head more.
    """
    wide = 2 if dtype == "float32" else 1
    kv_heads = max(1, -(-shape.kv_heads // parts))
    cache_bytes = int(GROWTH * (shape.cache_token_bytes * kv_heads // shape.kv_heads * wide) * columns)
    step_bytes = STEP_COPIES * 4 * shape.vocabulary
    return Need(
        weights_bytes=-(-image_bytes * wide // parts),
        runtime_bytes=GPU_RUNTIME_BYTES if on_gpu else CPU_RUNTIME_BYTES,
        row_bytes=cache_bytes + step_bytes,
        usual_row_bytes=int(cache_bytes * USUAL_SHARE) + step_bytes,
        columns=columns,
    )


def allowed_bytes(free_bytes: int, *, total_bytes: int | None, share: float, cap_gb: float) -> int:
    """What the engine may take of ``free_bytes``: at most ``share`` of the whole device and ``cap_gb`` (0: no cap)."""
    most = free_bytes if total_bytes is None else min(free_bytes, int(total_bytes * share))
    return max(0, min(most, int(cap_gb * limits.GIB)) if cap_gb else most)


def plan_memory(need: Need, *, device: str, free_bytes: int | None, rows: int) -> MemoryPlan:
    """The rows of at most ``rows`` that fit ``free_bytes`` of ``device``; None where nobody tells: all of them.

    Raises:
        HostError: not even one row does; with the numbers.
    """
    fixed = need.weights_bytes + need.runtime_bytes
    if free_bytes is None:
        free_bytes = fixed + need.row_bytes + rows * need.usual_row_bytes
    room = free_bytes - fixed
    if room < need.row_bytes:
        raise HostError(
            f"out of memory: the engine needs {gb(need.weights_bytes)} for the weights + {gb(need.row_bytes)} for the "
            f"key/value cache of one rollout of {need.columns:,} tokens + {gb(need.runtime_bytes)} to run, and "
            f"{gb(free_bytes)} are free for it on {device}: close other programs, or take a run with a smaller model"
        )
    fitting = 1 + (room - need.row_bytes) // need.usual_row_bytes
    return MemoryPlan(rows=min(rows, fitting), cache_bytes=room, free_bytes=free_bytes)


def gb(num_bytes: int) -> str:
    """``15.2 GB``; small sizes with more digits, so that no part of a sum reads as nothing."""
    value = num_bytes / limits.GIB
    return f"{value:,.1f} GB" if value >= 1 else f"{value:.2g} GB"


def _whole(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
