"""A mesh inside one process: the same seam as ``mesh.host``, with links that a test cuts and peers that it kills.

Deterministic under trio's virtual clock: nothing sleeps, nothing touches a socket. Streams carry bytes through bounded
pipes, so a writer whose reader does not read waits here as it does on a real connection.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import trio

from rollmesh_peer.mesh.address import Endpoint, PeerAddress, parse_peer_address
from rollmesh_peer.mesh.seam import Accept, PeerLink, StreamHandler
from rollmesh_peer.mesh.subscriptions import Subscription, nothing
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.identity import Identity, short

log = logging.getLogger("rollmesh.testing")


class MemoryNetwork:
    """Where memory meshes find each other."""

    def __init__(self) -> None:
        self._meshes: dict[str, MemoryMesh] = {}
        self._cuts: set[frozenset[str]] = set()
        self._ports = 0

    @asynccontextmanager
    async def join(self, key_seed: bytes, *, port: int | None = None) -> AsyncIterator[MemoryMesh]:
        """A new mesh on this network, gone at the end of the block; the same ``port`` gives the same address again."""
        self._ports += 1
        async with trio.open_nursery() as nursery:
            port = port or 20_000 + self._ports
            mesh = self._make_mesh(peer=Identity(key_seed).peer, port=port, nursery=nursery)
            self._meshes[mesh.peer_id] = mesh
            try:
                yield mesh
            finally:
                self.kill(mesh.peer_id)

    def _make_mesh(self, *, peer: str, port: int, nursery: trio.Nursery) -> MemoryMesh:
        return MemoryMesh(self, peer=peer, port=port, nursery=nursery)

    def kill(self, peer: str) -> None:
        """End a peer as ``kill -9`` does: its links are gone, and nothing answers at its address."""
        mesh = self._meshes.pop(peer, None)
        if mesh is not None:
            mesh.end()

    def cut(self, one: str, other: str) -> None:
        """Break the link between two peers, and let none come up until :meth:`heal`."""
        self._cuts.add(frozenset((one, other)))
        if one in self._meshes:
            self._meshes[one].drop(other)

    def heal(self, one: str, other: str) -> None:
        """Allow links between two peers again."""
        self._cuts.discard(frozenset((one, other)))

    def reachable(self, mesh: MemoryMesh, target: PeerAddress) -> MemoryMesh | None:
        """The mesh that answers at ``target``, as seen from ``mesh``."""
        found = self._meshes.get(target.peer)
        if found is None or str(target) not in found.addresses or frozenset((mesh.peer_id, target.peer)) in self._cuts:
            return None
        return found


class MemoryMesh:
    """One peer of a :class:`MemoryNetwork`; a :class:`~rollmesh_peer.mesh.seam.Mesh`."""

    def __init__(self, network: MemoryNetwork, *, peer: str, port: int, nursery: trio.Nursery) -> None:
        endpoint = Endpoint(kind="ip4", host="127.0.0.1", port=port)
        self.peer_id = peer
        self.addresses: tuple[str, ...] = (str(PeerAddress(endpoint=endpoint, peer=peer)),)
        self._network = network
        self._nursery = nursery
        self._links: dict[str, _Link] = {}
        self._handlers: dict[str, StreamHandler] = {}
        self._subscriptions: dict[str, Subscription] = {}

    async def connect(self, address: str) -> str:
        """See the seam."""
        target = parse_peer_address(address)
        await trio.lowlevel.checkpoint()
        other = self._network.reachable(self, target)
        if other is None or other is self:
            raise LinkLost(f"{target.endpoint} does not answer")
        if target.peer not in self._links:
            link = _Link()
            self.attach(link.seen(other, is_outbound=True))
            other.attach(link.seen(self, is_outbound=False))
        return target.peer

    async def disconnect(self, peer: str) -> None:
        """See the seam."""
        await trio.lowlevel.checkpoint()
        self.drop(peer)

    def links(self) -> Mapping[str, PeerLink]:
        """See the seam."""
        return {peer: link.description for peer, link in self._links.items()}

    async def wait_link_lost(self, peer: str) -> None:
        """See the seam."""
        while peer in self._links:
            await self._links[peer].lost.wait()

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        """See the seam."""
        self._handlers[protocol] = handler

    async def open_stream(self, peer: str, protocol: str) -> MemoryStream:
        """See the seam."""
        await trio.lowlevel.checkpoint()
        link = self._links.get(peer)
        if link is None:
            raise LinkLost(f"there is no connection to {peer}")
        there, back = _Pipe(), _Pipe()
        link.other.take(protocol, MemoryStream(self.peer_id, incoming=there, outgoing=back))
        link.pipes += (there, back)
        return MemoryStream(peer, incoming=back, outgoing=there)

    def subscribe(self, topic: str, *, accept: Accept) -> trio.MemoryReceiveChannel[bytes]:
        """See the seam."""
        subscription = self._subscriptions[topic] = Subscription(topic, accept=accept)
        return subscription.receive

    async def publish(self, topic: str, message: bytes) -> None:
        """See the seam. A message goes along the links of peers that accept it."""
        await trio.lowlevel.checkpoint()
        if len(message) > limits.GOSSIP_BYTES:
            raise Refused("request.too_large", f"a gossip message has at most {limits.GOSSIP_BYTES} bytes")
        self._subscriptions.setdefault(topic, Subscription(topic, accept=nothing))
        reached, front = {self.peer_id}, [self]
        while front:
            for neighbour in front.pop().neighbours():
                if neighbour.peer_id not in reached and neighbour.hear(topic, author=self.peer_id, message=message):
                    front.append(neighbour)
                reached.add(neighbour.peer_id)

    # --- called by the other meshes and the network ------------------------------------------------------------------
    def attach(self, link: _Link) -> None:
        """A link is up, as seen from here."""
        self._links[link.other.peer_id] = link

    def detach(self, peer: str) -> None:
        """A link is down."""
        self._links.pop(peer, None)

    def take(self, protocol: str, stream: MemoryStream) -> None:
        """Handle a stream that a peer opened."""
        handler = self._handlers.get(protocol)
        if handler is None:
            raise Refused("version.unsupported", f"the other side does not speak {protocol}")
        self._nursery.start_soon(_serve, handler, stream)

    def hear(self, topic: str, *, author: str, message: bytes) -> bool:
        """A gossip message comes along a link; True when it is to be passed on."""
        subscription = self._subscriptions.get(topic)
        return subscription is not None and subscription.offer(author, message)

    def neighbours(self) -> list[MemoryMesh]:
        """The peers at the other ends of our links."""
        return [link.other for link in self._links.values()]

    def drop(self, peer: str) -> None:
        """Break the link to one peer, on both sides."""
        link = self._links.pop(peer, None)
        if link is not None:
            link.other.detach(self.peer_id)
            link.end()

    def end(self) -> None:
        """Stop everything that runs here."""
        for peer in list(self._links):
            self.drop(peer)
        self._nursery.cancel_scope.cancel()


class MemoryStream:
    """A :class:`~rollmesh_peer.mesh.seam.MeshStream` over two pipes."""

    def __init__(self, peer: str, *, incoming: _Pipe, outgoing: _Pipe) -> None:
        self.peer = peer
        self._incoming = incoming
        self._outgoing = outgoing

    async def send(self, frame: bytes) -> None:
        """See the seam."""
        await self._outgoing.write(len(frame).to_bytes(limits.FRAME_HEADER_BYTES, "big") + frame)

    async def receive(self, limit: int) -> bytes:
        """See the seam."""
        length = int.from_bytes(await self._incoming.read(limits.FRAME_HEADER_BYTES), "big")
        if length > limit:
            raise Refused("request.too_large", f"a message of {length} bytes, where {limit} are allowed")
        return await self._incoming.read(length)

    async def close(self) -> None:
        """See the seam."""
        self._outgoing.close()

    async def reset(self) -> None:
        """See the seam."""
        self._outgoing.end()
        self._incoming.end()


class _Link:
    """What two meshes share while they are linked, as seen from one of them."""

    other: MemoryMesh
    description: PeerLink

    def __init__(self) -> None:
        self.lost = trio.Event()
        self.pipes: list[_Pipe] = []

    def seen(self, other: MemoryMesh, *, is_outbound: bool) -> _Link:
        view = _Link()
        view.lost, view.pipes, view.other = self.lost, self.pipes, other
        address = other.addresses[0].partition("/p2p/")[0]
        view.description = PeerLink(peer=other.peer_id, address=address, outbound=is_outbound)
        return view

    def end(self) -> None:
        self.lost.set()
        for pipe in self.pipes:
            pipe.end()


class _Pipe:
    """Bytes in one direction, a window of them at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._changed = trio.lowlevel.ParkingLot()
        self._is_closed = False
        self._is_ended = False

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        rest = memoryview(data)
        while rest:
            if self._is_closed or self._is_ended:
                raise LinkLost("the stream broke while a message was sent")
            room = limits.STREAM_WINDOW_BYTES - len(self._buffer)
            if room <= 0:
                await self._changed.park()
                continue
            self._buffer += rest[:room]
            rest = rest[room:]
            self._changed.unpark_all()

    async def read(self, n: int) -> bytes:
        await trio.lowlevel.checkpoint()
        taken = bytearray()
        while len(taken) < n:
            if self._buffer:
                piece = self._buffer[: n - len(taken)]
                del self._buffer[: len(piece)]
                taken += piece
                self._changed.unpark_all()
            elif self._is_closed or self._is_ended:
                raise LinkLost("the stream ended")
            else:
                await self._changed.park()
        return bytes(taken)

    def close(self) -> None:
        self._is_closed = True
        self._changed.unpark_all()

    def end(self) -> None:
        self._is_ended = True
        self._changed.unpark_all()


async def _serve(handler: StreamHandler, stream: MemoryStream) -> None:
    try:
        await handler(stream)
    except (LinkLost, Refused) as error:
        log.debug("a stream of %s: %s", short(stream.peer), error)
    except Exception:
        log.exception("a handler failed for %s", short(stream.peer))
        await stream.reset()
    await stream.close()
