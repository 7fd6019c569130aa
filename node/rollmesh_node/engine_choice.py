"""Which backend a node generates with, and why, in one sentence. Pure: what the machine has is an argument.

``auto`` takes vLLM where it is installed for the device that is there and a GPU is fit for it, else transformers. On a
CPU vLLM is taken only when it is asked for by name: it holds a larger part of the memory from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rollmesh_node.config import Engine
from rollmesh_node.gpus import Gpu
from rollmesh_protocol import limits
from rollmesh_protocol.errors import UsageError

VLLM_CAPABILITY: Final = (8, 0)
"""Least compute capability for vLLM: bfloat16 arithmetic; its kernels for older GPUs know float16 only."""
VLLM_BYTES: Final = 6 * limits.GIB
"""Least memory of a GPU for vLLM: beside the weights it wants some 2 GiB for graphs and activations."""
MODEL_MODULES: Final = ("torch", "transformers", "safetensors")
ENGINE_COMMAND: Final = "pip install 'rollmesh[engine]'"
VLLM_COMMAND: Final = "python -m venv .venv-vllm && .venv-vllm/bin/pip install 'rollmesh[vllm]'"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to choose from."""

    modules: frozenset[str]
    """Those of vllm, torch, transformers and safetensors that can be imported."""
    gpus: tuple[Gpu, ...] = ()
    """That may be used."""
    torch_on_gpu: bool = True
    """False where the torch that is installed was built for the CPU alone."""
    vllm_on_gpu: bool = True
    """The same of vLLM."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A backend, the device that it is to run on (``cuda``, ``cpu`` or ``none``), and why it was taken."""

    backend: str
    device: str
    why: str


def choose_backend(config: Engine, machine: Machine) -> Choice:
    """The backend and device for ``config`` on ``machine``.

    Raises:
        UsageError: what is asked for by name is not installed; with the command that installs it.
    """
    if config.backend == "scripted":
        return Choice(backend="scripted", device="none", why="asked for by name; it answers without a model")
    _require(MODEL_MODULES, machine, ENGINE_COMMAND)
    if config.backend == "vllm":
        _require(("vllm",), machine, VLLM_COMMAND)
    _check_together(config)
    no_gpu = _why_no_gpu(config, machine)
    if config.backend == "vllm":
        on_gpu = not no_gpu and machine.vllm_on_gpu
        return Choice(backend="vllm", device="cuda" if on_gpu else "cpu", why="asked for by name")
    device = "cpu" if no_gpu else "cuda"
    if config.backend == "transformers":
        return Choice(backend="transformers", device=device, why="asked for by name")
    if no_vllm := no_gpu or _why_no_vllm(config, machine):
        return Choice(backend="transformers", device=device, why=f"{no_vllm}, so vLLM is not taken")
    best = max(fit_for_vllm(machine.gpus), key=lambda gpu: gpu.memory_bytes)
    return Choice(backend="vllm", device="cuda", why=f"vLLM is installed and {_describe(best)} is fit for it")


def fit_for_vllm(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that vLLM can use."""
    return tuple(gpu for gpu in gpus if gpu.capability >= VLLM_CAPABILITY and gpu.memory_bytes >= VLLM_BYTES)


def _why_no_gpu(config: Engine, machine: Machine) -> str:
    """Why the engine computes on the CPU; empty where it has a GPU."""
    if config.device == "cpu":
        return "engine.device is cpu"
    if config.device == "cuda":
        return ""  # the volunteer's word; an engine that runs elsewhere is noticed and ended
    if not machine.gpus:
        return "no NVIDIA GPU was found"
    return "" if machine.torch_on_gpu else "the installed torch is the build for CPUs"


def _why_no_vllm(config: Engine, machine: Machine) -> str:
    """Why vLLM is not taken where there is a GPU; empty where it can be."""
    if "vllm" not in machine.modules:
        return "vLLM is not installed"
    if not machine.vllm_on_gpu:
        return "the installed vLLM is the build for CPUs"
    if config.dtype != "bfloat16":
        return f"engine.dtype is {config.dtype}"
    if not machine.gpus:
        return "no NVIDIA GPU was found"
    if not fit_for_vllm(machine.gpus):
        least = f"compute capability {VLLM_CAPABILITY[0]}.{VLLM_CAPABILITY[1]} and {VLLM_BYTES // limits.GIB} GB"
        return f"{', '.join(_describe(gpu) for gpu in machine.gpus)} has not the {least} that it needs"
    return ""


def _require(modules: Sequence[str], machine: Machine, command: str) -> None:
    if missing := [name for name in modules if name not in machine.modules]:
        raise UsageError(f"the engine needs {', '.join(missing)}, not installed here: {command}")


def _check_together(config: Engine) -> None:
    if config.tensor_parallel > 1 and config.backend == "transformers":
        raise UsageError("engine.tensor_parallel shares a model among GPUs, which needs engine.backend=vllm")


def _describe(gpu: Gpu) -> str:
    return (
        f"{gpu.name} ({gpu.memory_bytes / limits.GIB:.0f} GB, "
        f"compute capability {gpu.capability[0]}.{gpu.capability[1]})"
    )
