"""One suite over both implementations of the mesh seam: what any code of the project may rely on."""

from __future__ import annotations

from contextlib import AsyncExitStack
from itertools import pairwise

import pytest
import trio

from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused, UsageError
from rollmesh_protocol.identity import Identity
from tests.support.mesh_worlds import WORLDS, eventually, seed

ECHO = "/rollmesh/1/echo"
TOPIC = "/rollmesh/1/run/policy"
MAX = 1 << 23


@pytest.fixture(params=sorted(WORLDS))
def world(request):
    return WORLDS[request.param]()


async def echo(stream):
    while True:
        await stream.send(await stream.receive(MAX))


async def settle():
    """Time for what should not happen to happen."""
    await trio.sleep(0.3)


async def within(seconds, function, *arguments):
    with trio.fail_after(seconds):
        return await function(*arguments)


class Pair:
    """Two linked meshes; ``b`` dialled."""

    def __init__(self, a, b):
        self.a, self.b = a, b


async def linked(stack, world, count=2):
    meshes = [await stack.enter_async_context(world.join(number + 1)) for number in range(count)]
    for left, right in pairwise(meshes):
        await right.connect(left.addresses[0])
    return meshes


async def test_a_peer_is_named_by_its_key(world):
    async with world.join(7) as mesh:
        assert mesh.peer_id == Identity(seed(7)).peer
        assert mesh.addresses[0].endswith(f"/p2p/{mesh.peer_id}")


async def test_links_appear_on_both_sides_and_go_on_both_sides(world):
    async with AsyncExitStack() as stack:
        a, b = await linked(stack, world)
        await eventually(a.links)
        assert (a.links()[b.peer_id].outbound, b.links()[a.peer_id].outbound) == (False, True)
        assert b.links()[a.peer_id].address in a.addresses[0]
        assert await b.connect(a.addresses[0]) == a.peer_id  # again: nothing happens
        await b.disconnect(a.peer_id)
        await within(3, a.wait_link_lost, b.peer_id)
        await within(3, b.wait_link_lost, a.peer_id)
        assert not a.links()
        assert not b.links()
        with pytest.raises(LinkLost):
            await b.open_stream(a.peer_id, ECHO)
        await b.connect(a.addresses[0])
        assert b.links()


async def test_connecting_fails_with_one_sentence(world):
    async with world.join(1) as a, world.join(2) as b:
        somebody_else = a.addresses[0].replace(a.peer_id, Identity(seed(3)).peer)
        for address in (somebody_else, f"/ip4/127.0.0.1/tcp/1/p2p/{a.peer_id}", b.addresses[0]):
            with pytest.raises(LinkLost):
                await within(5, b.connect, address)
        for garbage in ("", "/ip4/127.0.0.1/tcp/1", "/ip4/1.2.3.4/tcp/1/p2p/garbage", "nonsense", "/ip4/a/tcp/1/p2p/x"):
            with pytest.raises(UsageError):
                await b.connect(garbage)
        assert not b.links()


@pytest.mark.parametrize("size", [0, 1, limits.WRITE_PIECE_BYTES + 1, 3 << 20])
async def test_frames_arrive_whole(world, size):
    async with AsyncExitStack() as stack:
        a, b = await linked(stack, world)
        a.serve(ECHO, echo)
        stream = await b.open_stream(a.peer_id, ECHO)
        assert stream.peer == a.peer_id
        frame = bytes(range(256)) * (size // 256) + bytes(size % 256)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, frame)
            nursery.start_soon(stream.send, frame) if size < 2 else None
            assert await within(20, stream.receive, MAX) == frame
        await stream.reset()


async def test_a_frame_over_the_limit_is_refused_by_its_header(world):
    async with AsyncExitStack() as stack:
        a, b = await linked(stack, world)
        a.serve(ECHO, echo)
        stream = await b.open_stream(a.peer_id, ECHO)
        await stream.send(bytes(1000))
        with pytest.raises(Refused) as refusal:
            await within(3, stream.receive, 999)
        assert refusal.value.code == "request.too_large"
        await stream.reset()


async def test_each_side_closes_on_its_own(world):
    async def count(stream):
        total = 0
        while True:
            try:
                total += len(await stream.receive(MAX))
            except LinkLost:
                break
        await stream.send(str(total).encode())

    async with AsyncExitStack() as stack:
        a, b = await linked(stack, world)
        a.serve(ECHO, count)
        stream = await b.open_stream(a.peer_id, ECHO)
        await stream.send(b"12345")
        await stream.send(b"67")
        await stream.close()
        await stream.close()
        with pytest.raises(LinkLost):
            await stream.send(b"8")
        assert await within(3, stream.receive, 10) == b"7"
        with pytest.raises(LinkLost):  # the handler is done: its side is closed
            await within(3, stream.receive, 10)
        await stream.reset()


async def test_a_reset_ends_both_directions(world):
    async with AsyncExitStack() as stack:
        a, b = await linked(stack, world)
        failed = trio.Event()

        async def wait(stream):
            try:
                await stream.receive(10)
            except LinkLost:
                failed.set()

        a.serve(ECHO, wait)
        stream = await b.open_stream(a.peer_id, ECHO)
        await settle()
        await stream.reset()
        await within(3, failed.wait)
        for attempt in (stream.send(b"x"), stream.receive(10)):
            with pytest.raises(LinkLost):
                await attempt


async def test_an_unknown_protocol_is_said_to_be_unknown(world):
    async with AsyncExitStack() as stack:
        a, b = await linked(stack, world)
        with pytest.raises(Refused) as refusal:
            await within(3, b.open_stream, a.peer_id, "/rollmesh/2/lease")
        assert refusal.value.code == "version.unsupported"


async def test_an_error_in_a_handler_ends_its_stream_only(world):
    async def fail(stream):
        await stream.receive(10)
        raise RuntimeError("a fault of ours")

    async with AsyncExitStack() as stack:
        a, b = await linked(stack, world)
        a.serve("/rollmesh/1/fail", fail)
        a.serve(ECHO, echo)
        good = await b.open_stream(a.peer_id, ECHO)
        bad = await b.open_stream(a.peer_id, "/rollmesh/1/fail")
        await bad.send(b"x")
        with pytest.raises(LinkLost):
            await within(3, bad.receive, 10)
        await good.send(b"still here")
        assert await within(3, good.receive, 10) == b"still here"
        await good.reset()


async def test_a_writer_waits_for_its_reader(world):
    async with AsyncExitStack() as stack:
        a, b = await linked(stack, world)
        go_on = trio.Event()

        async def slow(stream):
            await go_on.wait()
            await stream.send(str(len(await stream.receive(MAX))).encode())

        a.serve(ECHO, slow)
        stream = await b.open_stream(a.peer_id, ECHO)
        with trio.move_on_after(0.3) as patience:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.send, bytes(2 << 20))
        assert patience.cancelled_caught  # it did not vanish into a buffer without bound
        await stream.reset()
        stream = await b.open_stream(a.peer_id, ECHO)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, bytes(2 << 20))
            await trio.sleep(0.2)
            go_on.set()
            assert await within(5, stream.receive, 10) == str(2 << 20).encode()
        await stream.reset()


