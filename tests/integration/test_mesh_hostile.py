"""Strangers: whatever one of them sends, the host lives, its memory stays bounded, and others are served.

Each test names the row of the table of the library's faults that it guards; it fails when that mend is taken out.
"""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import IOException
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.utils import encode_delim, encode_uvarint

from rollmesh_peer.mesh.address import parse_peer_address
from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost
from tests.support.mesh_hostile import (
    DATA,
    PING,
    SYN,
    WINDOW,
    attack,
    begin,
    frame,
    is_closed,
    prefixed,
    stock_host,
)
from tests.support.mesh_process import mesh_process
from tests.support.mesh_worlds import seed

ECHO = "/rollmesh/1/echo"
TOPIC = "/rollmesh/1/run/policy"
MESHSUB = "/meshsub/1.1.0"


async def echo(stream):
    while True:
        await stream.send(await stream.receive(1 << 20))


async def hold(_stream):
    await trio.sleep(5)


@asynccontextmanager
async def victim():
    """A mesh, and an honest peer that is linked to it; at the end the honest peer must still be served."""
    async with AsyncExitStack() as stack:
        options = HostOptions(key_seed=seed(1), listen=("/ip4/127.0.0.1/tcp/0",))
        mesh = await stack.enter_async_context(open_mesh(options))
        honest = await stack.enter_async_context(open_mesh(HostOptions(key_seed=seed(2))))
        mesh.serve(ECHO, echo)
        heard = honest.subscribe(TOPIC, accept=lambda author, _message: author == mesh.peer_id)
        mesh.subscribe(TOPIC, accept=lambda author, _message: author == mesh.peer_id)
        await honest.connect(mesh.addresses[0])
        yield mesh
        await serves(mesh, honest)
        for attempt in range(20):  # a hint may get lost, but not twenty
            await mesh.publish(TOPIC, b"still here %d" % attempt)
            with trio.move_on_after(0.5):
                await heard.receive()
                break
        else:
            pytest.fail("gossip does not work any more")


async def pour(stream, garbage):
    """Write what the other side may refuse half-way."""
    with suppress(MuxedStreamError):
        await stream.write(garbage)


async def serves(mesh, honest):
    with trio.fail_after(5):
        stream = await honest.open_stream(mesh.peer_id, ECHO)
        await stream.send(b"still here")
        assert await stream.receive(100) == b"still here"
        await stream.reset()


def rpc(**fields):
    return prefixed(rpc_pb2.RPC(**fields).SerializeToString())


def unsigned(**fields):
    """A message of nobody, in our topic."""
    defaults = {"topicIDs": [TOPIC], "data": b"x", "seqno": b"12345678", "from_id": b"\x00\x01"}
    return rpc_pb2.Message(**{**defaults, **fields})


# The protobuf of a peer id that carries no key, so that the key is taken from the message: a parser's favourite.
RSA_PEER = bytes.fromhex("1220") + bytes(32)

STREAM_GARBAGE = {
    "a name that is not UTF-8": encode_delim(b"/multistream/1.0.0") + encode_delim(b"\xff\xfe\xfd"),
    "a header that is not UTF-8": encode_delim(b"\xff\xfe\xfd"),
    "a name of 2^60 bytes": encode_delim(b"/multistream/1.0.0") + encode_uvarint(1 << 60) + bytes(5000),
    "a name of 16383 bytes": encode_delim(b"/multistream/1.0.0") + encode_uvarint(16383) + bytes(16383),
    "an empty name": encode_delim(b"/multistream/1.0.0") + b"\x00",
    "a name without its end": encode_delim(b"/multistream/1.0.0") + b"\x03abc",
    "another negotiation": encode_delim(b"/multistream/9.9.9"),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "random bytes": random.Random(1).randbytes(50_000),
    "fifty protocols": encode_delim(b"/multistream/1.0.0") + encode_delim(b"/nothing") * 50,
    "nothing": b"",
}

