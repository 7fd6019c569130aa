"""One identity of a flood: Noise and yamux by hand, so that it costs its own process little and keeps to no rule.

It writes what it is told, whole requests in one piece, and only counts what comes back. Invariant: whatever the other
side does, :meth:`FloodPeer.connected` ends or says why not; nothing is stored of an answer unless it is waited for.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from libp2p.abc import ISecureConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from rollmesh_peer.mesh.address import PeerAddress, parse_peer_address
from rollmesh_peer.mesh.libp2p_host.transport import Upgrader, dial_tcp
from rollmesh_peer.mesh.libp2p_host.yamux_frames import ACK, DATA, FIN, HEADER, PING, RST, SYN, WINDOW, frame
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost
from rollmesh_protocol.identity import Identity

MULTISTREAM = b"\x13/multistream/1.0.0\n"
_CODE = re.compile(rb"\xa4code[\xa0-\xbf]([a-z._]+)")
_CONNECT_S = 15.0


class Gone(Exception):
    """The learner let us go, or did not let us in."""


def proposal(protocol: str) -> bytes:
    """What opens a negotiated stream."""
    name = protocol.encode() + b"\n"
    return MULTISTREAM + bytes([len(name)]) + name


def framed(body: bytes) -> bytes:
    """A message as the mesh frames it."""
    return struct.pack(">I", len(body)) + body


class FloodPeer:
    """One key, and its connection while :meth:`connected`."""

    def __init__(self, address: str, counts: Counter[str]) -> None:
        self.identity = Identity(secrets.token_bytes(32))
        self.target: PeerAddress = parse_peer_address(address)
        self.counts = counts
        self.is_deaf = False
        """True to read nothing any more."""
        self.run = ""
        self.admission = b""
        self.root: bytes | None = None
        self.manifests: list[bytes] = []
        """Names of payloads that the learner serves; filled in by a hello."""
        self._conn: ISecureConn | None = None
        self._next = 1
        self._room: dict[int, int] = {}
        self._kept: dict[int, bytearray] = {}
        self._changed = trio.lowlevel.ParkingLot()
        self._lock = trio.StrictFIFOLock()

    @property
    def is_up(self) -> bool:
        return self._conn is not None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """A connection for the block; the block is cancelled when it is lost, and :class:`Gone` raised."""
        try:
            with trio.fail_after(_CONNECT_S):
                raw = await dial_tcp(self.target.endpoint)
                try:
                    conn = await self._upgrade(raw)
                except BaseException:
                    with trio.CancelScope(shield=True):
                        await raw.close()
                    raise
        except (LinkLost, trio.TooSlowError) as error:
            self.counts["not let in"] += 1
            raise Gone from error
        except Exception as error:
            self.counts["not let in"] += 1
            raise Gone from error
        self._conn, self._next = conn, 1
        self._room.clear()
        self._kept.clear()
        is_lost = False
        try:
            async with trio.open_nursery() as nursery:

                async def read() -> None:
                    nonlocal is_lost
                    with contextlib.suppress(Exception):
                        await self._read(conn)
                    is_lost = True
                    nursery.cancel_scope.cancel()

                nursery.start_soon(read)
                yield
                nursery.cancel_scope.cancel()
        except* Gone:
            is_lost = True
        finally:
            self._conn = None
            self._changed.unpark_all()
            with trio.CancelScope(shield=True), contextlib.suppress(Exception):
                await conn.close()
        if is_lost:
            self.counts["cut off"] += 1
            raise Gone

    async def write(self, frames: bytes) -> None:
        """Any bytes inside the secured channel."""
        if self._conn is None:
            raise Gone
        async with self._lock:
            for start in range(0, len(frames), limits.WRITE_PIECE_BYTES):
                try:
                    await self._conn.write(frames[start : start + limits.WRITE_PIECE_BYTES])
                except Exception as error:
                    raise Gone from error

    def number(self) -> int:
        """The number of a stream of ours that was not used yet."""
        self._next += 2
        return self._next - 2

    async def fire(self, protocol: str, body: bytes | None, *, flags: int = FIN) -> int:
        """A whole request in one write: open, negotiate, send, close. Waits for nothing."""
        number = self.number()
        payload = proposal(protocol) + (framed(body) if body is not None else b"")
        self._room[number] = limits.STREAM_WINDOW_BYTES - len(payload)
        self.counts["sent"] += 1
        await self.write(frame(WINDOW, SYN, number, 0) + frame(DATA, flags, number, len(payload)) + payload)
        return number

    async def pour(self, number: int, body: bytes) -> None:
        """Write as much of ``body`` as the learner grants room for, until it grants no more."""
        sent = 0
        while sent < len(body):
            while self._room.get(number, -1) == 0:
                await self._changed.park()
            room = self._room.get(number, -1)
            if room < 0:
                return
            piece = body[sent : sent + min(room, 60_000)]
            self._room[number] -= len(piece)
            sent += len(piece)
            await self.write(frame(DATA, 0, number, len(piece)) + piece)

    async def ask(self, protocol: str, body: bytes) -> bytes:
        """A request whose answer is waited for: the payload behind the negotiation, its frame's length and kind."""
        number = self.number()
        kept = self._kept[number] = bytearray()
        payload = proposal(protocol) + framed(body)
        await self.write(frame(WINDOW, SYN, number, 0) + frame(DATA, 0, number, len(payload)) + payload)
        start = len(proposal(protocol)) + 4
        with trio.fail_after(_CONNECT_S):
            while len(kept) < start or len(kept) - start < int.from_bytes(kept[start - 4 : start], "big"):
                if self._conn is None:
                    raise Gone
                await self._changed.park()
        del self._kept[number]
        await self.write(frame(WINDOW, RST, number, 0))
        return bytes(kept[start:])

    async def _upgrade(self, raw) -> ISecureConn:
        upgrader = Upgrader(create_new_key_pair(self.identity.seed), is_welcome=_everybody, report=_nothing)
        conn = await upgrader.upgrade_security(raw, True, ID.from_base58(self.target.peer))
        await upgrader.muxer_multistream.select_transport(conn)
        raw.lift_budget()
        return conn

    async def _read(self, conn: ISecureConn) -> None:
        while True:
            while self.is_deaf:
                await trio.sleep(0.1)
            _, kind, flags, number, length = HEADER.unpack(await conn.read(HEADER.size))
            if kind == DATA:
                payload = await conn.read(length) if length else b""
                self._on_data(number, payload)
            elif kind == WINDOW:
                if number in self._room:
                    self._room[number] += length
            elif kind == PING and flags & SYN:
                await self.write(frame(PING, ACK, 0, length))
            if flags & RST:
                self.counts["resets"] += 1
            if flags & (FIN | RST):
                self._room.pop(number, None)
            self._changed.unpark_all()

    def _on_data(self, number: int, payload: bytes) -> None:
        if number in self._kept:
            self._kept[number] += payload
        elif len(payload) > 4 and payload[4] == 1 and (code := _CODE.search(payload)):
            self.counts[code[1].decode()] += 1
        elif len(payload) >= 4 and payload[:1] == b"\0" and (len(payload) == 4 or payload[4] == 0):
            self.counts["answered"] += 1


def _everybody(_peer: str) -> bool:
    return True


def _nothing(_peer: str, _what: str, *, weight: float = 1.0) -> None:
    del weight
