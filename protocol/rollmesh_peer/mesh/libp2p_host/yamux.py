"""Yamux: many streams over one secured connection, with every bound of the specification held against the other side.

Written from the yamux specification (v0) because the library's own muxer does not enforce its receive window, tears the
connection when a write is cancelled, cuts a writer after 5 s without room, and never notices a silent peer.

Invariants:
- a frame is written whole or not at all, whatever is cancelled;
- unread bytes of a connection stay below ``limits.MAX_BUFFERED_BYTES``, and of a stream below the window we granted;
- the reading loop never waits for a write, so two peers cannot wait for each other;
- a stream that is opened waits in front of the host's door, and is made known to nobody before it is let in;
- frames that carry little, and the bytes of requests, are read at a bounded pace: beyond it the other side waits;
- a connection that is silent for ``limits.SILENT_S`` although probed is closed, even while a write is stuck.
It is not a transport and does no negotiation.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Final, Protocol

import trio
from libp2p.abc import ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamError,
    MuxedStreamReset,
)
from multiaddr import Multiaddr

from rollmesh_peer.mesh.address import Endpoint
from rollmesh_peer.mesh.doorway import Doorway, Visitor
from rollmesh_peer.mesh.libp2p_host.yamux_frames import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    PING,
    RST,
    SYN,
    VERSION,
    WINDOW,
    frame,
)
from rollmesh_peer.mesh.libp2p_host.yamux_stream import StreamOwner, YamuxStream
from rollmesh_peer.mesh.rates import TokenBucket
from rollmesh_protocol import limits
from rollmesh_protocol.identity import short

log = logging.getLogger("rollmesh.mesh.yamux")

_MAX_INBOUND: Final = 2 * limits.MAX_STREAMS_PER_PEER
"""Streams opened by the other side; above the router's own bound, so that its refusals can be sent."""
_MAX_CONTROL: Final = 4 * 1024
"""Control frames waiting to be written; only a peer that floods us without reading gets there."""
_LARGE_BYTES: Final = 8 * limits.KIB
"""A frame that carries this much pays for itself: it is bounded by windows, and as many bytes that we send earn one."""
_FRAMES_IN_A_ROW: Final = 8
"""Frames of one connection that are read before others have their turn."""
_PAUSE_S: Final = 0.1
"""Who has sent more small frames than we read waits for so long."""
_FLOOD_WEIGHT: Final = 0.25
"""Of an offence: one stream opened too fast, or one such pause."""


class Report(Protocol):
    """Told of every breach of a protocol: the peer id, what it did, and how much of an offence that is."""

    def __call__(self, peer: str, what: str, *, weight: float = 1.0) -> None: ...


class _BreachError(Exception):
    """The other side broke the yamux protocol: the connection ends."""