GOSSIP_GARBAGE = {
    "no protobuf": prefixed(b"\xff" * 50),
    "random bytes": random.Random(2).randbytes(10_000),
    "a length of 2^60": encode_uvarint(1 << 60),
    "an endless length": b"\xff" * 30,
    "a topic that is not UTF-8": prefixed(b"\x0a\x06\x08\x01\x12\x02\xff\xfe"),
    "an oversized message": rpc(publish=[unsigned(data=bytes(limits.GOSSIP_BYTES + 1))]),
    "an oversized RPC": prefixed(bytes(limits.GOSSIP_RPC_BYTES + 1)),
    "no signature": rpc(publish=[unsigned()]),
    "a key that does not parse": rpc(publish=[unsigned(from_id=RSA_PEER, key=b"\x08\x00\x12\x03abc", signature=b"x")]),
    "a key of an unknown kind": rpc(publish=[unsigned(from_id=RSA_PEER, key=b"\x08\x63\x12\x01a", signature=b"x")]),
    "an author of no bytes": rpc(publish=[unsigned(from_id=b"", signature=b"x")]),
    "many topics": rpc(publish=[unsigned(topicIDs=[TOPIC] * 1000)]),
    "no topic": rpc(publish=[unsigned(topicIDs=[])]),
    "a garbled record": rpc(senderRecord=b"\xff" * 100, subscriptions=[{"subscribe": True, "topicid": TOPIC}]),
    "a thousand topics": rpc(subscriptions=[{"subscribe": True, "topicid": f"/rollmesh/{n}"} for n in range(1000)]),
    "control for no topic of ours": rpc(
        control={
            "graft": [{"topicID": "/x"}] * 2000,
            "prune": [{"topicID": f"/{n}", "backoff": 1 << 62} for n in range(2000)],
            "ihave": [{"topicID": f"/{n}", "messageIDs": [b"abc", b"not hex", b""]} for n in range(500)],
        }
    ),
    "control for ours": rpc(
        control={
            "graft": [{"topicID": TOPIC}] * 100,
            "prune": [{"topicID": TOPIC, "backoff": 1 << 62}],
            "ihave": [{"topicID": TOPIC, "messageIDs": [b"\xff" * 32] * 1000}],
            "iwant": [{"messageIDs": [b"zz", b"\xff" * 32] * 1000}],
        }
    ),
}


async def test_row_2_garbage_on_a_stream_ends_that_stream_only():
    async with victim() as mesh, stock_host() as host:
        connection = await attack(host, mesh.addresses[0])
        for what, garbage in STREAM_GARBAGE.items():
            stream = await connection.open_stream()
            await pour(stream, garbage)
            await stream.close()
            await trio.sleep(0.03)
            assert not connection.is_closed, what


async def test_row_2_garbage_in_gossip_ends_that_stream_only():
    async with victim() as mesh, stock_host() as host:
        connection = await attack(host, mesh.addresses[0])
        for what, garbage in GOSSIP_GARBAGE.items():
            stream = await begin(connection, MESHSUB)
            await pour(stream, garbage)
            await trio.sleep(0.03)
            assert not connection.is_closed, what


async def test_row_2_garbage_before_the_handshake_ends_that_connection_only():
    async with victim() as mesh:
        endpoint = parse_peer_address(mesh.addresses[0]).endpoint
        multistream = encode_delim(b"/multistream/1.0.0")
        for garbage in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            random.Random(3).randbytes(1000),
            encode_delim(b"\xff\xfe"),
            encode_uvarint(1 << 62),
            b"\xff" * 30,
            multistream + encode_delim(b"/plaintext/2.0.0"),
            multistream + encode_delim(b"\xff\xfe"),
            multistream + encode_delim(b"/noise") + b"\xff\xff" + bytes(3000),
            multistream + encode_delim(b"/noise") + b"\x00\x20" + bytes(32) + b"\x00\x60" + bytes(96),
            multistream + encode_delim(b"/noise") + b"\x00\x00" * 10,
        ):
            tcp = await trio.open_tcp_stream(endpoint.host, endpoint.port)
            await tcp.send_all(garbage)
            await trio.sleep(0.01)
            await tcp.aclose()


async def test_offences_add_up_until_the_peer_is_shut_out():
    async with victim() as mesh, stock_host() as host:
        connection = await attack(host, mesh.addresses[0])
        for _ in range(limits.MAX_OFFENCES + 1):
            with suppress(BaseLibp2pError):
                stream = await connection.open_stream()
                await stream.write(b"\x02\xff\n")
            await trio.sleep(0.01)
        assert await is_closed(connection)
        await trio.sleep(0.3)
        with pytest.raises(Exception, match="unable to connect"):
            await attack(host, mesh.addresses[0])
        assert str(host.get_id()) not in mesh.links()


async def test_streams_that_break_are_no_offence():
    """A client that gives up, or a connection that goes with many streams under way, is nobody's fault."""
    async with victim() as mesh, stock_host() as host:
        connection = await attack(host, mesh.addresses[0])
        for _ in range(3 * limits.MAX_OFFENCES):
            stream = await connection.open_stream()
            await stream.reset()
        for _ in range(2 * limits.MAX_OFFENCES):
            await connection.open_stream()
        await trio.sleep(0.1)
        await connection.close()
        await trio.sleep(0.3)
        assert not mesh._swarm.offences.is_banned(str(host.get_id()), now=trio.current_time())
        assert not (await attack(host, mesh.addresses[0])).is_closed


