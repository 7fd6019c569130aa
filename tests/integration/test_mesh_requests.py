"""The router and ``ask`` over both meshes: answers, refusals, deadlines, and one peer that does not starve another."""

from __future__ import annotations

import logging
from contextlib import suppress

import pytest
import trio

from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_peer.mesh.requests import Route, Router, StreamRoute, ask, closed_answer, opened_answer
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused
from tests.support.mesh_hostile import attack, begin, stock_host
from tests.support.mesh_worlds import WORLDS, eventually, seed

DOUBLE = "/rollmesh/1/double"


@pytest.fixture(params=sorted(WORLDS))
def world(request):
    return WORLDS[request.param]()


async def double(_peer, request):
    return request * 2


def route(handle=double, **changes):
    return Route(**{"protocol": DOUBLE, "request_bytes": 1 << 20, "answer_bytes": 1 << 21, "handle": handle, **changes})


class Asking:
    """Meshes that live in tasks of their own until the test is over."""

    def __init__(self, nursery, world):
        self._nursery, self._world = nursery, world

    async def join(self, number):
        return await self._nursery.start(self._live, number)

    async def _live(self, number, *, task_status):
        async with self._world.join(number) as mesh:
            task_status.started(mesh)
            await trio.sleep_forever()

    async def serve(self, *routes, **options):
        self.server = await self.join(1)
        Router(**options).register(self.server, *routes)
        return self

    async def client(self, number=2):
        mesh = await self.join(number)
        await mesh.connect(self.server.addresses[0])

        async def asks(request, *, protocol=DOUBLE, answer_bytes=1 << 21, deadline_s=10.0):
            return await ask(
                mesh, self.server.peer_id, protocol, request, answer_bytes=answer_bytes, deadline_s=deadline_s
            )

        return asks


@pytest.fixture
async def asking(world, nursery):
    return Asking(nursery, world)


async def refusal_of(awaitable):
    with pytest.raises(Refused) as refusal:
        await awaitable
    return refusal.value


async def test_answers(asking):
    asks = await (await asking.serve(route())).client()
    for request in (b"", b"ab", bytes(1 << 20)):
        assert await asks(request) == request * 2


async def test_the_handler_learns_who_asks(asking):
    seen = []

    async def handle(peer, _request):
        seen.append(peer)
        return b""

    asks = await (await asking.serve(route(handle))).client()
    assert await asks(b"x") == b""
    assert seen == list(asking.server.links())


async def test_a_refusal_travels_with_code_and_sentence(asking):
    async def refuse(_peer, _request):
        raise Refused("lease.expired", "too late by 3 s" + "." * 5000)

    asks = await (await asking.serve(route(refuse, answer_bytes=1))).client()
    refusal = await refusal_of(asks(b"x", answer_bytes=1))
    assert refusal.code == "lease.expired"
    assert refusal.detail.startswith("too late by 3 s")
    assert len(refusal.detail) == limits.MAX_TEXT_CHARS


async def test_an_error_of_ours_is_logged_and_answered(asking, caplog):
    async def fail(_peer, _request):
        raise KeyError("a fault of ours")

    asks = await (await asking.serve(route(fail))).client()
    with caplog.at_level(logging.ERROR, logger="rollmesh"):
        assert (await refusal_of(asks(b"x"))).code == "request.internal"
    assert "a fault of ours" in caplog.text
    assert "Traceback" in caplog.text
    caplog.clear()


async def test_an_answer_over_its_bound_is_our_fault(asking, caplog):
    asks = await (await asking.serve(route(answer_bytes=3))).client()
    assert (await refusal_of(asks(b"ab"))).code == "request.internal"
    caplog.clear()


async def test_row_10_a_handler_that_does_not_end_is_ended(asking):
    async def sleep(_peer, _request):
        await trio.sleep_forever()

    asks = await (await asking.serve(route(sleep, deadline_s=0.3))).client()
    started = trio.current_time()
    assert (await refusal_of(asks(b"x"))).code == "request.timeout"
    assert trio.current_time() - started < 6


