"""The seam between the project and its network: what every other module knows of peers, streams and gossip.

A :class:`Mesh` is one peer among others. It dials, answers, opens request streams and gossips, and it names every peer
by an authenticated peer id. Two implementations stand behind it: ``mesh.host`` over libp2p, and ``testing.memory_mesh``
inside one process; one test suite runs over both. Nothing here knows what the messages mean.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import trio

Accept = Callable[[str, bytes], bool]
"""Judges one gossip message: (peer id of the author, message) -> deliver and pass on, or drop."""


class MeshStream(Protocol):
    """One stream to one peer: frames in both directions, each a big-endian uint32 length and so many bytes.

    One task may send while another receives. A stream on which ``send`` or ``receive`` was cancelled half-way is of no
    further use: reset it. The connection and its other streams are unharmed.
    """

    @property
    def peer(self) -> str:
        """The peer id of the other side, proved by the handshake."""

    async def send(self, frame: bytes) -> None:
        """Write one frame; returns when it is on its way.

        Raises:
            LinkLost: the stream or its connection is gone, or the reader granted no room for ``limits.WRITE_STALL_S``.
        """

    async def receive(self, limit: int) -> bytes:
        """Read one frame of at most ``limit`` bytes; nothing is read or kept beyond the header of a longer one.

        Raises:
            Refused: ``request.too_large``, or ``request.busy`` when too much is arriving at one time.
            LinkLost: the other side closed or reset the stream, or its connection is gone.
        """

    async def close(self) -> None:
        """Say that we write no more. Reading goes on. Never blocks, never fails, may be repeated."""

    async def reset(self) -> None:
        """Give the stream up in both directions. Never blocks, never fails, may be repeated."""


StreamHandler = Callable[[MeshStream], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class PeerLink:
    """One live connection, as status pages show it."""

    peer: str
    address: str
    """The other side's transport address, a multiaddr without the peer id."""
    outbound: bool
    """True when we dialled."""


class Mesh(Protocol):
    """One peer of the mesh."""

    @property
    def peer_id(self) -> str:
        """Our own peer id."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs, ``/p2p/`` included, under which we listen; empty for a peer that only dials."""

    async def connect(self, address: str) -> str:
        """Make sure that a connection to the peer of this full multiaddr is up; returns its peer id.

        Raises:
            UsageError: the address is malformed.
            LinkLost: nobody answered within ``limits.DIAL_S``, or somebody else did.
        """

    async def disconnect(self, peer: str) -> None:
        """Close every connection to ``peer``; does nothing when there is none."""

    def links(self) -> Mapping[str, PeerLink]:
        """The live connections by peer id, the newest where there are two."""

    async def wait_link_lost(self, peer: str) -> None:
        """Return when no connection to ``peer`` is left; at once when there is none."""

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Answer streams of ``protocol``. A stream is closed after its handler; an error in one resets it, no more.

        A handler that ends with Refused has told the other side so; the mesh counts that against it.
        """

    async def open_stream(self, peer: str, protocol: str) -> MeshStream:
        """A new stream to a connected peer. Close or reset it, always.

        Raises:
            LinkLost: there is no connection, or it broke.
            Refused: ``version.unsupported`` when the peer does not speak ``protocol``.
        """

    def subscribe(self, topic: str, *, accept: Accept) -> trio.MemoryReceiveChannel[bytes]:
        """Messages of others on ``topic`` that ``accept`` passes; only those are passed on to further peers.

        Messages are few and small, may be lost, and come in any order. The channel keeps the newest
        ``limits.GOSSIP_BUFFER``. One subscription a topic.
        """

    async def publish(self, topic: str, message: bytes) -> None:
        """Send a message of at most ``limits.GOSSIP_BYTES`` to the peers subscribed to ``topic``; never to ourselves.

        Raises:
            Refused: ``request.too_large``.
        """
