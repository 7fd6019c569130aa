"""Whether a run's model fits into this machine's memory, estimated before anything is downloaded. No torch.

The engine makes its own, exact plan before it loads (``engine.memory``); this one spares a volunteer the download. The
working copy in memory is planned by ``rollmesh_peer.weights.ram``, which falls back to the disk.
"""

from __future__ import annotations

from typing import Final

from rollmesh_protocol import limits
from rollmesh_protocol.layout import Layout

RUNTIME_BYTES: Final = 768 * limits.MIB
"""Of torch, the model library and one batch's activations in the engine process."""


def engine_bytes(layout: Layout, *, on_cpu: bool) -> int:
    """Host memory of an engine with these weights: on a GPU only what it takes to get them there."""
    return RUNTIME_BYTES + (layout.image_bytes if on_cpu else 0)