async def test_the_client_does_not_wait_longer_than_it_said(asking):
    async def sleep(_peer, _request):
        await trio.sleep_forever()

    asks = await (await asking.serve(route(sleep))).client()
    with pytest.raises(LinkLost, match="no answer"):
        await asks(b"x", deadline_s=0.3)
    mesh = asking.server
    with pytest.raises(LinkLost, match="no connection"):
        await ask(mesh, mesh.peer_id, DOUBLE, b"", answer_bytes=1, deadline_s=1)


async def test_row_12_a_refusal_before_the_request_is_through_reaches_the_client(asking):
    """The server says no at the header of 16 MB, of which the client has sent a part."""
    asks = await (await asking.serve(route(request_bytes=1000))).client()
    for size in (1001, 16 << 20):
        refusal = await refusal_of(asks(bytes(size)))
        assert refusal.code == "request.too_large"
        assert "1000 are allowed" in refusal.detail
    assert await asks(bytes(10)) == bytes(20)


async def test_row_12_a_refused_stream_is_not_torn_from_under_a_client_that_still_writes(monkeypatch):
    """Other implementations drop what they have not read when a stream is reset: the refusal would be lost."""
    monkeypatch.setattr(limits, "LINGER_S", 3.0)
    options = HostOptions(key_seed=seed(1), listen=("/ip4/127.0.0.1/tcp/0",))
    async with open_mesh(options) as mesh, stock_host() as host:
        Router().register(mesh, route(request_bytes=1000))
        stream = await begin(await attack(host, mesh.addresses[0]), DOUBLE)
        await stream.write((1 << 24).to_bytes(4, "big") + bytes(100_000))
        refusal = await stream.read(1000)
        assert b"request.too_large" in refusal
        await stream.write(bytes(50_000))
        await trio.sleep(0.2)
        assert not stream.reset_received
        await eventually(lambda: stream.reset_received)


async def test_a_protocol_that_nobody_serves(asking):
    asks = await (await asking.serve(route())).client()
    assert (await refusal_of(asks(b"", protocol="/rollmesh/2/double"))).code == "version.unsupported"


async def test_a_peer_over_its_rate_is_told_so(asking, monkeypatch):
    monkeypatch.setattr(limits, "REQUEST_BURST", 5)
    monkeypatch.setattr(limits, "MAX_REQUESTS_PER_S", 0.01)
    asks = await (await asking.serve(route())).client()
    other = await asking.client(3)
    for _ in range(5):
        await asks(b"x")
    assert (await refusal_of(asks(b"x"))).code == "node.rate"
    assert await other(b"x") == b"xx"


async def test_of_a_peer_that_may_not_ask_nothing_is_read(asking):
    """It is refused although most of its request never comes."""
    worked = []

    async def handle(peer, _request):
        worked.append(peer)
        return b""

    def admit(_peer):
        raise Refused("node.not_admitted")

    await asking.serve(route(handle, admit=admit))
    mesh = await asking.join(2)
    await mesh.connect(asking.server.addresses[0])
    stream = await mesh.open_stream(asking.server.peer_id, DOUBLE)
    with trio.fail_after(5), pytest.raises(Refused, match="not been admitted"):
        opened_answer(await stream.receive(1000), answer_bytes=1000)
    await stream.reset()
    assert not worked


async def test_who_goes_on_in_spite_of_refusals_is_shut_out(monkeypatch):
    """Each is told so some hundreds of times; then its connection ends, and it is not let in for a while."""
    monkeypatch.setattr(limits, "MAX_OFFENCES", 2)
    options = HostOptions(key_seed=seed(1), listen=("/ip4/127.0.0.1/tcp/0",))

    def admit(peer):
        if peer == stubborn.peer_id:
            raise Refused("node.not_admitted")

    async with (
        open_mesh(options) as mesh,
        open_mesh(HostOptions(key_seed=seed(2))) as stubborn,
        open_mesh(HostOptions(key_seed=seed(3))) as other,
    ):
        Router().register(mesh, route(admit=admit))
        for peer in (stubborn, other):
            await peer.connect(mesh.addresses[0])
        refused = 0
        with trio.fail_after(20), pytest.raises(LinkLost):
            while True:
                with pytest.raises(Refused, match="not been admitted"):
                    await ask(stubborn, mesh.peer_id, DOUBLE, b"x", answer_bytes=9, deadline_s=5)
                refused += 1
        assert refused > 15
        await eventually(lambda: stubborn.peer_id not in mesh.links())
        with suppress(LinkLost):
            await stubborn.connect(mesh.addresses[0])
        await eventually(lambda: stubborn.peer_id not in mesh.links())
        assert await ask(other, mesh.peer_id, DOUBLE, b"x", answer_bytes=9, deadline_s=5) == b"xx"


