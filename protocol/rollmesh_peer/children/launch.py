"""How a child process is started and ended: its command line, its environment, its limits, its process group.

The invariant: a child sees only the variables in its spec, has a session of its own (so the terminal's Ctrl-C is the
daemon's to handle, and a group to kill), and is what Linux kills first when memory runs out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from rollmesh_peer.children.failure import START
from rollmesh_protocol.errors import ChildFailed

log = logging.getLogger("rollmesh.children")

CHILD_OOM_SCORE: Final = "500"
"""Linux kills the process with the highest score first when memory runs out: the child, never the daemon."""
KEPT_VARIABLES: Final = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT",
    "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
    "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "PYTHONPATH",
)  # fmt: skip
"""What :func:`kept_environment` copies for an engine or trainer: paths, locale, devices. No tokens, no keys."""


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """How a child process is started. ``environment`` is everything it sees: nothing is inherited."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    start_deadline_s: float = 60.0
    """From the start to the child's ``ready`` frame; importing torch takes 1 s here and a minute on a cold disk."""
    nice: int = 0
    """Added to the daemon's own niceness, 0 to 19."""
    memory_limit_bytes: int | None = None
    """``RLIMIT_DATA`` of the child (Linux), or None. Not for CUDA processes: drivers reserve what they never use."""
    hear: Callable[[str], None] | None = None
    """Called with every line of its stderr, for a log of its own."""


def python_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line of a module of ours in this Python; the working directory is kept off its import path."""
    return (sys.executable, "-P", "-m", module, *arguments)


def kept_environment(source: Mapping[str, str], extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of ``source`` that an engine or trainer needs, and ``extra``."""
    return {name: source[name] for name in KEPT_VARIABLES if name in source} | dict(extra or {})


async def start(spec: ChildSpec) -> trio.Process:
    """The running process, in a session of its own. Raises ``ChildFailed`` when there is no such program."""
    try:
        process = await trio.lowlevel.open_process(
            list(spec.argv),
            stdin=-1,
            stdout=-1,
            stderr=-1,
            env=dict(spec.environment),
            start_new_session=True,  # the terminal's Ctrl-C is the daemon's to handle
        )
    except OSError as error:
        raise ChildFailed(f"the {spec.name} process cannot be started: {error}", code=START) from error
    try:
        _limit(spec, process.pid)
    except OSError as error:  # it may be gone already; its exit is told in words later
        log.warning("the limits of the %s process are not set: %s", spec.name, error)
    return process


def _limit(spec: ChildSpec, pid: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    import resource

    Path(f"/proc/{pid}/oom_score_adj").write_text(CHILD_OOM_SCORE)
    if spec.nice:
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + spec.nice)
    if spec.memory_limit_bytes is not None:
        resource.prlimit(pid, resource.RLIMIT_DATA, (spec.memory_limit_bytes, spec.memory_limit_bytes))


def kill_group(process: trio.Process) -> None:
    """Kill the process and everything in its group; whatever is gone already is no error."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.returncode is None:
        process.kill()
