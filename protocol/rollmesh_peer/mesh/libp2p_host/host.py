"""The library's host, reduced to what this mesh uses: a table of protocols, and negotiation on new streams.

No identify, no ping, no autonat, no relays: what a stranger cannot ask for it cannot abuse. Addresses that peers report
of themselves are never stored, so nothing can dial them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.basic_host import BasicHost
from libp2p.host.exceptions import StreamFailure
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID

from rollmesh_peer.mesh.libp2p_host import negotiation
from rollmesh_peer.mesh.libp2p_host.streams import give_up
from rollmesh_peer.mesh.libp2p_host.swarm import GuardedSwarm
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.identity import short

log = logging.getLogger("rollmesh.mesh.host")

_PLACEHOLDER: Final = TProtocol("/rollmesh/none")
"""The library takes an empty table for "all of my own protocols"."""


class GuardedHost(BasicHost):
    """A host over a guarded swarm."""

    def __init__(self, swarm: GuardedSwarm) -> None:
        super().__init__(
            swarm,
            default_protocols=OrderedDict({_PLACEHOLDER: _nobody}),
            announce_addrs=[],
            disable_identify_address_discovery=True,
        )
        self.multiselect.handlers.clear()
        swarm.notifees.clear()
        swarm.guard_streams(self._handle)
        self._swarm = swarm

    async def new_stream(self, peer_id: ID, protocol_ids: Sequence[TProtocol]) -> INetStream:
        """A stream to a connected peer that speaks the first of ``protocol_ids``; never dials.

        Raises:
            SwarmException: no connection, or it broke.
            StreamFailure: the peer does not speak it.
        """
        try:
            return await self.open_stream(peer_id, protocol_ids[0])
        except Refused as error:
            raise StreamFailure(str(error)) from error
        except LinkLost as error:
            raise SwarmException(str(error)) from error

    async def open_stream(self, peer_id: ID, protocol: str) -> INetStream:
        """The same with the errors of the seam: LinkLost, and Refused ``version.unsupported``."""
        failure = LinkLost(f"there is no connection to {peer_id}")
        for connection in self._swarm.newest(peer_id):
            try:
                return await self._open_on(connection, protocol)
            except LinkLost as error:
                failure = error
        raise failure

    async def _open_on(self, connection: SwarmConn, protocol: str) -> INetStream:
        peer_id = connection.muxed_conn.peer_id
        try:
            with trio.move_on_after(limits.NEGOTIATE_S) as deadline:
                stream = await connection.new_stream()
                async with AsyncExitStack() as undo:
                    undo.push_async_callback(give_up, stream)
                    await negotiation.propose(stream, protocol)
                    undo.pop_all()
                stream.set_protocol(TProtocol(protocol))
        except BaseLibp2pError as error:
            raise LinkLost(f"the connection to {peer_id} broke") from error
        if deadline.cancelled_caught:
            raise LinkLost(f"{peer_id} did not agree on a protocol within {limits.NEGOTIATE_S:.0f} s")
        return stream

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        """Never: the library would run it as a task outside of every scope."""

    async def _handle(self, stream: INetStream) -> None:
        """Agree on a protocol with whoever opened ``stream``, and hand it over."""
        protocol = None
        with trio.move_on_after(limits.NEGOTIATE_S):
            protocol = await negotiation.choose(stream, {str(name) for name in self.multiselect.handlers})
        if protocol is None:
            log.debug("%s proposed nothing that is spoken here", short(str(stream.muxed_conn.peer_id)))
            return
        handler = self.multiselect.handlers.get(TProtocol(protocol))
        if handler is not None:
            stream.set_protocol(TProtocol(protocol))
            await handler(stream)


async def _nobody(stream: INetStream) -> None:
    await stream.reset()