async def test_a_peer_with_too_many_streams_is_told_so(asking, monkeypatch):
    monkeypatch.setattr(limits, "MAX_STREAMS_PER_PEER", 4)
    running = 0
    done = trio.Event()

    async def hold(_peer, _request):
        nonlocal running
        running += 1
        await done.wait()
        return b""

    asks = await (await asking.serve(route(hold))).client()
    other = await asking.client(3)
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(asks, b"x")
        await eventually(lambda: running == 4)
        assert (await refusal_of(asks(b"x"))).code == "request.busy"
        nursery.start_soon(other, b"x")
        await eventually(lambda: running == 5)
        done.set()
    await asks(b"x")


async def test_peers_that_flood_take_turns_with_one_that_asks_now_and_then(asking):
    """Each request takes 20 ms of one of two places; four peers keep 24 waiting each."""

    async def work(_peer, _request):
        await trio.sleep(0.02)
        return b""

    await asking.serve(route(work), places=2, places_per_peer=1)
    modest = await asking.client(2)
    flooders = [await asking.client(number) for number in range(3, 7)]
    waits = []
    async with trio.open_nursery() as nursery:

        async def flood(asks):
            while True:
                try:
                    await asks(b"x")
                except Refused:
                    await trio.sleep(0.05)

        for asks in flooders:
            for _ in range(24):
                nursery.start_soon(flood, asks)
        await trio.sleep(0.3)
        for _ in range(5):
            started = trio.current_time()
            await modest(b"x")
            waits.append(trio.current_time() - started)
            await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    assert sorted(waits)[2] < 0.6  # in one queue it would be 96 / 2 * 20 ms = 1 s and more


async def test_streams_that_are_kept(asking):
    async def count(stream):
        total = 0
        while True:
            try:
                total += len(await stream.receive(100))
            except LinkLost:
                return
            await stream.send(closed_answer(str(total).encode()))

    await asking.serve(StreamRoute(protocol=DOUBLE, handle=count, deadline_s=2))
    await asking.client()
    (peer,) = asking.server.links()
    client = await asking.join(9)
    await client.connect(asking.server.addresses[0])
    stream = await client.open_stream(asking.server.peer_id, DOUBLE)
    for total in (b"2", b"4"):
        await stream.send(b"ab")
        assert opened_answer(await stream.receive(100), answer_bytes=10) == total
    with pytest.raises(LinkLost), trio.fail_after(10):  # the deadline of the stream
        await stream.receive(100)
    await stream.reset()
    assert peer


async def test_a_kept_stream_refuses_in_words(asking, caplog):
    async def refuse(stream):
        await stream.receive(100)
        raise Refused("node.not_admitted")

    async def fail(_stream):
        raise RuntimeError("a fault of ours")

    await asking.serve(
        StreamRoute(protocol=DOUBLE, handle=refuse, deadline_s=5),
        StreamRoute(protocol="/rollmesh/1/fail", handle=fail, deadline_s=5),
    )
    asks = await asking.client()
    assert (await refusal_of(asks(b"x"))).code == "node.not_admitted"
    assert (await refusal_of(asks(b"x", protocol="/rollmesh/1/fail"))).code == "request.internal"
    caplog.clear()


async def test_a_peer_that_answers_nonsense(asking):
    async def nonsense(stream):
        await stream.send(await stream.receive(100))

    server = await asking.serve()
    server.server.serve(DOUBLE, nonsense)
    asks = await asking.client()
    for answer in (b"", b"\x02abc", b"\x01", b"\x01\xff\xff", b"\x01\x80", b"\x00" + bytes(50)):
        with pytest.raises(LinkLost, match="breaks the protocol"):
            await asks(answer, answer_bytes=49)
