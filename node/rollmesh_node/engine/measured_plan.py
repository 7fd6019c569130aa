"""The memory plan of this process's device, made in the child before a backend allocates anything.

The bounds of the owner (``memory_gb``, ``memory_share``) and the longest rollout of the run come with the load call.
Not here: the arithmetic (:mod:`.memory_plan`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final, Literal

import torch

from rollmesh_node.engine.memory_plan import MemoryPlan, allowed_bytes, gb, model_shape, need_of, plan_memory
from rollmesh_node.gpus import VISIBLE, find_gpus, usable_gpus
from rollmesh_peer.free_memory import free_bytes
from rollmesh_peer.models.folder import Json
from rollmesh_peer.models.loader import best_device
from rollmesh_protocol.layout import Layout

MOST_ROWS: Final = 256
"""Where nobody names a number."""
USUAL_COLUMNS: Final = 2048
"""The same, for a caller that does not know the run's limits."""


def plan_here(body: Mapping[str, object], *, config: Json, layout: Layout) -> MemoryPlan | None:
    """The plan for a load call's ``body`` (see :mod:`.pipe`), from what is free here and now; None: see model_shape.

    Raises:
        HostError: the model does not fit; with the numbers.
    """
    shape = model_shape(config)
    if shape is None:
        return None
    device = str(body.get("device") or "auto")
    device = best_device() if device == "auto" else device
    dtype: Literal["bfloat16", "float32"] = "float32" if body.get("dtype") == "float32" else "bfloat16"
    gpus = body.get("gpus")
    parts = max(1, len(gpus)) if isinstance(gpus, list) else 1
    need = need_of(
        shape,
        image_bytes=layout.image_bytes,
        columns=int(_number(body, "columns") or USUAL_COLUMNS),
        on_gpu=device == "cuda",
        dtype=dtype,
        parts=parts,
    )
    free, total = _measured(device, parts)
    if free is not None:
        share = _number(body, "memory_share") or 1.0
        free = allowed_bytes(free, total_bytes=total, share=share, cap_gb=_number(body, "memory_gb"))
    plan = plan_memory(need, device=device, free_bytes=free, rows=int(_number(body, "max_rows")) or MOST_ROWS)
    sys.stderr.write(
        f"memory: {gb(need.weights_bytes)} of weights, {gb(plan.cache_bytes)} left for the cache of {plan.rows} "
        f"rollouts, {gb(plan.free_bytes)} usable on {device}\n"
    )
    return plan


def _measured(device: str, parts: int) -> tuple[int | None, int | None]:
    """Bytes free and in all: of the GPU with the least, where ``parts`` share the model.

    The driver's program is asked first: to ask torch takes half a gigabyte on each GPU.
    """
    if device != "cuda":
        return free_bytes(), None
    seen = usable_gpus(find_gpus(), chosen=(), visible=os.environ.get(VISIBLE))[:parts]
    told = [(gpu.free_bytes, gpu.memory_bytes) for gpu in seen] or [torch.cuda.mem_get_info()]
    return min(free for free, _ in told), min(total for _, total in told)


def _number(body: Mapping[str, object], name: str) -> float:
    value = body.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
