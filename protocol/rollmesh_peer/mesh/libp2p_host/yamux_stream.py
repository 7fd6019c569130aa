"""One yamux stream: a buffer with a window in one direction, room in the other, and two ends that close on their own.

Invariant: what is unread never exceeds the window that we granted; the connection checks that before it hands data in.
Writing waits for room without polling, and gives up after ``limits.WRITE_STALL_S``.
"""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import Final, Self

import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset

from rollmesh_peer.mesh.libp2p_host.yamux_frames import DATA, FIN, RST, WINDOW, frame
from rollmesh_protocol import limits

_MAX_ROOM: Final = 1 << 30
"""Bytes: the other side may grant no more than this."""


class StreamOwner(IMuxedConn):
    """What a stream asks of its connection."""

    @abstractmethod
    async def send(self, frames: bytes) -> None:
        """Write whole frames after those that wait already."""

    @abstractmethod
    def post(self, frames: bytes) -> None:
        """Queue a control frame; never blocks."""

    @abstractmethod
    def give_back(self, num_bytes: int) -> None:
        """So many bytes were read."""

    @abstractmethod
    def take_bulk_slot(self) -> bool:
        """True when one more stream may have the larger window."""

    @abstractmethod
    def forget(self, stream: YamuxStream) -> None:
        """The stream is over: nothing of it counts any longer."""

    @abstractmethod
    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port of the other side."""


class YamuxStream(IMuxedStream):
    """One stream. One task may read while another writes."""

    def __init__(self, connection: StreamOwner, number: int) -> None:
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
            await self._connection.send(frame(DATA, 0, self.number, len(piece)) + piece)
            rest = rest[len(piece) :]
        self._check_writable()

    async def close(self) -> None:
        """Half close: the other side reads to the end, and we may go on reading. Never blocks."""
        if not self._local_closed and not self._broken:
            self._local_closed = True
            self._connection.post(frame(WINDOW, FIN, self.number, 0))
            self._changed.unpark_all()
            if self._remote_closed:
                self._connection.forget(self)

    async def reset(self) -> None:
        """Give up both directions and drop what was not read. Never blocks."""
        if not self._broken and not (self._local_closed and self._remote_closed):
            self._connection.post(frame(WINDOW, RST, self.number, 0))
        self.end()
        self._connection.forget(self)
        self._buffer.clear()

    def set_deadline(self, ttl: int) -> None:
        """Not offered: deadlines are cancel scopes."""
        raise NotImplementedError

    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port of the other side."""
        return self._connection.get_remote_address()

    async def __aenter__(self) -> Self:
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
        with trio.move_on_after(limits.WRITE_STALL_S) as deadline:
            while self._room <= 0:
                await self._changed.park()
                self._check_writable()
        if deadline.cancelled_caught:
            await self.reset()
            raise MuxedStreamReset(f"the reader granted no room for {limits.WRITE_STALL_S:.0f} s")
        return self._room

    def _grant_more(self, consumed: int) -> None:
        """Tell the other side that it may send on, in steps of a quarter of the window: it need not run dry."""
        self._consumed += consumed
        if self._consumed < self._window // 4 or self._remote_closed or self._broken:
            return
        grant, self._consumed = self._consumed, 0
        if not self.is_bulk and self._connection.take_bulk_slot():
            grant += limits.BULK_WINDOW_BYTES - self._window
            self._window = limits.BULK_WINDOW_BYTES
        self._granted += grant
        self._connection.post(frame(WINDOW, 0, self.number, grant))
