"""Was it the memory? Recognises an engine that ran out of it, says so with numbers, and plans the next start smaller.

A process that the kernel killed leaves no words. What tells is a counter of the kernel: of the control group (both
versions), and of the whole machine. A CUDA or allocator error tells by its text. After either, the next engine is
started for half as many rows, and every quiet half hour doubles them again.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollmesh_node.engine.memory_plan import gb
from rollmesh_peer.free_memory import free_bytes
from rollmesh_protocol import limits

RESTORE_S: Final = 1800.0
"""Without running out of memory, before twice as many rows are tried."""
_COUNTERS: Final = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
    Path("/proc/vmstat"),
)
_NAME: Final = "oom_kill"
_TEXTS: Final = (
    "out of memory",  # torch's CUDA allocator, the CUDA driver, cuBLAS
    "outofmemoryerror",
    "cannot allocate memory",
    "can't allocate memory",  # torch's CPU allocator
    "memoryerror",
    "no available memory for the cache blocks",  # vLLM
    "cuda_error_out_of_memory",
    "cublas_status_alloc_failed",
)


def is_out_of_memory(text: str) -> bool:
    """Whether an error's words are those of an allocator that had nothing left."""
    lowered = text.lower().replace("(out of memory?)", "")
    return any(words in lowered for words in _TEXTS)


def kernel_kills(counters: tuple[Path, ...] = _COUNTERS) -> Mapping[str, int]:
    """How often the kernel has killed for want of memory, by who counts; empty where nobody does."""
    counts: dict[str, int] = {}
    for path in counters:
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == _NAME:
                    counts[str(path)] = int(value)
    return counts


@dataclass(kw_only=True)
class Watch:
    """What is noted of one engine process while it lives, for the case that it is killed without a word."""

    kills: Mapping[str, int]
    """:func:`kernel_kills` at its start."""
    resident_bytes: int = 0
    free_bytes: int | None = None

    def look(self, pid: int) -> None:
        """Note what the process holds and what is free; of a process that is gone, the last look stays."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            self.resident_bytes = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4 * limits.KIB
            self.free_bytes = free_bytes()

    def verdict(self, *, returncode: int | None, words: str, kills: Mapping[str, int]) -> str:
        """One sentence if the process, which ended so, ran out of memory; else empty. ``kills`` is of now."""
        if returncode == -signal.SIGKILL and any(count > self.kills.get(name, count) for name, count in kills.items()):
            held = f"; when last seen it held {gb(self.resident_bytes)}" if self.resident_bytes else ""
            left = f" and {gb(self.free_bytes)} were free" if held and self.free_bytes is not None else ""
            return f"out of memory: the kernel killed the engine{held}{left}"
        return "out of memory" if is_out_of_memory(words) else ""


class RowBudget:
    """How many rows the next engine is started for."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows = most
        self._since = 0.0

    def rows(self, now: float) -> int:
        """At least 1, at most what the volunteer allows."""
        doublings = int((now - self._since) / RESTORE_S)
        return min(self._most, self._rows << min(doublings, self._most.bit_length()))

    def ran_out(self, now: float) -> int:
        """The engine ran out of memory: half as many from now on."""
        self._rows = max(1, self.rows(now) // 2)
        self._since = now
        return self._rows
