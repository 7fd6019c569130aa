"""How vLLM is started here: the environment of its processes, and the arguments that depend on machine and model.

No vllm here, so that whoever plans an engine can ask what it would take. Invariants: :func:`prepare` runs before vllm
is imported, for some of it is read only then; whatever vLLM can be told about networks, tracking and plugins says no.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from transformers import PretrainedConfig

from rollmesh_node.engine import memory
from rollmesh_node.engine.vllm_plugin import BOUND_ENV
from rollmesh_peer.models.loader import Arithmetic
from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError

MAX_ROWS: Final = {"cpu": 64, "cuda": 256}
"""Sequences computed side by side: on a CPU more do not raise tokens/s any further."""
CPU_CACHE_BYTES: Final = 4 * limits.GIB
"""Of keys and values on a CPU, at most, where the owner names no number: it is taken at once and kept."""
CPU_CACHE_SHARE: Final = 0.4
"""Of the memory that is free beside the weights."""
CPU_BLOCK_TOKENS: Final = 32
"""Of one cache block: only whole blocks of a prompt are shared inside a group, and vLLM's 128 exceed many prompts."""
GPU_SHARE: Final = 0.85
"""Of a GPU's memory that weights, cache and workspace may take together; the rest is the desktop's."""
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "rollmesh",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding to cores would fight with the owner's other programs
    BOUND_ENV: "1",
}
_DEFAULTS: Final = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait must not spin: on busy cores that was 20 times slower
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One engine's size and place."""

    device: str
    """'cpu' or 'cuda'."""
    dtype: Arithmetic
    max_rows: int
    tensor_parallel_size: int
    cache_bytes: int
    """Of keys and values, per worker; 0 on a GPU is what :data:`GPU_SHARE` leaves."""
    enforce_eager: bool

    def engine_arguments(self) -> dict[str, object]:
        """Return the arguments for vLLM's engine that follow from these."""
        cpu = self.device == "cpu"
        processor = "V1SeededSampler" if cpu else "V2SeededSampler"
        return {
            "dtype": self.dtype,
            "max_num_seqs": self.max_rows,
            "max_model_len": -1,  # the model's own limit, or less where the cache holds less
            "tensor_parallel_size": self.tensor_parallel_size,
            "enforce_eager": self.enforce_eager,
            "kv_cache_memory_bytes": self.cache_bytes or None,
            "gpu_memory_utilization": GPU_SHARE,
            "block_size": CPU_BLOCK_TOKENS if cpu else None,
            "async_scheduling": False if cpu else None,
            "logprobs_mode": "processed_logits",
            "logits_processors": [f"rollmesh_node.engine.vllm_sampler:{processor}"],
        }


def prepare(*, device: str, threads: int, gpus: tuple[int, ...], cache: Path) -> None:
    """Set what vLLM and the libraries below it read from the environment; ``cache`` takes compiled code."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if cache.stat().st_uid != os.getuid() or cache.stat().st_mode & 0o022:
        raise HostError(f"{cache} can be written by others; compiled code is not kept there")
    os.environ.update(_ENVIRONMENT)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0" if device == "cpu" else "1"
    for name, folder in (
        ("VLLM_CACHE_ROOT", "vllm"),
        ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
        ("TRITON_CACHE_DIR", "triton"),
    ):
        os.environ[name] = str(cache / folder)
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))


def default_cache() -> Path:
    """Return the folder for compiled code: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (
        (Path(base) if base else Path.home() / ".cache")
        / "rollmesh"
        / f"vllm-{sys.version_info[0]}{sys.version_info[1]}"
    )


def plan_cache(config: PretrainedConfig, *, device: str, weights_bytes: int, max_rows: int, wanted: int) -> int:
    """Return the bytes of keys and values to take, 0 for vLLM's own choice on a GPU.

    Raises ``HostError`` with the numbers when weights and a cache for one sequence of useful length do not fit.
    """
    memory.require(weights_bytes + wanted, device=device)
    if wanted or device != "cpu":
        return wanted
    free = memory.free_bytes(device=device)
    full: int = max_rows * config.max_position_embeddings * memory.bytes_per_token(config)
    if free is None:
        return min(CPU_CACHE_BYTES, full)
    room = int((free - weights_bytes - memory.RUNTIME_BYTES) * CPU_CACHE_SHARE)
    return max(min(CPU_CACHE_BYTES, full, room), limits.MIB)
