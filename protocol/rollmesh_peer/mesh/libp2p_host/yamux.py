"""Yamux: many streams over one secured connection, with every bound of the specification held against the other side.

Written from the yamux specification (v0) because the library's own muxer does not enforce its receive window, tears the
connection when a write is cancelled, cuts a writer after 5 s without room, and never notices a silent peer.

Invariants:
- a frame is written whole or not at all, whatever is cancelled;
- unread bytes of a connection stay below ``limits.MAX_BUFFERED_BYTES``, and of a stream below the window we granted;
- the reading loop never waits for a write, so two peers cannot wait for each other;
- a connection that is silent for ``limits.SILENT_S`` although probed is closed, even while a write is stuck.
It is not a transport and does no negotiation.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from types import TracebackType
from typing import Final, Protocol

import trio
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)
from multiaddr import Multiaddr

from rollmesh_peer.mesh.address import Endpoint
from rollmesh_protocol import limits
from rollmesh_protocol.identity import short

log = logging.getLogger("rollmesh.mesh.yamux")

PROTOCOL: Final = "/yamux/1.0.0"

_HEADER: Final = struct.Struct("!BBHII")
"""Version, kind, flags, stream, length (of data; otherwise a window delta, a ping's echo or a goodbye's code)."""
_DATA, _WINDOW, _PING, _GO_AWAY = 0, 1, 2, 3
_SYN, _ACK, _FIN, _RST = 1, 2, 4, 8

_MAX_INBOUND: Final = 2 * limits.MAX_STREAMS_PER_PEER
"""Streams opened by the other side; above the router's own bound, so that its refusals can be sent."""
_MAX_CONTROL: Final = 4 * 1024
"""Control frames waiting to be written; only a peer that floods us without reading gets there."""
_MAX_ROOM: Final = 1 << 30
"""A peer may grant us no more than this, in bytes."""


class Report(Protocol):
    """Told of every breach of a protocol: the peer id, what it did, and how much of an offence that is."""

    def __call__(self, peer: str, what: str, *, weight: float = 1.0) -> None: ...


class _BreachError(Exception):
    """The other side broke the yamux protocol: the connection ends."""


