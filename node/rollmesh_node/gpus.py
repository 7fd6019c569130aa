"""The NVIDIA GPUs of this machine, asked of ``nvidia-smi``: no torch, and nothing is taken on a GPU.

A machine without the program has no GPU for us. What the process was started with (``CUDA_VISIBLE_DEVICES``) and what
the volunteer chose are both obeyed. Which of them an engine gets is decided in :mod:`.gpu_plan`.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rollmesh_protocol import limits
from rollmesh_protocol.errors import UsageError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"
BY_BUS: Final = "PCI_BUS_ID"
"""The order in which nvidia-smi counts; the driver's own begins with the fastest."""
QUERY_S: Final = 15.0
"""A driver that has to wake the GPUs first takes seconds."""
_FIELDS: Final = "index,uuid,name,memory.total,memory.free,compute_cap"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. ``index`` as nvidia-smi counts; ``capability`` as in (9, 0)."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int]


def find_gpus() -> tuple[Gpu, ...]:
    """Every GPU of the machine; empty where there is none, or where the driver does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return read_gpus(answer.stdout)


def read_gpus(listing: str) -> tuple[Gpu, ...]:
    """The GPUs of nvidia-smi's listing; a line that does not tell what is needed is left out. Pure."""
    found = []
    for line in listing.splitlines():
        parts = [part.strip() for part in line.split(",")]
        try:
            index, uuid, name, total, free, capability = parts
            major, _, minor = capability.partition(".")
            found.append(
                Gpu(
                    index=int(index),
                    uuid=uuid,
                    name=name,
                    memory_bytes=int(total) * limits.MIB,
                    free_bytes=int(free) * limits.MIB,
                    capability=(int(major), int(minor or 0)),
                )
            )
        except ValueError:
            continue
    return tuple(found)


def usable_gpus(gpus: Sequence[Gpu], *, chosen: Sequence[int], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that may be used: those ``visible`` to this process, and of them the ``chosen`` (empty: all). Pure.

    Raises:
        UsageError: one of ``chosen`` is not there.
    """
    seen = [gpu for gpu in gpus if visible is None or _names(gpu, visible)]
    there = {gpu.index: gpu for gpu in seen}
    if missing := [index for index in chosen if index not in there]:
        have = ", ".join(str(index) for index in there) or "none"
        raise UsageError(f"engine.gpus names GPU {missing[0]}, and this machine shows {have}")
    return tuple(there[index] for index in dict.fromkeys(chosen)) if chosen else tuple(seen)


def _names(gpu: Gpu, visible: str) -> bool:
    """Whether a value of ``CUDA_VISIBLE_DEVICES`` names the GPU, by its number or by the beginning of its id."""
    for name in (part.strip() for part in visible.split(",")):
        if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return True
    return False
