"""One peer over libp2p: wires the guarded swarm, the guarded host and gossip, and speaks the language of the seam.

The parts do not know it. It opens no listeners (``mesh.host`` does) and knows no message.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.rcmgr import Direction

from rollmesh_peer.mesh.address import Endpoint, PeerAddress, parse_peer_address
from rollmesh_peer.mesh.doorway import Rank
from rollmesh_peer.mesh.libp2p_host.gossip import Gossip
from rollmesh_peer.mesh.libp2p_host.host import GuardedHost
from rollmesh_peer.mesh.libp2p_host.services import running
from rollmesh_peer.mesh.libp2p_host.streams import Libp2pStream, ReceivingBudget
from rollmesh_peer.mesh.libp2p_host.swarm import Caps, GuardedSwarm
from rollmesh_peer.mesh.libp2p_host.yamux import YamuxConnection
from rollmesh_peer.mesh.seam import Accept, PeerLink, StreamHandler
from rollmesh_peer.mesh.subscriptions import Subscription
from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError, LinkLost, Refused
from rollmesh_protocol.identity import short

log = logging.getLogger("rollmesh.mesh")

_CLOSE_S: Final = 5.0
"""For closing all connections on the way out, which takes 0.3 s when peers answer."""

_REFUSED_WEIGHT: Final = 0.1
"""Of an offence: it takes some hundreds of refusals in a minute, and three a second are forgiven."""


class Libp2pMesh:
    """A :class:`~rollmesh_peer.mesh.seam.Mesh` over libp2p; lives inside :meth:`running`."""

    def __init__(self, *, key_seed: bytes, caps: Caps, gossip: bool, rank: Rank) -> None:
        self._swarm = GuardedSwarm(create_new_key_pair(key_seed), caps=caps, rank=rank)
        self._host = GuardedHost(self._swarm)
        self._gossip = Gossip(self._host, report=self._swarm.report) if gossip else None
        self._nursery: trio.Nursery | None = None
        self._budget = ReceivingBudget()
        self._dialling: dict[str, trio.Lock] = {}
        self._peer_id: Final = str(self._host.get_id())
        self._addresses: tuple[str, ...] = ()

    @asynccontextmanager
    async def running(self, listeners: list[trio.SocketListener], *, endpoints: list[Endpoint]) -> AsyncIterator[None]:
        """Serve ``listeners`` and run the library's services for the block; then close every connection.

        ``endpoints`` are where others reach us.
        """
        addresses = [str(PeerAddress(endpoint=endpoint, peer=self._peer_id)) for endpoint in endpoints]
        self._addresses = tuple(dict.fromkeys(addresses))
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(running(self._swarm))
            if self._gossip is not None:
                await stack.enter_async_context(running(self._gossip.overlay))
                await stack.enter_async_context(running(self._gossip))
                await self._gossip.wait_until_ready()
            self._nursery = await stack.enter_async_context(trio.open_nursery())
            accepting = trio.CancelScope()
            self._nursery.start_soon(self._accept, listeners, accepting, self._nursery)
            try:
                yield
            finally:
                accepting.cancel()
                with trio.CancelScope(deadline=trio.current_time() + _CLOSE_S, shield=True):
                    await self._swarm.close_all()
                self._nursery.cancel_scope.cancel()

    @property
    def peer_id(self) -> str:
        """See the seam."""
        return self._peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """See the seam."""
        return self._addresses

    async def connect(self, address: str) -> str:
        """See the seam."""
        target = parse_peer_address(address)
        if target.peer == self._peer_id:
            raise LinkLost("that is the address of this peer itself")
        lock = self._dialling.setdefault(target.peer, trio.Lock())
        try:
            async with lock:
                if not self._swarm.newest(_id(target.peer)):
                    await self._dial(target)
        finally:
            if not lock.locked():
                self._dialling.pop(target.peer, None)
        return target.peer

    async def disconnect(self, peer: str) -> None:
        """See the seam."""
        await self._swarm.close_peer(_id(peer))

    def links(self) -> Mapping[str, PeerLink]:
        """See the seam."""
        links = {}
        for peer_id in list(self._swarm.connections):
            connection = self._swarm.usable(peer_id)
            if connection is not None:
                muxed = connection.muxed_conn
                remote = str(muxed.remote or "") if isinstance(muxed, YamuxConnection) else ""
                outbound = connection.direction == Direction.OUTBOUND
                links[str(peer_id)] = PeerLink(peer=str(peer_id), address=remote, outbound=outbound)
        return links

    async def wait_link_lost(self, peer: str) -> None:
        """See the seam."""
        await self._swarm.wait_lost(_id(peer))

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        """See the seam."""

        async def serve(raw: INetStream) -> None:
            stream = Libp2pStream(raw, budget=self._budget)
            try:
                await handler(stream)
            except LinkLost as error:
                log.debug("%s of %s: %s", protocol, short(stream.peer), error)
            except Refused as error:
                self._swarm.report(stream.peer, f"{protocol}: {error.code}", weight=_REFUSED_WEIGHT)
            except Exception:
                log.exception("the handler of %s failed for %s", protocol, short(stream.peer))
                await stream.reset()
            await stream.finish()

        self._host.set_stream_handler(TProtocol(protocol), serve)

    async def open_stream(self, peer: str, protocol: str) -> Libp2pStream:
        """See the seam."""
        return Libp2pStream(await self._host.open_stream(_id(peer), protocol))

    def subscribe(self, topic: str, *, accept: Accept) -> trio.MemoryReceiveChannel[bytes]:
        """See the seam."""
        if self._gossip is None or self._nursery is None:
            raise HostError("this peer was opened without gossip")
        subscription = Subscription(topic, accept=accept)
        self._gossip.listen(subscription)
        self._nursery.start_soon(self._gossip.subscribe, topic)
        return subscription.receive

    async def publish(self, topic: str, message: bytes) -> None:
        """See the seam."""
        if self._gossip is None:
            raise HostError("this peer was opened without gossip")
        await self._gossip.send(topic, message)

    async def _dial(self, target: PeerAddress) -> None:
        with trio.move_on_after(limits.DIAL_S) as deadline:
            await self._swarm.dial(target)
        if deadline.cancelled_caught:
            raise LinkLost(f"{target.endpoint} does not answer within {limits.DIAL_S:.0f} s")

    async def _accept(
        self, listeners: list[trio.SocketListener], accepting: trio.CancelScope, nursery: trio.Nursery
    ) -> None:
        """Serve connections in ``nursery``; cancelling ``accepting`` closes the listeners and no connection."""
        with accepting:
            if listeners:
                await trio.serve_listeners(self._swarm.serve, listeners, handler_nursery=nursery)


def _id(peer: str) -> ID:
    return ID.from_base58(peer)


def quiet_library() -> None:
    """The library warns on the terminal of what strangers do; what matters is logged by us, under ``rollmesh``."""
    if "LIBP2P_DEBUG" not in os.environ:
        logging.getLogger("libp2p").setLevel(logging.CRITICAL)
