"""Who may connect, and what happens to a stream: the library's swarm with admission in front and no dialling behind.

Mends of the library: an inbound slot is given back when its connection ends, not when the swarm does; an error in a
stream's handler ends that stream and counts as an offence, and never the host; nothing is remembered of a failed dial;
no peer holds more than ``limits.MAX_CONNECTIONS_PER_PEER`` connections; nothing dials on its own.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio
from libp2p.abc import IMuxedConn, INetStream
from libp2p.crypto.keys import KeyPair
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.stream_muxer.exceptions import MuxedConnError, MuxedStreamError
from multiaddr import Multiaddr

from rollmesh_peer.mesh.address import PeerAddress, block_of
from rollmesh_peer.mesh.doorway import Doorway, Rank, nobody_matters
from rollmesh_peer.mesh.libp2p_host.streams import give_up
from rollmesh_peer.mesh.libp2p_host.transport import GuardedConnection, Upgrader, dial_tcp
from rollmesh_peer.mesh.libp2p_host.yamux import YamuxConnection
from rollmesh_peer.mesh.rates import OffenceBook, TokenBucket
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost
from rollmesh_protocol.identity import short

log = logging.getLogger("rollmesh.mesh.swarm")

StreamTask = Callable[[INetStream], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Caps:
    """How many connections: in all, of one address block, and of each of them in their handshake at a time."""

    connections: int
    per_block: int
    handshakes: int = limits.MAX_HANDSHAKES
    handshakes_per_block: int = limits.HANDSHAKES_PER_BLOCK


class GuardedSwarm(Swarm):
    """The connections of one host."""

    def __init__(self, keys: KeyPair, *, caps: Caps, rank: Rank = nobody_matters) -> None:
        self.caps = caps
        self.offences = OffenceBook()
        self._handshakes = 0
        self._shaking: dict[trio.CancelScope, float] = {}
        """Handshakes under way and since when, the oldest first."""
        self._arrivals = TokenBucket(
            rate=limits.ARRIVALS_S, burst=limits.ARRIVALS_BURST_IN_ALL, now=trio.current_time()
        )
        self._inbound = 0
        self._blocks: dict[str, _Block] = {}
        self._doorway = Doorway(rank)
        self._lost: dict[ID, trio.Event] = {}
        peer_id = ID.from_pubkey(keys.public_key)
        peerstore = PeerStore()
        peerstore.add_key_pair(peer_id, keys)
        upgrader = Upgrader(keys, is_welcome=self._is_welcome, report=self.report, doorway=self._doorway)
        config = ConnectionConfig(
            max_connections=caps.connections,
            high_watermark=caps.connections,
            min_connections=0,
            low_watermark=0,
            max_connections_per_peer=limits.MAX_CONNECTIONS_PER_PEER + 1,
            inbound_upgrade_timeout=limits.HANDSHAKE_S,
            outbound_upgrade_timeout=limits.HANDSHAKE_S,
        )
        super().__init__(peer_id, peerstore, upgrader, [], RetryConfig(max_retries=0), config)

    # --- connections -------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """The door, and nothing by itself: no pruning, no connecting to peers that somebody named."""
        await self._doorway.run()

    async def serve(self, stream: trio.SocketStream) -> None:
        """One incoming TCP connection, from its first byte to its last."""
        raw = GuardedConnection(stream, initiator=False)
        block = block_of(raw.remote) if raw.remote else None
        try:
            if raw.remote is None or not await self.connection_gate.is_allowed(Multiaddr(str(raw.remote))):
                return
            if block is None:
                await self._serve_within_caps(raw, block=_Block(trio.current_time()))
            else:
                await self._serve_within_caps(raw, block=self._block(block))
        except Exception as error:  # noqa: BLE001 - whatever a stranger provokes in the handshake
            log.debug("an incoming connection from %s failed: %r", raw.remote, error)
        finally:
            with trio.CancelScope(shield=True):
                await raw.close()

    async def dial(self, address: PeerAddress) -> None:
        """Connect to the peer that must answer at ``address``. The caller sets the deadline.

        Raises:
            LinkLost: it does not answer, or somebody else does.
        """
        if len(self.get_connections()) >= self.caps.connections:
            raise LinkLost(f"all {self.caps.connections} connections are in use")
        raw = await dial_tcp(address.endpoint)
        try:
            await self.upgrade_outbound_raw_conn(raw, ID.from_base58(address.peer))
        except LinkLost:
            raise
        except Exception as error:
            log.debug("dialling %s failed: %r", address, error)
            raise LinkLost(_dial_failure(address, error)) from error

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> SwarmConn:
        """Register a connection; the oldest one to the same peer gives way to one too many."""
        connection = await super().add_conn(muxed_conn, direction)
        for old in self.get_connections(muxed_conn.peer_id)[: -limits.MAX_CONNECTIONS_PER_PEER]:
            self.manager.run_task(old.close)
        return connection

    def remove_conn(self, swarm_conn: SwarmConn) -> None:
        """Forget a connection; whoever waits for the loss of its peer is told when it was the last."""
        super().remove_conn(swarm_conn)
        peer_id = swarm_conn.muxed_conn.peer_id
        if peer_id not in self.connections:
            lost = self._lost.pop(peer_id, None)
            if lost is not None:
                lost.set()

    async def notify_disconnected(self, conn: object) -> None:
        """Tell the listeners; the library would also note the peer down for ever."""
        await self._notify("disconnected", conn)

    async def wait_lost(self, peer_id: ID) -> None:
        """Return when no connection to the peer is left."""
        while peer_id in self.connections:
            await self._lost.setdefault(peer_id, trio.Event()).wait()

    def newest(self, peer_id: ID) -> list[SwarmConn]:
        """The usable connections to a peer, the newest first."""
        found = [c for c in self.get_connections(peer_id) if isinstance(c, SwarmConn) and not c.muxed_conn.is_closed]
        return found[::-1]

    def usable(self, peer_id: ID) -> SwarmConn | None:
        """The newest usable connection to a peer; asked for every peer at every look around, so it copies nothing."""
        for connection in reversed(self.connections.get(peer_id, ())):
            if isinstance(connection, SwarmConn) and not connection.muxed_conn.is_closed:
                return connection
        return None

    async def close_all(self) -> None:
        """Close every connection, all at one time: the library takes 0.2 s for each in turn."""
        async with trio.open_nursery() as nursery:
            for connection in self.get_connections():
                nursery.start_soon(connection.close)

    # --- streams and offences ----------------------------------------------------------------------------------------
    def guard_streams(self, handle: StreamTask) -> None:
        """Handle every incoming stream with ``handle``; its errors end the stream, and the peer after too many."""

        async def guarded(stream: INetStream) -> None:
            peer = str(stream.muxed_conn.peer_id)
            try:
                await handle(stream)
            except (StreamError, MuxedStreamError, MuxedConnError, LinkLost) as error:
                log.debug("a stream of %s broke: %r", short(peer), error)
            except Exception as error:  # noqa: BLE001 - the boundary that keeps the host alive
                self.report(peer, repr(error))
            finally:
                await give_up(stream)

        self.set_stream_handler(guarded)

    def report(self, peer: str, what: str, *, weight: float = 1.0) -> None:
        """Count an offence; after ``limits.MAX_OFFENCES`` the peer is shut out for ``limits.BAN_S``."""
        log.debug("an offence of %s: %s", short(peer), what)
        if self.offences.record(peer, now=trio.current_time(), weight=weight):
            log.warning("shutting %s out for %.0f s: %s", short(peer), limits.BAN_S, what)
            for connection in self.get_connections(ID.from_base58(peer)):
                self.manager.run_task(connection.close)

    # --- inside ------------------------------------------------------------------------------------------------------
    async def _serve_within_caps(self, raw: GuardedConnection, *, block: _Block) -> None:
        if self._inbound >= max(1, self.caps.connections - limits.RESERVED_CONNECTIONS):
            return
        now = trio.current_time()
        if not self._has_room(now) or not block.may_enter(self.caps, now=now) or not self._arrivals.take(now):
            return
        self._inbound += 1
        block.connections += 1
        try:
            muxed = await self._shake_hands(raw, block=block)
            if isinstance(muxed, YamuxConnection):
                await muxed.event_closed.wait()
        finally:
            block.connections -= 1
            self._inbound -= 1

    async def _shake_hands(self, raw: GuardedConnection, *, block: _Block) -> IMuxedConn:
        self._handshakes += 1
        block.handshakes += 1
        scope = trio.CancelScope()
        self._shaking[scope] = trio.current_time()
        try:
            with scope:
                return await self.upgrade_inbound_raw_conn(raw, Multiaddr(str(raw.remote)))
            raise LinkLost("the handshake took long, and another one waits")
        finally:
            self._shaking.pop(scope, None)
            block.handshakes -= 1
            self._handshakes -= 1

    def _has_room(self, now: float) -> bool:
        """True when one more handshake may begin; the slowest one gives way to it."""
        if self._handshakes < self.caps.handshakes:
            return True
        scope, since = next(iter(self._shaking.items()), (None, now))
        if scope is None or now - since < limits.SLOW_HANDSHAKE_S:
            return False
        del self._shaking[scope]
        scope.cancel()
        return True

    def _block(self, name: str) -> _Block:
        block = self._blocks.get(name)
        if block is None:
            idle = [other for other, state in self._blocks.items() if not state.connections]
            for other in idle[: len(self._blocks) - limits.MAX_BLOCKS + 1]:
                del self._blocks[other]
            block = self._blocks[name] = _Block(trio.current_time())
        return block

    def _is_welcome(self, peer: str) -> bool:
        return peer != str(self.self_id) and not self.offences.is_banned(peer, now=trio.current_time())


class _Block:
    """What comes from one address block. Loopback has a fresh one for each connection: no bounds."""

    def __init__(self, now: float) -> None:
        self.connections = 0
        self.handshakes = 0
        self._arrivals = TokenBucket(rate=limits.ARRIVALS_PER_BLOCK_S, burst=limits.ARRIVALS_BURST, now=now)

    def may_enter(self, caps: Caps, *, now: float) -> bool:
        return (
            self.connections < caps.per_block
            and self.handshakes < caps.handshakes_per_block
            and self._arrivals.take(now)
        )


def _dial_failure(address: PeerAddress, error: Exception) -> str:
    text = f"{error} {error.__cause__}"
    if "mismatch" in text.lower() or "PeerIDMismatchesPubkey" in repr(error.__cause__):
        return f"somebody else answers at {address.endpoint}, not {address.peer}"
    if isinstance(error, SwarmException):
        return f"{address.endpoint} answers, but does not speak Noise and yamux with us"
    return f"{address.endpoint} hung up"