class YamuxStream(IMuxedStream):
    """One stream. One task may read while another writes."""

    def __init__(self, connection: YamuxConnection, number: int) -> None:
        self.muxed_conn: IMuxedConn = connection
        self.number: Final = number
        self._connection = connection
        self._buffer = bytearray()
        self._changed = trio.lowlevel.ParkingLot()
        self._room = limits.STREAM_WINDOW_BYTES
        self._window = limits.STREAM_WINDOW_BYTES
        self._granted = limits.STREAM_WINDOW_BYTES
        self._consumed = 0
        self._local_closed = False
        self._remote_closed = False
        self._broken = False
        self._forgotten = False

    # --- the library's interface -------------------------------------------------------------------------------------
    async def read(self, n: int | None = None) -> bytes:
        """Between 1 and ``n`` bytes; what arrived before a reset is still handed out."""
        await trio.lowlevel.checkpoint()
        while not self._buffer:
            if self._broken:
                raise MuxedStreamReset("the stream was reset")
            if self._remote_closed:
                raise MuxedStreamEOF("the other side closed the stream")
            await self._changed.park()
        piece = bytes(self._buffer[:n]) if n is not None and n >= 0 else bytes(self._buffer)
        del self._buffer[: len(piece)]
        if not self._forgotten:
            self._connection.give_back(len(piece))
            self._grant_more(len(piece))
        return piece

    async def write(self, data: bytes) -> None:
        """Send all of ``data``. When cancelled, a prefix was sent: only this stream is spoilt."""
        rest = memoryview(data)
        while rest:
            room = await self._wait_for_room()
            piece = rest[: min(room, limits.WRITE_PIECE_BYTES)]
            self._room -= len(piece)
            await self._connection.send(_frame(_DATA, 0, self.number, len(piece)) + piece)
            rest = rest[len(piece) :]
        self._check_writable()

    async def close(self) -> None:
        """Half close: the other side reads to the end, and we may go on reading. Never blocks."""
        if not self._local_closed and not self._broken:
            self._local_closed = True
            self._connection.post(_frame(_WINDOW, _FIN, self.number, 0))
            self._changed.unpark_all()
            if self._remote_closed:
                self._connection.forget(self)

    async def reset(self) -> None:
        """Give up both directions and drop what was not read. Never blocks."""
        if not self._broken and not (self._local_closed and self._remote_closed):
            self._connection.post(_frame(_WINDOW, _RST, self.number, 0))
        self.end()
        self._connection.forget(self)
        self._buffer.clear()

    def set_deadline(self, ttl: int) -> None:
        """Not offered: deadlines are cancel scopes."""
        raise NotImplementedError

    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port of the other side."""
        return self._connection.get_remote_address()

    async def __aenter__(self) -> YamuxStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- called by the connection's reading loop ---------------------------------------------------------------------
    @property
    def unread(self) -> int:
        """Bytes that arrived and were not read."""
        return len(self._buffer)

    @property
    def window_left(self) -> int:
        """Bytes that the other side may still send before we grant more."""
        return self._granted

    @property
    def is_bulk(self) -> bool:
        """True when the stream has the larger window."""
        return self._window > limits.STREAM_WINDOW_BYTES

    def arrived(self, piece: bytes) -> None:
        """Take in a piece of a data frame."""
        self._granted -= len(piece)
        self._buffer += piece
        self._changed.unpark_all()

    def add_room(self, delta: int) -> None:
        """The other side reads on: so many more bytes may be sent."""
        self._room = min(self._room + delta, _MAX_ROOM)
        self._changed.unpark_all()

    def remote_closed(self) -> bool:
        """The other side writes no more. True when nobody does any longer."""
        self._remote_closed = True
        self._changed.unpark_all()
        return self._local_closed

    def end(self) -> None:
        """Nothing more is read from or written to this stream; whoever waits is woken."""
        self._broken = True
        self._changed.unpark_all()

    def mark_forgotten(self) -> bool:
        """True the first time: the connection stops counting this stream."""
        first, self._forgotten = not self._forgotten, True
        return first

    # --- inside ------------------------------------------------------------------------------------------------------
    def _check_writable(self) -> None:
        if self._broken:
            raise MuxedStreamReset("the stream was reset")
        if self._local_closed:
            raise MuxedStreamClosed("the stream is closed for writing")

    async def _wait_for_room(self) -> int:
        self._check_writable()
        with trio.move_on_after(limits.WRITE_STALL_S):
            while self._room <= 0:
                await self._changed.park()
                self._check_writable()
            return self._room
        await self.reset()
        raise MuxedStreamReset(f"the reader granted no room for {limits.WRITE_STALL_S:.0f} s")

    def _grant_more(self, consumed: int) -> None:
        """Tell the other side that it may send on, in steps of half a window."""
        self._consumed += consumed
        if self._consumed < self._window // 2 or self._remote_closed or self._broken:
            return
        grant, self._consumed = self._consumed, 0
        if not self.is_bulk and self._connection.take_bulk_slot():
            grant += limits.BULK_WINDOW_BYTES - self._window
            self._window = limits.BULK_WINDOW_BYTES
        self._granted += grant
        self._connection.post(_frame(_WINDOW, 0, self.number, grant))


class YamuxConnection(IMuxedConn):
    """All streams between us and one peer over one connection."""

    def __init__(
        self, conn: ISecureConn, peer_id: ID, *, remote: Endpoint | None = None, report: Report | None = None
    ) -> None:
        self.peer_id = peer_id
        self.remote: Final = remote
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self._peer: Final = str(peer_id)
        self._secured = conn
        self._report = report
        self._streams: dict[int, YamuxStream] = {}
        self._next_number = 1 if conn.is_initiator else 2
        self._inbound = 0
        self._bulk = 0
        self._unread = 0
        self._control: deque[bytes] = deque()
        self._control_posted = trio.lowlevel.ParkingLot()
        self._write_lock = trio.StrictFIFOLock()
        self._accept_send, self._accept_receive = trio.open_memory_channel[YamuxStream](_MAX_INBOUND)
        self._ended = False
        self._heard = trio.current_time()
        self._scope = trio.CancelScope()

    # --- the library's interface -------------------------------------------------------------------------------------
    @property
    def is_initiator(self) -> bool:
        """True when we dialled."""
        return self._secured.is_initiator

    @property
    def is_established(self) -> bool:
        """True while streams can be opened."""
        return self.event_started.is_set() and not self._ended

    @property
    def is_closed(self) -> bool:
        """True when no stream can be opened any more."""
        return self._ended

    def get_transport_addresses(self) -> list[Multiaddr]:
        """The other side's address."""
        return [Multiaddr(str(self.remote))] if self.remote else []

    def get_connection_type(self) -> ConnectionType:
        """Always direct: there are no relays yet."""
        return ConnectionType.DIRECT

    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port of the other side."""
        return (self.remote.host, self.remote.port) if self.remote else None

    async def start(self) -> None:
        """Run the connection until it ends. Never raises but to cancel."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send_control)
                    nursery.start_soon(self._watch)
                    self.event_started.set()
                    await self._read_frames()
        except* _BreachError as breach:
            what = str(breach.exceptions[0])
            log.info("closing the connection to %s: %s", short(self._peer), what)
            if self._report is not None:
                self._report(self._peer, what)
        except* Exception as error:
            log.debug("the connection to %s ended: %r", short(self._peer), error.exceptions[0])
        finally:
            with trio.CancelScope(shield=True):
                await self._finish()

    async def close(self) -> None:
        """Say goodbye if that can be done quickly, and end every stream."""
        if not self._ended:
            with trio.move_on_after(limits.CLOSE_S, shield=True):
                await self._say_goodbye()
        with trio.CancelScope(shield=True):
            await self._finish()

    async def open_stream(self) -> YamuxStream:
        """A new stream to the other side."""
        if self._ended:
            raise MuxedConnUnavailable("the connection is closed")
        stream = YamuxStream(self, self._next_number)
        self._next_number += 2
        self._streams[stream.number] = stream
        try:
            await self.send(_frame(_WINDOW, _SYN, stream.number, 0))
        except BaseException:
            await stream.reset()
            raise
        return stream

    async def accept_stream(self) -> YamuxStream:
        """The next stream that the other side opened."""
        try:
            return await self._accept_receive.receive()
        except trio.EndOfChannel:
            raise MuxedConnUnavailable("the connection is closed") from None

    # --- called by the streams ---------------------------------------------------------------------------------------
    async def send(self, frames: bytes) -> None:
        """Write whole frames after those that wait already. Cancelled only before the first byte, or after the last.

        Raises:
            MuxedStreamReset: the connection is gone.
        """
        async with self._write_lock:
            if self._ended:
                raise MuxedStreamReset("the connection is closed")
            try:
                with trio.CancelScope(shield=True):
                    await self._secured.write(frames)
            except Exception as error:
                self._abort()
                raise MuxedStreamReset("the connection broke") from error
        if self._ended:
            raise MuxedStreamReset("the connection is closed")
        await trio.lowlevel.checkpoint_if_cancelled()

    def post(self, frame: bytes) -> None:
        """Queue a control frame; it is written by the connection's own task."""
        if self._ended:
            return
        self._control.append(frame)
        self._control_posted.unpark_all()
        if len(self._control) > _MAX_CONTROL:
            log.info("closing the connection to %s: it asks and does not read the answers", short(self._peer))
            self._abort()

    def give_back(self, num_bytes: int) -> None:
        """So many bytes were read."""
        self._unread -= num_bytes

    def take_bulk_slot(self) -> bool:
        """True when one more stream may have the larger window."""
        if self._bulk >= limits.MAX_BULK_STREAMS:
            return False
        self._bulk += 1
        return True

    def forget(self, stream: YamuxStream) -> None:
        """The stream is over: nothing of it counts any longer."""
        if not stream.mark_forgotten():
            return
        self._streams.pop(stream.number, None)
        self._unread -= stream.unread
        self._bulk -= stream.is_bulk
        self._inbound -= self._is_remote(stream.number)

    # --- reading -----------------------------------------------------------------------------------------------------
    async def _read_frames(self) -> None:
        while True:
            version, kind, flags, number, length = _HEADER.unpack(await self._read(_HEADER.size))
            if version != 0:
                raise _BreachError(f"yamux version {version}")
            if kind == _DATA:
                await self._on_data(flags, number, length)
            elif kind == _WINDOW:
                stream = self._stream(flags, number)
                if stream is not None and length:
                    stream.add_room(length)
                self._on_flags(stream, flags)
            elif kind == _PING:
                if flags & _SYN:
                    self.post(_frame(_PING, _ACK, 0, length))
            elif kind == _GO_AWAY:
                self._scope.cancel()
            else:
                raise _BreachError(f"a frame of unknown kind {kind}")

    async def _on_data(self, flags: int, number: int, length: int) -> None:
        stream = self._stream(flags, number)
        if stream is None and length > limits.BULK_WINDOW_BYTES:
            raise _BreachError(f"a frame of {length} bytes for no stream")
        if stream is not None and length > stream.window_left:
            raise _BreachError(f"{length} bytes where {stream.window_left} were granted")
        if stream is not None and self._unread + length > limits.MAX_BUFFERED_BYTES:
            raise _BreachError(f"more than {limits.MAX_BUFFERED_BYTES} unread bytes")
        rest = length
        while rest:
            piece = await self._read(min(rest, limits.STREAM_WINDOW_BYTES // 4))
            rest -= len(piece)
            if stream is not None and self._streams.get(number) is stream:
                self._unread += len(piece)
                stream.arrived(piece)
        self._on_flags(stream, flags)

    def _stream(self, flags: int, number: int) -> YamuxStream | None:
        """The stream that a frame belongs to, new if the frame opens one; None for one that is over or refused."""
        stream = self._streams.get(number)
        if not flags & _SYN:
            return stream
        if stream is not None or not self._is_remote(number):
            raise _BreachError(f"a stream opened under the wrong number {number}")
        if self._inbound >= _MAX_INBOUND:
            if self._report is not None:
                self._report(self._peer, f"more than {_MAX_INBOUND} streams at a time")
            self.post(_frame(_WINDOW, _RST, number, 0))
            return None
        stream = YamuxStream(self, number)
        self._streams[number] = stream
        self._inbound += 1
        self.post(_frame(_WINDOW, _ACK, number, 0))
        try:
            self._accept_send.send_nowait(stream)
        except trio.WouldBlock:
            raise _BreachError("streams opened faster than they are taken") from None
        return stream

    def _on_flags(self, stream: YamuxStream | None, flags: int) -> None:
        if stream is None:
            return
        if flags & _FIN and stream.remote_closed():
            self.forget(stream)
        if flags & _RST:
            stream.end()
            self.forget(stream)

    async def _read(self, n: int) -> bytes:
        piece = await self._secured.read(n)
        if len(piece) != n:
            raise MuxedStreamError("the connection ended within a frame")
        self._heard = trio.current_time()
        return piece

    def _is_remote(self, number: int) -> bool:
        return number > 0 and number % 2 != self._next_number % 2

    # --- writing and watching ----------------------------------------------------------------------------------------
    async def _send_control(self) -> None:
        while True:
            while not self._control:
                await self._control_posted.park()
            frames = bytearray()
            while self._control and len(frames) < limits.WRITE_PIECE_BYTES:
                frames += self._control.popleft()
            await self.send(bytes(frames))

    async def _watch(self) -> None:
        """Probe the other side when it is silent; give the connection up when it stays so."""
        while True:
            slept_from = trio.current_time()
            await trio.sleep(limits.PROBE_S)
            now = trio.current_time()
            if now - slept_from > 2 * limits.PROBE_S:
                self._heard = now  # This machine slept, not the other one.
                continue
            silent_s = now - self._heard
            if silent_s >= limits.SILENT_S:
                log.info("closing the connection to %s: silent for %.1f s", short(self._peer), silent_s)
                self._abort()
            elif silent_s >= limits.PROBE_S:
                self.post(_frame(_PING, _SYN, 0, 0))

    def _abort(self) -> None:
        self._mark_ended()
        self._scope.cancel()

    def _mark_ended(self) -> None:
        self._ended = True
        for stream in list(self._streams.values()):
            stream.end()
            self.forget(stream)
        self._control.clear()
        self._accept_send.close()

    async def _say_goodbye(self) -> None:
        async with self._write_lock:
            await self._secured.write(b"".join(self._control) + _frame(_GO_AWAY, 0, 0, 0))

    async def _finish(self) -> None:
        self._abort()
        try:
            await self._secured.close()
        except Exception as error:  # noqa: BLE001 - whatever a dying socket says
            log.debug("closing the connection to %s: %r", short(self._peer), error)
        self.event_closed.set()


def _frame(kind: int, flags: int, number: int, length: int) -> bytes:
    return _HEADER.pack(0, kind, flags, number, length)
