"""Asks for a status: over a control socket of this machine, or over the mesh with nothing but a join line.

Nobody is trusted here: an answer is a bounded, validated record, and pages beyond a bound are not asked for. Showing it
is not done here. It needs no code of the learner's or the node's, and no key: a new one is made for each connection.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollmesh_peer.control import ask_control
from rollmesh_peer.folders import control_sockets
from rollmesh_protocol import limits, streams
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.identity import SEED_BYTES
from rollmesh_protocol.status import PeerStatus, StatusAnswer, StatusRequest

if TYPE_CHECKING:
    from rollmesh_peer.mesh.join import JoinLine

MAX_PAGES: Final = 50
"""10,000 peers; a learner that claims more is shown without the rest."""

Ask = Callable[[StatusRequest], Awaitable[StatusAnswer]]
"""One page of a status. Raises LinkLost when nobody answers."""


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

    async def ask_page(request: StatusRequest) -> StatusAnswer:
        try:
            return await ask_control(path, request)
        except Refused as error:
            raise LinkLost(f"the daemon behind {path} answers nonsense: {error.detail}") from error

    return ask_page


async def find_local() -> Sequence[Path]:
    """The control sockets of this user's daemons that answer, newest first.

    Raises:
        LinkLost: none does.
    """
    found = []
    for path in control_sockets():
        with contextlib.suppress(LinkLost):
            await control_ask(path)(StatusRequest(page=0))
            found.append(path)
    if not found:
        raise LinkLost(
            "no rollmesh node or learner of this user runs on this machine\n"
            "to look at a run from outside: rollmesh status --join <line>"
        )
    return found


@contextlib.asynccontextmanager
async def remote_ask(join: JoinLine) -> AsyncIterator[Ask]:
    """Asks the learner of a join line, dialling it anew whenever the connection is gone."""
    from rollmesh_peer.mesh.host import HostOptions, open_mesh
    from rollmesh_peer.mesh.requests import ask

    async with open_mesh(HostOptions(key_seed=secrets.token_bytes(SEED_BYTES), gossip=False)) as mesh:

        async def ask_page(request: StatusRequest) -> StatusAnswer:
            troubles = []
            for address in join.addresses:
                try:
                    await mesh.connect(str(address))
                    raw = await ask(
                        mesh, join.learner, streams.STATUS, request.encode(),
                        answer_bytes=limits.STATUS_BYTES, deadline_s=limits.REQUEST_S,
                    )  # fmt: skip
                    return StatusAnswer.decode(raw, limit=limits.STATUS_BYTES)
                except (LinkLost, Refused) as error:
                    troubles.append(f"the learner does not answer at {address.endpoint}: {error.detail}")
            raise LinkLost("\n".join(troubles))

        yield ask_page
