"""Which GPUs make up which engine: one engine per GPU where the model fits one, else several GPUs that share it. Pure.

The invariants: no GPU is in two engines; GPUs that share a model are of one kind, as they wait for each other at every
layer; the engines are as many as the rest allows. What is left out is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from rollmesh_node.engine.memory_plan import Need, gb
from rollmesh_node.gpus import Gpu
from rollmesh_protocol.errors import HostError

SPLITS: Final = (1, 2, 4, 8, 16)
"""Numbers of GPUs that may share a model: heads and widths are divisible by powers of two."""


@dataclass(frozen=True, kw_only=True)
class GpuPlan:
    """``engines``: the GPU numbers of each engine. ``why``: one sentence for the status."""

    engines: tuple[tuple[int, ...], ...]
    why: str


def share_out(
    gpus: Sequence[Gpu],
    *,
    need: Callable[[int], Need],
    heads: int,
    can_split: bool,
    forced: int = 0,
    share: float = 1.0,
) -> GpuPlan:
    """Engines on ``gpus``. ``need(parts)`` is what one of ``parts`` GPUs that share the model must hold.

    ``heads`` of the model must be divisible by the parts; ``forced`` GPUs per engine come before our own choice (0:
    none); ``share`` of a GPU's whole memory counts, as what other programs hold now may be free later.

    Raises:
        HostError: the model fits no way of sharing; with the numbers.
    """
    splits = (forced,) if forced else tuple(parts for parts in SPLITS if parts == 1 or can_split)
    for parts in splits:
        if heads % parts:
            continue
        wanted = need(parts)
        least = wanted.weights_bytes + wanted.runtime_bytes + wanted.row_bytes
        fit = [gpu for gpu in gpus if gpu.memory_bytes * share >= least]
        if engines := _grouped(fit, parts):
            return GpuPlan(engines=engines, why=_why(gpus, engines, parts, least))
    raise HostError(_refusal(gpus, need(splits[0]), splits, heads))


def _grouped(gpus: Sequence[Gpu], parts: int) -> tuple[tuple[int, ...], ...]:
    """As many engines of ``parts`` GPUs of one kind as there are."""
    engines: list[tuple[int, ...]] = []
    for _, alike in groupby(sorted(gpus, key=lambda gpu: (gpu.name, gpu.index)), key=lambda gpu: gpu.name):
        numbers = [gpu.index for gpu in alike]
        engines += [tuple(numbers[start : start + parts]) for start in range(0, len(numbers) - parts + 1, parts)]
    return tuple(sorted(engines))


def _why(gpus: Sequence[Gpu], engines: Sequence[tuple[int, ...]], parts: int, least: int) -> str:
    used = {index for engine in engines for index in engine}
    left = [str(gpu.index) for gpu in gpus if gpu.index not in used]
    first = "the model fits one GPU" if parts == 1 else f"{parts} GPUs share the model"
    plan = f"{first} ({gb(least)} each): {len(engines)} engine{'s' if len(engines) > 1 else ''}"
    return f"{plan}; GPU {', '.join(left)} left out" if left else plan


def _refusal(gpus: Sequence[Gpu], least: Need, splits: Sequence[int], heads: int) -> str:
    have = ", ".join(f"GPU {gpu.index} has {gb(gpu.memory_bytes)}" for gpu in gpus) or "there is no GPU"
    tried = f"{splits[0]}" if len(splits) == 1 else f"at most {splits[-1]}"
    return (
        f"the model needs {gb(least.weights_bytes)} for the weights + {gb(least.row_bytes)} for the cache of one "
        f"rollout + {gb(least.runtime_bytes)} to run, in {tried} GPU(s) an engine (its {heads} heads divide among "
        f"them), and {have}: take a run with a smaller model, or add GPUs to engine.gpus"
    )
