"""The mesh over libp2p: opens a host, wires its parts, and closes it so that nothing of it stays in the process.

Parts, none of which knows this module: the guarded swarm (who may connect), the guarded host (who speaks what), gossip,
and the listeners. Invariant: a port is ours alone or there is a :class:`HostError`, and it is free when the block ends.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.rcmgr import Direction

from rollmesh_peer.mesh.address import Endpoint, PeerAddress, endpoint_of, parse_endpoint, parse_peer_address
from rollmesh_peer.mesh.libp2p_host.gossip import Gossip
from rollmesh_peer.mesh.libp2p_host.host import GuardedHost
from rollmesh_peer.mesh.libp2p_host.services import running
from rollmesh_peer.mesh.libp2p_host.streams import Libp2pStream, ReceivingBudget
from rollmesh_peer.mesh.libp2p_host.swarm import Caps, GuardedSwarm
from rollmesh_peer.mesh.libp2p_host.yamux import YamuxConnection
from rollmesh_peer.mesh.seam import Accept, Mesh, PeerLink, StreamHandler
from rollmesh_peer.mesh.subscriptions import Subscription
from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError, LinkLost, Refused
from rollmesh_protocol.identity import SEED_BYTES, short

log = logging.getLogger("rollmesh.mesh")

_CLOSE_S: Final = 5.0
"""For closing all connections on the way out, which takes 0.3 s when peers answer."""
_BACKLOG: Final = 128


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """What a host is and takes."""

    key_seed: bytes = field(repr=False)
    """The 32-byte Ed25519 seed; the same seed gives the same peer id everywhere."""
    listen: tuple[str, ...] = ()
    """Multiaddrs such as ``/ip4/0.0.0.0/tcp/4700``; none for a host that only dials; port 0 for any free one."""
    announce: tuple[str, ...] = ()
    """Addresses under which others reach us although we do not listen there: a forwarded port, a public name."""
    max_connections: int = limits.MAX_CONNECTIONS
    per_block: int = limits.MAX_CONNECTIONS_PER_BLOCK
    """Incoming connections of one /24 or /48."""
    gossip: bool = True


@asynccontextmanager
async def open_mesh(options: HostOptions) -> AsyncIterator[Mesh]:
    """A mesh peer that lives as long as the block. An error inside the block comes out as it is, not in a group.

    Raises:
        HostError: a listen address is in use, or does not belong to this machine.
        UsageError: a listen or announce address is malformed.
    """
    if len(options.key_seed) != SEED_BYTES:
        raise HostError(f"the key has {len(options.key_seed)} bytes instead of {SEED_BYTES}")
    endpoints = [parse_endpoint(text, listening=True) for text in options.listen]
    announced = [parse_endpoint(text) for text in options.announce]
    _quiet_library()
    caps = Caps(connections=options.max_connections, per_block=options.per_block)
    swarm = GuardedSwarm(create_new_key_pair(options.key_seed), caps=caps)
    host = GuardedHost(swarm)
    gossip = Gossip(host, report=swarm.report) if options.gossip else None
    listeners = await _listen(endpoints)
    failure: Exception | None = None
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(swarm))
        if gossip is not None:
            await stack.enter_async_context(running(gossip.overlay))
            await stack.enter_async_context(running(gossip))
            await gossip.wait_until_ready()
        nursery = await stack.enter_async_context(trio.open_nursery())
        bound = _bound(listeners)
        accepting = trio.CancelScope()
        nursery.start_soon(_accept, listeners, accepting, swarm, nursery)
        mesh = _Libp2pMesh(swarm, host=host, gossip=gossip, nursery=nursery, endpoints=[*announced, *bound])
        log.info("peer %s listens on %s", mesh.peer_id, ", ".join(mesh.addresses) or "nothing")
        try:
            yield mesh
        except Exception as error:  # noqa: BLE001 - raised again below, outside of the nurseries' groups
            failure = error
        finally:
            accepting.cancel()
            with trio.CancelScope(deadline=trio.current_time() + _CLOSE_S, shield=True):
                await swarm.close_all()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class _Libp2pMesh:
    """A :class:`~rollmesh_peer.mesh.seam.Mesh` over libp2p."""

    def __init__(
        self,
        swarm: GuardedSwarm,
        *,
        host: GuardedHost,
        gossip: Gossip | None,
        nursery: trio.Nursery,
        endpoints: list[Endpoint],
    ) -> None:
        self._swarm = swarm
        self._host = host
        self._gossip = gossip
        self._nursery = nursery
        self._budget = ReceivingBudget()
        self._dialling: dict[str, trio.Lock] = {}
        self._peer_id: Final = str(host.get_id())
        addresses = [str(PeerAddress(endpoint=endpoint, peer=self._peer_id)) for endpoint in endpoints]
        self._addresses: Final = tuple(dict.fromkeys(addresses))

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
            if not lock.statistics().tasks_waiting:
                self._dialling.pop(target.peer, None)
        return target.peer

    async def disconnect(self, peer: str) -> None:
        """See the seam."""
        await self._swarm.close_peer(_id(peer))

    def links(self) -> Mapping[str, PeerLink]:
        """See the seam."""
        links = {}
        for peer_id in list(self._swarm.connections):
            for connection in self._swarm.newest(peer_id)[:1]:
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
            except (LinkLost, Refused) as error:
                log.debug("%s of %s: %s", protocol, short(stream.peer), error)
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
        if self._gossip is None:
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
    listeners: list[trio.SocketListener], accepting: trio.CancelScope, swarm: GuardedSwarm, nursery: trio.Nursery
) -> None:
    """Serve connections in ``nursery`` until ``accepting`` is cancelled, which closes listeners and no connection."""
    with accepting:
        if listeners:
            await trio.serve_listeners(swarm.serve, listeners, handler_nursery=nursery)


async def _listen(endpoints: list[Endpoint]) -> list[trio.SocketListener]:
    """Bind every endpoint, without SO_REUSEPORT: a port that somebody else has is an error and not shared."""
    listeners: list[trio.SocketListener] = []
    try:
        for endpoint in endpoints:
            listeners += await trio.open_tcp_listeners(endpoint.port, host=endpoint.host, backlog=_BACKLOG)
    except OSError as error:
        for listener in listeners:
            await listener.aclose()
        raise HostError(_listen_failure(endpoint, error)) from error
    return listeners


def _listen_failure(endpoint: Endpoint, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {endpoint.port} is in use by another program; choose another one to listen on"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{endpoint.host} is not an address of this machine; listen on /ip4/0.0.0.0/tcp/{endpoint.port}"
    if error.errno == errno.EACCES:
        return f"port {endpoint.port} may be opened by administrators only; choose one above 1023"
    return f"cannot listen on {endpoint}: {(error.strerror or str(error)).lower()}"


def _bound(listeners: list[trio.SocketListener]) -> list[Endpoint]:
    """Where others on this network reach the listeners; a wildcard becomes this machine's own addresses."""
    endpoints = []
    for listener in listeners:
        host, port = listener.socket.getsockname()[:2]
        if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            endpoints += [endpoint_of(own, port) for own in _own_hosts(is_ipv6=host == "::")]
        else:
            endpoints.append(endpoint_of(host, port))
    return endpoints


def _own_hosts(*, is_ipv6: bool) -> list[str]:
    """The address that leads out of this machine, if any, and the loopback one. Nothing is sent to find out."""
    hosts = []
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("2001:db8::1" if is_ipv6 else "192.0.2.1", 9))
            hosts.append(str(probe.getsockname()[0]))
        except OSError:
            log.debug("no way out over %s", "IPv6" if is_ipv6 else "IPv4")
    return [*hosts, "::1" if is_ipv6 else "127.0.0.1"]


def _id(peer: str) -> ID:
    return ID.from_base58(peer)


def _quiet_library() -> None:
    """The library warns on the terminal of what strangers do; what matters is logged by us, under ``rollmesh``."""
    if "LIBP2P_DEBUG" not in os.environ:
        logging.getLogger("libp2p").setLevel(logging.CRITICAL)
