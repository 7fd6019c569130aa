"""What fits: free memory against weights and key/value cache, asked before it is allocated.

A refusal names the numbers; the alternative is a kill by the kernel that names nothing. Where the system does not tell
its free memory, everything fits.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import torch
from transformers import PretrainedConfig

from rollmesh_peer import free_memory
from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError

RUNTIME_BYTES: Final = 512 * limits.MIB
"""Of the libraries and the activations of one decode step."""
CACHE_SHARE: Final = 0.5
"""Of the memory free after loading that the cache may take; growing copies a layer at a time."""
_STATM: Final = Path("/proc/self/statm")


def require(weights_bytes: int, *, device: str) -> None:
    """Raise ``HostError`` when weights of so many bytes and the runtime do not fit what is free on the device."""
    free = free_bytes(device=device)
    if free is not None and weights_bytes + RUNTIME_BYTES > free:
        raise HostError(
            f"the model needs {weights_bytes / 1e9:.1f} GB and {RUNTIME_BYTES / 1e9:.1f} GB to run, "
            f"and {free / 1e9:.1f} GB are free on {device}: out of memory",
        )


def cells_that_fit(config: PretrainedConfig, *, device: str, cell_bytes: int = 2, held_bytes: int = 0) -> int:
    """Return how many tokens a cache may hold: keys and values of every layer, ``cell_bytes`` for each number.

    What the cache holds already, ``held_bytes``, is counted as free: it would be given back.
    """
    free = free_bytes(device=device)
    if free is None:
        return sys.maxsize
    return int((free + held_bytes) * CACHE_SHARE / bytes_per_token(config, cell_bytes=cell_bytes))


def bytes_per_token(config: PretrainedConfig, *, cell_bytes: int = 2) -> int:
    """Return what one token's keys and values take over all layers, ``cell_bytes`` for each number."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * cell_bytes * config.num_hidden_layers * config.num_key_value_heads * size)


def free_bytes(*, device: str) -> int | None:
    """Return the bytes free on the device, or None where nobody tells."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return free_memory.free_bytes()


def resident_bytes() -> int:
    """Return the resident memory of this process, 0 where nobody tells."""
    try:
        return int(_STATM.read_text().split()[1]) * 4 * limits.KIB
    except (OSError, ValueError, IndexError):
        return 0
