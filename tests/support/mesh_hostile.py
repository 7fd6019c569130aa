"""Peers that do not keep to the rules: the stock py-libp2p host, and what can be done with its insides."""

from __future__ import annotations

import struct
from contextlib import asynccontextmanager

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.mplex.mplex import MPLEX_PROTOCOL_ID, Mplex
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.utils import encode_delim, encode_uvarint
from multiaddr import Multiaddr

HEADER = struct.Struct("!BBHII")
DATA, WINDOW, PING = 0, 1, 2
SYN = 1


@asynccontextmanager
async def stock_host(*, plaintext=False, mplex=False, listen=False):
    """A host of the library as it comes, with one security protocol and one muxer."""
    keys = create_new_key_pair()
    security = (
        {PLAINTEXT_PROTOCOL_ID: InsecureTransport(keys)}
        if plaintext
        else {NOISE: NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)}
    )
    muxer = {MPLEX_PROTOCOL_ID: Mplex} if mplex else {YAMUX: Yamux}
    host = new_host(key_pair=keys, sec_opt=security, muxer_opt=muxer)
    async with host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")] if listen else []):
        yield host
        with trio.CancelScope(shield=True), trio.move_on_after(2):
            await host.close()


async def attack(host, address):
    """Connect a stock host to a mesh; the muxed connection, whose insides can be misused."""
    info = info_from_p2p_addr(Multiaddr(address))
    await host.connect(info)
    return host.get_network().connections[info.peer_id][0].muxed_conn


async def begin(connection, protocol):
    """A raw stream that has agreed on ``protocol``."""
    stream = await connection.open_stream()
    await stream.write(encode_delim(b"/multistream/1.0.0") + encode_delim(protocol.encode()))
    answer = b""
    while answer.count(b"\n") < 2:
        answer += await stream.read(1000)
    assert answer.endswith(protocol.encode() + b"\n"), answer
    return stream


def frame(kind, flags, number, length, version=0):
    return HEADER.pack(version, kind, flags, number, length)


def prefixed(payload):
    return encode_uvarint(len(payload)) + payload


async def is_closed(connection, *, within=5.0):
    with trio.move_on_after(within):
        while not connection.is_closed:
            await trio.sleep(0.01)
        return True
    return False
