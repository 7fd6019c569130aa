"""From the volunteer's config to the engine child: which backend, how it is started, and what is declared of it.

No torch is imported here: what is installed is looked up, and whether there is a GPU is asked of the system.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rollmesh_node.config import Engine
from rollmesh_node.engine.pipe import THREADS_ENV
from rollmesh_node.generator import EngineSetting
from rollmesh_peer import faults
from rollmesh_peer.children.launch import ChildSpec, kept_environment, python_argv
from rollmesh_protocol.errors import UsageError
from rollmesh_protocol.messages import EngineInfo

SCRIPT_ENV: Final = "ROLLMESH_SCRIPTED_ENGINE"
"""Environment variable with the fields of ``scripted_backend.Script`` as JSON: how the scripted engine behaves."""
START_S: Final = 120.0
"""Python and torch from a cold disk."""
_NVIDIA: Final = Path("/proc/driver/nvidia/version")
_QUIET: Final = {
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait must not spin on the cores that the PC's owner uses
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


def choose_engine(config: Engine, *, environ: Mapping[str, str]) -> EngineSetting:
    """The engine that ``config`` asks for.

    Raises:
        UsageError: it is not installed.
    """
    backend = "transformers" if config.backend == "auto" else config.backend
    is_model = backend != "scripted"
    if is_model:
        missing = [name for name in ("torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
        if missing:
            raise UsageError(f"the engine needs {', '.join(missing)}: pip install 'rollmesh[engine]'")
    script = environ.get(SCRIPT_ENV)
    arguments = ("--backend", backend, *(("--script", script) if script and not is_model else ()))
    threads = config.threads or int(environ.get(THREADS_ENV) or 0)
    extra = _QUIET | ({"OMP_NUM_THREADS": str(threads)} if threads else {}) | faults.armed(environ)
    return EngineSetting(
        spec=ChildSpec(
            name="engine",
            argv=python_argv("rollmesh_node.engine.host", *arguments),
            environment=kept_environment(environ, extra),
            start_deadline_s=START_S,
        ),
        declared=EngineInfo(backend=backend, dtype=config.dtype, device=_device(config)),
        is_model=is_model,
        load={
            "threads": threads,
            "max_rows": config.max_batch_samples,
            "device": config.device,
            "dtype": config.dtype,
        },
    )


def _device(config: Engine) -> str:
    """The device as it is declared; the engine tells the truth once it runs."""
    if config.device != "auto":
        return config.device
    return "cuda" if _NVIDIA.exists() else "cpu"
