"""What every process of vLLM loads before anything else, by the entry point ``vllm.general_plugins``.

Two things: the name under which vLLM finds our way of taking weights, and the bond between its processes and ours.
vLLM puts the scheduler and each worker into processes of their own. They stay in the engine child's process group, so
the daemon's kill of the group takes them along; but where the child alone dies (the kernel's out-of-memory killer picks
one process), each of them must notice, or it would hold the card's memory for nobody.

In the engine child itself, and in any other program's vLLM, only the name is registered.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Final

WEIGHTS_NAME: Final = "rollmesh"
"""Of the weight transfer engine, for ``WeightTransferConfig(backend=...)``."""
BOUND_ENV: Final = "ROLLMESH_VLLM_BOUND"
"""Set by the engine child for the processes that vLLM starts below it."""
_ORPHAN_STATUS: Final = 4


def register() -> None:
    """Register the weight transfer engine and, below an engine child, die with the parent. Safe to call again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            WEIGHTS_NAME, "rollmesh_node.engine.vllm_weights", "ImageTransferEngine"
        )
    except ValueError:  # registered already
        return
    parent = multiprocessing.parent_process()
    if parent is not None and os.environ.get(BOUND_ENV):
        threading.Thread(target=_follow, args=(parent,), name="rollmesh-bond", daemon=True).start()


def _follow(parent: multiprocessing.process.BaseProcess) -> None:
    """End this process when its parent has ended: it waits on a pipe whose other end the parent held."""
    parent.join()
    os._exit(_ORPHAN_STATUS)
