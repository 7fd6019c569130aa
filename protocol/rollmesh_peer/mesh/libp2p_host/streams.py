"""The stream of the seam over one of the library's streams: frames with a bound, and one kind of error."""

from __future__ import annotations

from collections import Counter
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.stream.net_stream import NetStream

from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused

_READ_BYTES: Final = 65_536
_DRAIN_BYTES: Final = limits.BULK_WINDOW_BYTES
"""What may still be on its way when we have said no: one window."""


async def give_up(stream: INetStream) -> None:
    """Reset ``stream`` and take it off the library's books, even when the task is being cancelled."""
    with trio.CancelScope(shield=True):
        await stream.reset()


class ReceivingBudget:
    """Bytes of frames that are not complete yet, by peer and in all: what slow or many senders may make us hold.

    A peer of which little is arriving is never refused, or others could hold back what they send and shut it out.
    """

    def __init__(self) -> None:
        self._by_peer: Counter[str] = Counter()
        self._total = 0

    def take(self, peer: str, num_bytes: int) -> None:
        """Count bytes that arrived.

        Raises:
            Refused: ``request.busy`` when that is too much; then they are not counted.
        """
        if self._by_peer[peer] + num_bytes > limits.RECEIVING_BYTES_PER_PEER:
            raise Refused("request.busy")
        is_large = self._by_peer[peer] + num_bytes > limits.RECEIVING_BYTES_FREE
        if is_large and self._total + num_bytes > limits.RECEIVING_BYTES:
            raise Refused("request.busy", "too many large messages are arriving at once; try again in a moment")
        self._by_peer[peer] += num_bytes
        self._total += num_bytes

    def give_back(self, peer: str, num_bytes: int) -> None:
        """The frame is complete, or given up."""
        self._total -= num_bytes
        self._by_peer[peer] -= num_bytes
        if self._by_peer[peer] <= 0:
            del self._by_peer[peer]


class Libp2pStream:
    """A :class:`~rollmesh_peer.mesh.seam.MeshStream`. The budget holds for streams that others opened: what we asked
    for ourselves we can bound ourselves."""

    def __init__(self, stream: INetStream, *, budget: ReceivingBudget | None = None) -> None:
        self._stream = stream
        self._budget = budget
        self.peer: Final = str(stream.muxed_conn.peer_id)

    async def send(self, frame: bytes) -> None:
        """See the seam."""
        header = len(frame).to_bytes(limits.FRAME_HEADER_BYTES, "big")
        try:
            if len(frame) < limits.WRITE_PIECE_BYTES:
                await self._stream.write(header + frame)
            else:
                await self._stream.write(header)
                await self._stream.write(frame)
        except BaseLibp2pError as error:
            raise LinkLost(f"the stream to {self.peer} broke while a message was sent") from error

    async def receive(self, limit: int) -> bytes:
        """See the seam."""
        length = int.from_bytes(await self._read_exactly(limits.FRAME_HEADER_BYTES), "big")
        if length > limit:
            raise Refused("request.too_large", f"a message of {length} bytes, where {limit} are allowed")
        return await self._read_exactly(length)

    async def close(self) -> None:
        """See the seam."""
        if isinstance(self._stream, NetStream):
            try:
                with trio.CancelScope(shield=True):
                    await self._stream.close_write()
            except BaseLibp2pError:
                await self.reset()

    async def reset(self) -> None:
        """See the seam."""
        await give_up(self._stream)

    async def finish(self) -> None:
        """Close our side, let the other side end its own within bounds, and then give the stream up.

        Giving it up at once would lose what we wrote last (a refusal) if the other side is still writing.
        """
        await self.close()
        drained = 0
        with trio.move_on_after(limits.LINGER_S):
            try:
                while drained < _DRAIN_BYTES:
                    drained += len(await self._stream.read(_READ_BYTES))
            except BaseLibp2pError:
                pass
        await self.reset()

    async def _read_exactly(self, n: int) -> bytes:
        """The library's own loop gives up after 100 pieces."""
        received = bytearray()
        try:
            while len(received) < n:
                piece = await self._stream.read(min(n - len(received), _READ_BYTES))
                if self._budget:
                    self._budget.take(self.peer, len(piece))
                received += piece
        except BaseLibp2pError as error:
            raise LinkLost(f"the stream from {self.peer} ended") from error
        finally:
            if self._budget:
                self._budget.give_back(self.peer, len(received))
        return bytes(received)
