"""Asks for a status: over a control socket of this machine, or over the mesh with nothing but a join line.

Nobody is trusted here: an answer is a bounded, validated record, and pages beyond a bound are not asked for. Showing it
is not done here. It needs no code of the learner's or the node's.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from rollmesh_peer.control import ask_control
from rollmesh_peer.folders import control_sockets
from rollmesh_peer.mesh.host import open_mesh
from rollmesh_peer.mesh.join import JoinLine
from rollmesh_peer.mesh.requests import STATUS_ROUTE, ask
from rollmesh_protocol.errors import LinkLost
from rollmesh_protocol.identity import SEED_BYTES, Identity
from rollmesh_protocol.status import PeerStatus, StatusAnswer, StatusRequest

MAX_PAGES: Final = 50
"""10,000 peers; a learner that claims more is shown without the rest."""

Ask = Callable[[StatusRequest], Awaitable[StatusAnswer]]


async def collect(ask_page: Ask) -> StatusAnswer:
    """The whole status: every page of peers in one answer, each peer once.

    Raises:
        LinkLost: no answer.
    """
    first = await ask_page(StatusRequest(page=0))
    if first.run is None or first.run.pages <= 1:
        return first
    peers: dict[str, PeerStatus] = {peer.peer: peer for peer in first.run.peers}
    for page in range(1, min(first.run.pages, MAX_PAGES)):
        more = await ask_page(StatusRequest(page=page))
        peers |= {peer.peer: peer for peer in (more.run.peers if more.run is not None else ())}
    # A merged answer is longer than a page may be: it is built, never sent.
    merged = first.run.model_copy(update={"peers": tuple(peers.values()), "page": 0, "pages": 1})
    return first.model_copy(update={"run": merged})


def control_ask(path: Path) -> Ask:
    """Asks the daemon behind a control socket."""
    return lambda request: ask_control(path, request)


async def find_local() -> Sequence[tuple[Path, StatusAnswer]]:
    """Every daemon of this user that answers, newest first.

    Raises:
        LinkLost: none does.
    """
    found = []
    for path in control_sockets():
        with contextlib.suppress(LinkLost):
            found.append((path, await collect(control_ask(path))))
    if not found:
        raise LinkLost(
            "no rollmesh node or learner of this user runs on this machine\n"
            "to look at a run from outside: rollmesh status --join <line>"
        )
    return found