async def test_row_3_a_peer_that_ignores_flow_control_is_cut_off_and_takes_no_memory():
    async with mesh_process(1) as child:
        before = (await child.ask("rss"))["rss"]
        async with stock_host() as host:
            connection = await attack(host, child.address)
            stream = await begin(connection, "/rollmesh/1/sink")
            sent = 0
            with trio.move_on_after(20), suppress(BaseLibp2pError):
                while sent < 300 << 20 and not connection.is_closed:
                    await connection._write_frame(frame(DATA, 0, stream.stream_id, 60_000) + bytes(60_000))
                    sent += 60_000
            assert await is_closed(connection), f"still open after {sent >> 20} MB"
        assert (await child.ask("rss"))["rss"] - before < 15
        assert (await child.ask("links"))["links"] == []


async def test_row_3_a_window_is_held_to_the_byte():
    async with victim() as mesh, stock_host() as host:
        mesh.serve("/rollmesh/1/hold", hold)
        connection = await attack(host, mesh.addresses[0])
        stream = await begin(connection, "/rollmesh/1/hold")
        spent = len(encode_delim(b"/multistream/1.0.0") + encode_delim(b"/rollmesh/1/hold"))
        rest = limits.STREAM_WINDOW_BYTES - spent
        while rest:
            size = min(rest, 60_000)
            await connection._write_frame(frame(DATA, 0, stream.stream_id, size) + bytes(size))
            rest -= size
        await trio.sleep(0.1)
        assert not connection.is_closed
        await connection._write_frame(frame(DATA, 0, stream.stream_id, 1) + b"x")
        assert await is_closed(connection)


async def test_row_3_many_streams_share_one_bound():
    """Each stream keeps to its window, and all together would take 16 MiB."""
    async with mesh_process(1) as child:
        before = (await child.ask("rss"))["rss"]
        async with stock_host() as host:
            connection = await attack(host, child.address)
            with trio.move_on_after(20), suppress(BaseLibp2pError):
                for _ in range(60):
                    stream = await begin(connection, "/rollmesh/1/sink")
                    await stream.write(bytes(limits.STREAM_WINDOW_BYTES - 1000))
            assert await is_closed(connection)
        assert (await child.ask("rss"))["rss"] - before < 20


@pytest.mark.parametrize(
    "frames",
    [
        frame(DATA, 0, 1, 0, version=7),
        frame(9, 0, 1, 0),
        frame(WINDOW, SYN, 2, 0),
        frame(WINDOW, SYN, 0, 0),
        frame(WINDOW, SYN, 101, 0) * 2,
        frame(DATA, 0, 999, 0xFFFFFFFF),
        frame(DATA, SYN, 201, 8 << 20),
    ],
)
async def test_row_3_a_breach_of_yamux_ends_the_connection(frames):
    async with victim() as mesh, stock_host() as host:
        connection = await attack(host, mesh.addresses[0])
        await connection._write_frame(frames)
        assert await is_closed(connection)


async def test_row_3_odd_frames_that_are_allowed_do_no_harm():
    async with victim() as mesh, stock_host() as host:
        connection = await attack(host, mesh.addresses[0])
        await connection._write_frame(frame(DATA, 0, 999, 1000) + bytes(1000))
        await connection._write_frame(frame(WINDOW, 0, 999, 0xFFFFFFFF))
        await connection._write_frame(frame(WINDOW, 4, 999, 0) + frame(WINDOW, 8, 999, 0))
        for _ in range(3000):
            await connection._write_frame(frame(PING, SYN, 0, 7))
        stream = await begin(connection, ECHO)
        await stream.write(b"\x00\x00\x00\x01x")
        assert await stream.read(5)


