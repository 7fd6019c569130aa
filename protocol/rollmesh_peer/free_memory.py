"""How much memory programs may still take on this machine, which may be a container."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from rollmesh_protocol import limits

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Bytes by the machine and by the container, whichever has fewer; None where nobody tells."""
    left: list[int] = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        left.append(int(line.split()[1]) * limits.KIB)
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        most = int((_CGROUP / "memory.max").read_text())
        left.append(most - int((_CGROUP / "memory.current").read_text()) + _reclaimable_bytes())
    return max(0, min(left)) if left else None


def _reclaimable_bytes() -> int:
    """What the container is charged for pages of files that nobody has touched lately: given up when asked for."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_CGROUP / "memory.stat").read_text().splitlines():
            name, _, size = line.partition(" ")
            if name == "inactive_file":
                return int(size)
    return 0
