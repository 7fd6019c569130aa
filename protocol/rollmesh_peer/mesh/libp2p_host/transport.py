"""TCP, Noise and yamux, and nothing else: how two processes become two peers that know each other's key.

Mends of the library: until its handshake is over, a stranger may send ``limits.HANDSHAKE_BYTES`` (the library's
negotiation reads whatever length it is told); only Noise and yamux are offered, so nothing can be negotiated down; a
peer whose key is not Ed25519 is turned away. No policy here: who may connect is decided in ``swarm``.

Where the system can do it, a daemon is woken once for most of a long message and not for every segment of it: at 1,500
bytes a segment that halves what a chunk costs in computing time.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable
from typing import Final

import trio
from libp2p.abc import IMuxedConn, IRawConnection, ISecureConn
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.exceptions import RawConnError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectError
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.transport.exceptions import MuxerUpgradeFailure, SecurityUpgradeFailure
from libp2p.transport.upgrader import TransportUpgrader

from rollmesh_peer.mesh.address import Endpoint, endpoint_of
from rollmesh_peer.mesh.doorway import Doorway
from rollmesh_peer.mesh.libp2p_host.yamux import Report, YamuxConnection
from rollmesh_peer.mesh.libp2p_host.yamux_frames import PROTOCOL as YAMUX
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused, UsageError
from rollmesh_protocol.identity import public_key_of

_READ_BYTES: Final = 65_536
_LONG_BYTES: Final = 8192
"""From here on it is worth a system call to be woken less often."""
_WAKE_BYTES: Final = 32_768
_LOW_WATER: Final = getattr(socket, "SO_RCVLOWAT", None)
_MAX_EXACT_BYTES: Final = 65_535 + 2
"""The largest Noise message and its length; whoever asks for more was told a length by the other side."""


class GuardedConnection(RawConnection):
    """A TCP connection that reads exactly what is asked for, and little before the handshake is over."""

    def __init__(self, stream: trio.SocketStream, *, initiator: bool) -> None:
        super().__init__(TrioTCPStream(stream), initiator)
        self.remote: Final = remote_endpoint(stream)
        self._socket = stream
        self._low_water = 1
        self._received = bytearray()
        self._budget: int | None = limits.HANDSHAKE_BYTES

    def lift_budget(self) -> None:
        """The handshake is over: the muxer's bounds hold from here on."""
        self._budget = None

    async def read(self, n: int | None = None) -> bytes:
        """Exactly ``n`` bytes; an error at the end of the connection."""
        if n is None or not 0 <= n <= _MAX_EXACT_BYTES:
            raise RawConnError(f"a read of {n} bytes")
        while len(self._received) < n:
            self._wake_at(n - len(self._received))
            piece = await super().read(_READ_BYTES)
            if not piece:
                raise ConnectionClosedError("the other side closed the connection", transport="tcp")
            if self._budget is not None:
                self._budget -= len(piece)
                if self._budget < 0:
                    raise RawConnError(f"more than {limits.HANDSHAKE_BYTES} bytes before the end of the handshake")
            self._received += piece
        piece = bytes(self._received[:n])
        del self._received[:n]
        return piece

    def _wake_at(self, missing: int) -> None:
        """Be woken when all that is missing is there, or a good part of it; the end of the connection wakes always."""
        wanted = min(missing, _WAKE_BYTES) if missing >= _LONG_BYTES else 1
        if _LOW_WATER is None or wanted == self._low_water:
            return
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _LOW_WATER, wanted)
        except (OSError, trio.ClosedResourceError):  # a system that only has the name, or a connection that is gone
            return
        self._low_water = wanted


class Upgrader(TransportUpgrader):
    """Turns a raw connection into a secured, then a muxed one."""

    def __init__(
        self, keys: KeyPair, *, is_welcome: Callable[[str], bool], report: Report, doorway: Doorway | None = None
    ) -> None:
        noise = NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)
        super().__init__({NOISE: noise}, {TProtocol(YAMUX): YamuxConnection})
        self._is_welcome = is_welcome
        self._report = report
        self._doorway = doorway
        self._raw: weakref.WeakKeyDictionary[ISecureConn, GuardedConnection] = weakref.WeakKeyDictionary()

    async def upgrade_security(
        self,
        raw_conn: IRawConnection,
        is_initiator: bool,  # noqa: FBT001 - the library's signature
        peer_id: ID | None = None,
    ) -> ISecureConn:
        """Noise. Fails for a peer that is not Ed25519, or not welcome."""
        secured = await super().upgrade_security(raw_conn, is_initiator, peer_id)
        peer = str(secured.get_remote_peer())
        try:
            public_key_of(peer)
        except Refused as error:
            raise SecurityUpgradeFailure("the other side's key is not Ed25519") from error
        if not self._is_welcome(peer):
            raise SecurityUpgradeFailure(f"{peer} is shut out for a while")
        if isinstance(raw_conn, GuardedConnection):
            self._raw[secured] = raw_conn
        return secured

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Our own yamux, after which the budget of the handshake no longer holds."""
        raw = self._raw.pop(conn, None)
        if raw is None:
            raise MuxerUpgradeFailure("a connection that was not secured here")
        try:
            await self.muxer_multistream.select_transport(conn)
        except MultiselectError as error:
            raise MuxerUpgradeFailure("the other side does not offer yamux") from error
        raw.lift_budget()
        return YamuxConnection(conn, peer_id, remote=raw.remote, report=self._report, doorway=self._doorway)


async def dial_tcp(endpoint: Endpoint) -> GuardedConnection:
    """A TCP connection to ``endpoint``; names are resolved by the system.

    Raises:
        LinkLost: nobody listens there, or the name is unknown.
    """
    host = endpoint.host
    try:
        if endpoint.kind in ("dns4", "dns6"):
            family = trio.socket.AF_INET if endpoint.kind == "dns4" else trio.socket.AF_INET6
            found = await trio.socket.getaddrinfo(host, endpoint.port, family=family, type=trio.socket.SOCK_STREAM)
            host = str(found[0][4][0])
        stream = await trio.open_tcp_stream(host, endpoint.port)
    except OSError as error:
        raise LinkLost(f"{endpoint} does not answer: {_cause(error)}") from error
    return GuardedConnection(stream, initiator=True)


def remote_endpoint(stream: trio.SocketStream) -> Endpoint | None:
    """Where the other end of a TCP connection is; None when it is gone already. The library knows no IPv6 here."""
    try:
        host, port = stream.socket.getpeername()[:2]
        return endpoint_of(str(host), int(port))
    except (OSError, UsageError):
        return None


def _cause(error: OSError) -> str:
    """The last word of an error that may carry one cause for each address tried."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[-1]
    deepest = cause if isinstance(cause, OSError) else error
    return (deepest.strerror or str(deepest)).lower()
