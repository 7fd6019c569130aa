"""A memory network whose links have a rate and a delay: what a payload takes to spread, in virtual time.

The model of a path: the pieces that a peer writes wait in a buffer per connection, the uplink takes one piece of each
connection in turn, a piece is under way for the latency, and then goes through the receiver's downlink in the order of
arrival. Streams of one connection share its buffer, and each has the window of the muxer; a stream costs a round trip
to open. There is no loss and no slow start.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass
from functools import partial

import trio

from rollmesh_peer.testing.memory_mesh import MemoryMesh, MemoryNetwork, MemoryStream
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost

BUFFER_BYTES = 128 * 1024
"""What the kernel takes of one connection before a writer must wait."""
PIECE_BYTES = limits.WRITE_PIECE_BYTES


@dataclass(frozen=True)
class Rates:
    """Bytes a second of one peer."""

    up: float
    down: float


class ShapedNetwork(MemoryNetwork):
    """Where shaped meshes find each other. ``await run()`` beside them.

    Args:
        latency_s: one way, between any two.
        rates: by peer.
        hidden: peers that nobody can dial.
    """

    def __init__(self, *, latency_s, rates, hidden=frozenset()):
        super().__init__()
        self.latency_s = latency_s
        self.rates = rates
        self.hidden = hidden
        self._events = []
        self._order = itertools.count()
        self._wake = trio.CancelScope()

    def _make_mesh(self, *, peer, port, nursery):
        return ShapedMesh(self, peer=peer, port=port, nursery=nursery)

    def reachable(self, mesh, target):
        return None if target.peer in self.hidden else super().reachable(mesh, target)

    def at(self, time, action):
        heapq.heappush(self._events, (time, next(self._order), action))
        if self._events[0][0] < self._wake.deadline:
            self._wake.deadline = self._events[0][0]

    async def run(self):
        """Let things arrive when they are due."""
        while True:
            with trio.CancelScope(deadline=self._events[0][0] if self._events else math.inf) as self._wake:
                await trio.sleep_forever()
            while self._events and self._events[0][0] <= trio.current_time():
                heapq.heappop(self._events)[2]()


class ShapedMesh(MemoryMesh):
    """One peer of a :class:`ShapedNetwork`."""

    def __init__(self, network, *, peer, port, nursery):
        super().__init__(network, peer=peer, port=port, nursery=nursery)
        self.uplink = Uplink(network, network.rates[peer])
        self.down_free_at = 0.0
        self.received = 0
        self.wide = {}

    async def connect(self, address):
        await trio.sleep(4 * self._network.latency_s)  # TCP, and then Noise
        return await super().connect(address)

    async def open_stream(self, peer, protocol):
        await trio.sleep(2 * self._network.latency_s)
        link = self._links.get(peer)
        if link is None:
            raise LinkLost(f"there is no connection to {peer}")
        there, back = ShapedPipe(self, link.other), ShapedPipe(link.other, self)
        link.other.take(protocol, ShapedStream(self.peer_id, incoming=there, outgoing=back))
        link.pipes += (there, back)
        return ShapedStream(peer, incoming=back, outgoing=there)


class ShapedStream(MemoryStream):
    """A stream over two shaped pipes."""

    async def reset(self):
        """See the seam. The other side learns of it after the latency."""
        network = self._incoming.source._network
        for pipe in (self._incoming, self._outgoing):
            network.at(trio.current_time() + network.latency_s, pipe.end)


class Uplink:
    """What a peer sends: one piece of each connection in turn."""

    def __init__(self, network, rates):
        self.network = network
        self.rates = rates
        self.sent = 0
        self._lines = {}
        self._turn = deque()
        self._is_sending = False

    async def put(self, pipe, piece):
        """Return when the connection's buffer has taken ``piece``."""
        line = self._lines.setdefault(pipe.to.peer_id, _Line())
        while line.buffered + len(piece) > BUFFER_BYTES and not pipe.is_ended:
            await line.room.park()
        if pipe.is_ended:
            line.room.unpark()
            raise LinkLost("the stream broke while a message was sent")
        self._add(line, pipe, piece)

    def put_last(self, pipe):
        """An empty piece ends the bytes of a stream."""
        self._add(self._lines.setdefault(pipe.to.peer_id, _Line()), pipe, b"")

    def wake(self, peer):
        """A stream to ``peer`` has ended."""
        if peer in self._lines:
            self._lines[peer].room.unpark_all()

    def _add(self, line, pipe, piece):
        line.buffered += len(piece)
        line.pieces.append((pipe, piece))
        if not line.is_busy:
            line.is_busy = True
            self._turn.append(line)
        if not self._is_sending:
            self._send()

    def _send(self):
        self._is_sending = bool(self._turn)
        if not self._turn:
            return
        line = self._turn.popleft()
        pipe, piece = line.pieces.popleft()
        took_s = len(piece) / self.rates.up if pipe.is_link_up else 0.0
        self.network.at(trio.current_time() + took_s, lambda: self._sent(line, pipe, piece))

    def _sent(self, line, pipe, piece):
        line.buffered -= len(piece)
        line.is_busy = bool(line.pieces)
        if line.is_busy:
            self._turn.append(line)
        line.room.unpark()
        if pipe.is_link_up:
            self.sent += len(piece)
            pipe.depart(piece)
        self._send()


