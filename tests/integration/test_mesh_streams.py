"""Streams over real sockets: cancelling, waiting and not closing harm nothing but the stream that it happens to."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID

from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused
from tests.support.mesh_worlds import eventually, seed

ECHO = "/rollmesh/1/echo"
HOLD = "/rollmesh/1/hold"
MAX = 1 << 24


async def echo(stream):
    while True:
        await stream.send(await stream.receive(MAX))


@asynccontextmanager
async def pair():
    options = HostOptions(key_seed=seed(1), listen=("/ip4/127.0.0.1/tcp/0",), gossip=False)
    async with open_mesh(options) as a, open_mesh(HostOptions(key_seed=seed(2), gossip=False)) as b:
        a.serve(ECHO, echo)
        await b.connect(a.addresses[0])
        yield a, b


async def test_row_4_cancelled_writes_and_reads_break_no_other_stream():
    """A frame cut short by a cancelled write breaks every stream of the connection in the library."""
    async with pair() as (a, b):
        chance = random.Random(4)
        steady = [await b.open_stream(a.peer_id, ECHO) for _ in range(12)]
        done = 0

        async def keep_on(stream):
            nonlocal done
            for round_number in range(15):
                frame = bytes([round_number]) * 40_000
                await stream.send(frame)
                assert await stream.receive(MAX) == frame
            done += 1

        async def cancel_much():
            for _ in range(60):
                stream = await b.open_stream(a.peer_id, ECHO)
                with trio.move_on_after(chance.uniform(0, 0.01)):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(stream.send, bytes(2 << 20))
                        nursery.start_soon(stream.receive, MAX)
                await stream.reset()

        with trio.fail_after(40):
            async with trio.open_nursery() as nursery:
                for stream in steady:
                    nursery.start_soon(keep_on, stream)
                nursery.start_soon(cancel_much)
        assert done == 12
        assert len(a.links()) == len(b.links()) == 1


async def test_row_5_a_writer_outlasts_a_reader_that_pauses():
    """The library resets a stream whose reader pauses for 5 s: a slow home uplink with a few streams does that."""
    async with pair() as (a, b):

        async def pause(stream):
            await trio.sleep(5.6)
            await stream.send(str(len(await stream.receive(MAX))).encode())

        a.serve(HOLD, pause)
        stream = await b.open_stream(a.peer_id, HOLD)
        with trio.fail_after(10):
            await stream.send(bytes(3 << 20))
            assert await stream.receive(100) == str(3 << 20).encode()
        await stream.reset()


async def test_a_reader_that_never_reads_ends_the_wait(monkeypatch):
    monkeypatch.setattr(limits, "WRITE_STALL_S", 0.3)
    async with pair() as (a, b):

        async def never(stream):
            await trio.sleep(2)
            await stream.reset()

        a.serve(HOLD, never)
        stream = await b.open_stream(a.peer_id, HOLD)
        with pytest.raises(LinkLost), trio.fail_after(1.5):
            await stream.send(bytes(3 << 20))
        assert b.links()


async def test_row_11_streams_that_a_client_forgets_block_nobody():
    """In the library the 257th stream waits for ever."""
    async with pair() as (a, b):
        with trio.fail_after(20):
            forgotten = []
            for _ in range(300):
                try:
                    forgotten.append(await b.open_stream(a.peer_id, ECHO))
                except LinkLost:
                    break
            assert limits.MAX_STREAMS_PER_PEER <= len(forgotten) < 300
            for stream in forgotten:
                await stream.reset()
            await trio.sleep(0.1)
            if not b.links():
                return
            stream = await b.open_stream(a.peer_id, ECHO)
            await stream.send(b"x")
            assert await stream.receive(1) == b"x"


async def test_row_11_a_thousand_streams_one_after_the_other(monkeypatch):
    monkeypatch.setattr(limits, "REQUEST_BURST", 1000)
    async with pair() as (a, b):
        with trio.fail_after(40):
            for _ in range(300):
                stream = await b.open_stream(a.peer_id, ECHO)
                await stream.send(b"x")
                assert await stream.receive(1) == b"x"
                await stream.close()
                await stream.reset()
        await trio.sleep(0.2)
        for mesh, peer in ((a, b.peer_id), (b, a.peer_id)):
            (connection,) = mesh._swarm.newest(ID.from_base58(peer))
            assert not connection.muxed_conn._streams
            assert not connection.get_streams()
            assert connection.muxed_conn._unread == 0
            assert connection.muxed_conn._inbound == 0


async def test_large_frames_go_through_in_both_directions_at_once():
    async with pair() as (a, b):
        frame = random.Random(5).randbytes(3 << 20)

        async def one():
            stream = await b.open_stream(a.peer_id, ECHO)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.send, frame)
                assert await stream.receive(MAX) == frame
            await stream.reset()

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(one)


async def test_frames_that_arrive_slowly_are_bounded_by_peer(monkeypatch):
    monkeypatch.setattr(limits, "RECEIVING_BYTES_PER_PEER", 600_000)
    async with pair() as (a, b):
        refusals = []

        async def read(stream):
            try:
                await stream.receive(MAX)
            except Refused as refusal:
                refusals.append(refusal.code)
                raise

        a.serve(HOLD, read)

        async def halfway():
            stream = await b.open_stream(a.peer_id, HOLD)
            with suppress(BaseLibp2pError):
                await stream._stream.write((1 << 20).to_bytes(4, "big") + bytes(200_000))
            with suppress(LinkLost):
                await stream.receive(1)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(halfway)
            await eventually(lambda: refusals)
            nursery.cancel_scope.cancel()
        assert refusals[0] == "request.busy"
