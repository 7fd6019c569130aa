"""``rollmesh node pause | resume``: tells the running node of this user, and waits until it has obeyed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

from rollmesh_peer.control import Order, OwnerRequest, ask_control
from rollmesh_peer.folders import control_socket
from rollmesh_peer.status.client import find_local
from rollmesh_protocol.errors import HostError, LinkLost
from rollmesh_protocol.status import NodeStatus

PATIENCE_S: Final = 20.0
"""An engine that hangs in its driver is left behind after ten seconds."""
LOOK_S: Final = 0.2


async def give_order(order: Order, *, folder: Path | None) -> Sequence[str]:
    """Pause or resume the node of ``folder``, or (None) every running node of this user; one sentence for each.

    Raises:
        LinkLost: no such node runs.
        HostError: a node's engine is still there after :data:`PATIENCE_S`.
    """
    paths = [control_socket("node", folder)] if folder is not None else await _running_nodes()
    told = []
    for path in paths:
        node = await _ask(path, order)
        with trio.move_on_after(PATIENCE_S):
            while node is not None and node.pause != ("paused" if order == "pause" else ""):
                await trio.sleep(LOOK_S)
                node = await _ask(path)
        if node is None:
            continue
        if node.pause == "pausing":
            raise HostError(f"the engine of {_name(node)} is still there after {PATIENCE_S:g} s; it is tried on")
        what = "paused: its engine is gone and the memory free" if order == "pause" else "goes on"
        told.append(f"{_name(node)} {what}")
    return told


async def _running_nodes() -> list[Path]:
    found = [path for path in await find_local() if path.name.startswith("node-")]
    if not found:
        raise LinkLost("no rollmesh node of this user runs on this machine")
    return found


async def _ask(path: Path, order: Order | None = None) -> NodeStatus | None:
    return (await ask_control(path, OwnerRequest(page=0, order=order))).node


def _name(node: NodeStatus) -> str:
    return f"the node {node.name or node.peer[-6:]}"