class _Line:
    """What waits for one peer."""

    def __init__(self):
        self.buffered = 0
        self.pieces = deque()
        self.is_busy = False
        """It has its turn now, or waits for it."""
        self.room = trio.lowlevel.ParkingLot()


class ShapedPipe:
    """Bytes in one direction of one stream."""

    def __init__(self, source, to):
        self.source = source
        self.to = to
        self.is_ended = False
        self._is_closed = False
        self._has_all = False
        self._credit = limits.STREAM_WINDOW_BYTES
        self._carried = 0
        self._buffer = bytearray()
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def is_link_up(self):
        return self.to.peer_id in self.source.links()

    async def write(self, data):
        await trio.lowlevel.checkpoint()
        rest = memoryview(data)
        while rest:
            if self.is_ended or self._is_closed:
                raise LinkLost("the stream broke while a message was sent")
            if self._credit <= 0:
                await self._changed.park()
                continue
            piece = bytes(rest[: min(PIECE_BYTES, self._credit)])
            self._credit -= len(piece)
            rest = rest[len(piece) :]
            await self.source.uplink.put(self, piece)

    def depart(self, piece):
        """``piece`` has left the uplink."""
        network, to = self.to._network, self.to
        start = max(trio.current_time() + network.latency_s, to.down_free_at)
        to.down_free_at = start + len(piece) / network.rates[to.peer_id].down
        network.at(to.down_free_at, lambda: self._arrive(piece))

    def _arrive(self, piece):
        self._has_all |= not piece
        self.to.received += len(piece)
        self._buffer += piece
        self._changed.unpark_all()

    def _widen(self, num_bytes):
        """A few streams of a connection get a larger window once they have carried a whole one."""
        before, self._carried = self._carried, self._carried + num_bytes
        wide = self.source.wide.setdefault(self.to.peer_id, set())
        if before < limits.STREAM_WINDOW_BYTES <= self._carried:
            wide -= {pipe for pipe in wide if pipe.is_ended}
            if len(wide) < limits.MAX_BULK_STREAMS:
                wide.add(self)
                self._credit += limits.BULK_WINDOW_BYTES - limits.STREAM_WINDOW_BYTES

    def _grant(self, num_bytes):
        self._credit += num_bytes
        self._changed.unpark_all()

    async def read(self, n):
        await trio.lowlevel.checkpoint()
        taken = bytearray()
        network = self.to._network
        while len(taken) < n:
            if self._buffer:
                piece = bytes(self._buffer[: n - len(taken)])
                del self._buffer[: len(piece)]
                taken += piece
                self._widen(len(piece))
                network.at(trio.current_time() + network.latency_s, partial(self._grant, len(piece)))
            elif self._has_all or self.is_ended:
                raise LinkLost("the stream ended")
            else:
                await self._changed.park()
        return bytes(taken)

    def close(self):
        if not self._is_closed:
            self._is_closed = True
            self.source.uplink.put_last(self)

    def end(self):
        self.is_ended = True
        self._changed.unpark_all()
        self.source.uplink.wake(self.to.peer_id)