async def test_a_lost_peer_wakes_whoever_waits_for_it(world):
    async with world.join(2) as b:
        async with world.join(1) as a:
            a.serve(ECHO, echo)
            await b.connect(a.addresses[0])
            stream = await b.open_stream(a.peer_id, ECHO)
            await stream.send(b"x")
            await stream.receive(1)
        with pytest.raises(LinkLost):
            await within(3, stream.receive, 1)
        await within(3, b.wait_link_lost, a.peer_id)


# --- gossip ----------------------------------------------------------------------------------------------------------
async def test_gossip_reaches_subscribers_through_others_and_not_its_author(world):
    async with AsyncExitStack() as stack:
        a, b, c = await linked(stack, world, count=3)

        def from_a(author, _message):
            return author == a.peer_id

        heard = {mesh.peer_id: mesh.subscribe(TOPIC, accept=from_a) for mesh in (a, b, c)}
        await world.gossip_is_up(a, b, c, topic=TOPIC)
        await a.publish(TOPIC, b"policy 1")
        for mesh in (b, c):
            assert await within(5, heard[mesh.peer_id].receive) == b"policy 1"
        await settle()
        with pytest.raises(trio.WouldBlock):
            heard[a.peer_id].receive_nowait()


async def test_what_the_judge_refuses_is_neither_delivered_nor_passed_on(world):
    async with AsyncExitStack() as stack:
        a, b, c = await linked(stack, world, count=3)
        judged = []

        def nothing_bad(author, message):
            judged.append((author, message))
            return not message.startswith(b"bad")

        at_b = b.subscribe(TOPIC, accept=nothing_bad)
        at_c = c.subscribe(TOPIC, accept=lambda _author, _message: True)
        await world.gossip_is_up(a, b, c, topic=TOPIC)
        await a.publish(TOPIC, b"bad")
        await a.publish(TOPIC, b"good")
        assert await within(5, at_b.receive) == b"good"
        assert await within(5, at_c.receive) == b"good"
        await settle()
        assert (a.peer_id, b"bad") in judged
        with pytest.raises(trio.WouldBlock):
            at_c.receive_nowait()


async def test_a_judge_that_fails_refuses(world):
    async with AsyncExitStack() as stack:
        a, b = await linked(stack, world)

        def broken(_author, message):
            if message == b"first":
                raise RuntimeError("a fault of ours")
            return True

        heard = b.subscribe(TOPIC, accept=broken)
        await world.gossip_is_up(a, b, topic=TOPIC)
        await a.publish(TOPIC, b"first")
        await a.publish(TOPIC, b"second")
        assert await within(5, heard.receive) == b"second"


async def test_an_oversized_message_is_refused_at_its_source(world):
    async with AsyncExitStack() as stack:
        a, b = await linked(stack, world)
        heard = b.subscribe(TOPIC, accept=lambda _author, _message: True)
        await world.gossip_is_up(a, b, topic=TOPIC)
        with pytest.raises(Refused) as refusal:
            await a.publish(TOPIC, bytes(limits.GOSSIP_BYTES + 1))
        assert refusal.value.code == "request.too_large"
        await a.publish(TOPIC, bytes(limits.GOSSIP_BYTES))
        assert len(await within(5, heard.receive)) == limits.GOSSIP_BYTES