class YamuxConnection(StreamOwner):
    """All streams between us and one peer over one connection."""

    def __init__(
        self,
        conn: ISecureConn,
        peer_id: ID,
        *,
        remote: Endpoint | None = None,
        report: Report | None = None,
        doorway: Doorway | None = None,
    ) -> None:
        self.peer_id = peer_id
        self.remote: Final = remote
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self._peer: Final = str(peer_id)
        self._secured = conn
        self._report = report
        self._doorway = doorway
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
        self._heard = now = trio.current_time()
        self._frames = TokenBucket(rate=limits.MAX_FRAMES_PER_S, burst=limits.FRAMES_BURST, now=now)
        self._openings = TokenBucket(rate=2 * limits.MAX_REQUESTS_PER_S, burst=2 * limits.REQUEST_BURST, now=now)
        """Twice what the router answers: beyond it not even a refusal is worth its cost."""
        self._requested = TokenBucket(rate=limits.REQUEST_BYTES_PER_S, burst=limits.REQUEST_BYTES_BURST, now=now)
        self._in_a_row = 0
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
        except* Exception as error:  # noqa: BLE001 - a broken connection is no news, whatever it says
            log.debug("the connection to %s ended: %r", short(self._peer), error.exceptions[0])
        finally:
            with trio.CancelScope(shield=True):
                await self._finish()

    async def close(self) -> None:
        """Say goodbye if that can be done quickly, and end every stream."""
        if not self._ended:
            with trio.CancelScope(deadline=trio.current_time() + limits.CLOSE_S, shield=True):
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
            await self.send(frame(WINDOW, SYN, stream.number, 0))
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
        self._frames.give(len(frames) / _LARGE_BYTES)
        await trio.lowlevel.checkpoint_if_cancelled()

    def post(self, frames: bytes) -> None:
        """Queue a control frame; it is written by the connection's own task."""
        if self._ended:
            return
        self._control.append(frames)
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
            version, kind, flags, number, length = HEADER.unpack(await self._read(HEADER.size))
            if version != VERSION:
                raise _BreachError(f"yamux version {version}")
            if kind == DATA:
                await self._on_data(flags, number, length)
            elif kind == WINDOW:
                stream = self._stream(flags, number)
                if stream is not None and length:
                    stream.add_room(length)
                self._on_flags(stream, flags)
            elif kind == PING:
                if flags & SYN:
                    self.post(frame(PING, ACK, 0, length))
            elif kind == GO_AWAY:
                self._scope.cancel()
            else:
                raise _BreachError(f"a frame of unknown kind {kind}")
            if kind != DATA or length < _LARGE_BYTES:
                await self._rest()

    async def _rest(self) -> None:
        """After a small frame: let others have their turn now and then, and hold a flood up."""
        self._in_a_row += 1
        if self._in_a_row >= _FRAMES_IN_A_ROW:
            self._in_a_row = 0
            await trio.lowlevel.checkpoint()
        while not self._frames.take(trio.current_time()):
            self._offend("frames sent faster than they can be looked at")
            await trio.sleep(_PAUSE_S)
            self._heard = trio.current_time()  # it may have said more than enough meanwhile, unread

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
        if self._is_remote(number):  # what we asked for ourselves may come as fast as it can
            while not self._requested.take(trio.current_time(), tokens=length):
                await trio.sleep(_PAUSE_S)
                self._heard = trio.current_time()

    def _stream(self, flags: int, number: int) -> YamuxStream | None:
        """The stream that a frame belongs to, new if the frame opens one; None for one that is over or refused."""
        stream = self._streams.get(number)
        if not flags & SYN:
            return stream
        if stream is not None or not self._is_remote(number):
            raise _BreachError(f"a stream opened under the wrong number {number}")
        if self._inbound >= _MAX_INBOUND or not self._openings.take(trio.current_time()):
            self._offend("streams opened faster than they can be looked at, or too many at a time")
            self.post(frame(WINDOW, RST, number, 0))
            return None
        stream = YamuxStream(self, number)
        self._streams[number] = stream
        self._inbound += 1
        if self._doorway is None:
            self._let_in(stream)
        else:
            self._doorway.knock(self._peer, self._visitor(stream))
        return stream

    def _visitor(self, stream: YamuxStream) -> Visitor:
        def turn_away() -> None:
            self.post(frame(WINDOW, RST, stream.number, 0))
            stream.end()
            self.forget(stream)

        return Visitor(
            since=trio.current_time(),
            is_wanted=lambda: self._streams.get(stream.number) is stream,
            come_in=lambda: self._let_in(stream),
            turn_away=turn_away,
        )

    def _let_in(self, stream: YamuxStream) -> None:
        try:
            self._accept_send.send_nowait(stream)
        except trio.WouldBlock:
            log.info("closing the connection to %s: it opens and resets streams without end", short(self._peer))
            self._abort()
        else:
            self.post(frame(WINDOW, ACK, stream.number, 0))

    def _offend(self, what: str) -> None:
        if self._report is not None:
            self._report(self._peer, what, weight=_FLOOD_WEIGHT)

    def _on_flags(self, stream: YamuxStream | None, flags: int) -> None:
        if stream is None:
            return
        if flags & FIN and stream.remote_closed():
            self.forget(stream)
        if flags & RST:
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
                self.post(frame(PING, SYN, 0, 0))

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
            await self._secured.write(b"".join(self._control) + frame(GO_AWAY, 0, 0, 0))

    async def _finish(self) -> None:
        self._abort()
        try:
            await self._secured.close()
        except Exception as error:  # noqa: BLE001 - whatever a dying socket says
            log.debug("closing the connection to %s: %r", short(self._peer), error)
        self.event_closed.set()