async def test_frames_in_a_flood_wait_in_the_senders_own_buffers(monkeypatch):
    """We stop reading: what is not read costs nothing. Who never ceases is shut out."""
    monkeypatch.setattr(limits, "MAX_OFFENCES", 4)
    monkeypatch.setattr(limits, "FRAMES_BURST", 100)
    monkeypatch.setattr(limits, "MAX_FRAMES_PER_S", 50.0)
    async with victim() as mesh, stock_host() as host:
        connection = await attack(host, mesh.addresses[0])
        (muxed,) = [c.muxed_conn for c in mesh._swarm.get_connections(host.get_id())]
        posted, post, began = [], muxed.post, trio.current_time()
        monkeypatch.setattr(muxed, "post", lambda frames: (posted.append(frames), post(frames)))
        with trio.move_on_after(20), suppress(IOException):
            while not connection.is_closed:
                await connection._write_frame(frame(PING, SYN, 0, 7))
        assert await is_closed(connection)
        assert len(posted) <= 100 + 50 * (trio.current_time() - began) + 9, "frames that were read and answered"


async def test_streams_opened_and_reset_at_once_reach_no_handler():
    """They never count as open, so no number bounds them: they are forgotten in front of the door."""
    reached = 0

    async def count(_stream):
        nonlocal reached
        reached += 1

    async with victim() as mesh, stock_host() as host:
        mesh.serve("/rollmesh/1/count", count)
        connection = await attack(host, mesh.addresses[0])
        opening = encode_delim(b"/multistream/1.0.0") + encode_delim(b"/rollmesh/1/count")
        burst = b"".join(
            frame(WINDOW, SYN, number, 0)
            + frame(DATA, 0, number, len(opening)) + opening + frame(WINDOW, 8, number, 0)
            for number in range(1001, 1101, 2)
        )  # fmt: skip
        await connection._write_frame(burst)
        await trio.sleep(0.3)
        assert reached < 25, "of fifty"
        assert not connection.is_closed


async def test_streams_without_number_are_refused_one_by_one():
    async with victim() as mesh, stock_host() as host:
        connection = await attack(host, mesh.addresses[0])
        with suppress(IOException):
            for number in range(1001, 1001 + 2 * 5000, 2):
                await connection._write_frame(frame(WINDOW, SYN, number, 0))
        assert await is_closed(connection)


@pytest.mark.parametrize(
    "endless",
    [
        encode_uvarint(1 << 40) + bytes(100 << 20),
        encode_delim(b"/multistream/1.0.0") + encode_delim(b"/nothing") * 2_000_000,
        encode_delim(b"/multistream/1.0.0") + encode_delim(b"/noise") + b"\x00\x00" * 20_000_000,
    ],
    ids=["one long name", "names without end", "empty handshake messages"],
)
async def test_a_stranger_sends_little_before_its_handshake(endless):
    """The library's negotiation reads as much as it is told to, and as often."""
    async with victim() as mesh:
        endpoint = parse_peer_address(mesh.addresses[0]).endpoint
        tcp = await trio.open_tcp_stream(endpoint.host, endpoint.port)
        with pytest.raises(trio.BrokenResourceError), trio.fail_after(5):
            await tcp.send_all(endless)


@pytest.mark.parametrize("kind", [{"plaintext": True}, {"mplex": True}])
async def test_row_13_nothing_but_noise_and_yamux_is_negotiable(kind):
    async with victim() as mesh:
        async with stock_host(**kind) as host:
            with pytest.raises(Exception, match="unable to connect"), trio.fail_after(5):
                await attack(host, mesh.addresses[0])
            assert not host.get_network().connections
        async with stock_host(**kind, listen=True) as host:
            with pytest.raises(LinkLost), trio.fail_after(5):
                await mesh.connect(str(host.get_addrs()[0]))


async def test_a_stock_host_is_served_and_can_be_dialled():
    """What stays compatible: Noise, yamux, multistream-select and GossipSub of the library."""
    async with victim() as mesh, stock_host(listen=True) as host:

        async def echo_raw(stream):
            await stream.write(await stream.read(100))
            await stream.close()

        host.set_stream_handler(ECHO, echo_raw)
        await mesh.connect(str(host.get_addrs()[0]))
        stream = await mesh.open_stream(str(host.get_id()), ECHO)
        await stream.send(b"over")
        assert await stream.receive(100) == b"over"
        await stream.reset()
        net_stream = await host.new_stream(ID.from_base58(mesh.peer_id), [ECHO])
        await net_stream.write(b"\x00\x00\x00\x04back")
        assert await net_stream.read(8) == b"\x00\x00\x00\x04back"


async def test_row_11_a_frame_in_many_small_pieces_arrives():
    async with victim() as mesh, stock_host() as host:
        stream = await begin(await attack(host, mesh.addresses[0]), ECHO)
        for byte in (150).to_bytes(4, "big") + bytes(150):
            await stream.write(bytes([byte]))
            await trio.sleep(0.002)
        answer = b""
        while len(answer) < 154:
            answer += await stream.read(1000)
