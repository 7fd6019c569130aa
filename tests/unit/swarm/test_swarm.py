"""Whole fetches over a memory mesh under a virtual clock: who gives what, and who is given up."""

from __future__ import annotations

import pytest
import trio

from rollmesh_peer.mesh.requests import ask, closed_answer, opened_answer
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.messages import ChunkRequest, ManifestRequest
from rollmesh_protocol.streams import CHUNK, MANIFEST
from tests.unit.swarm.peers import World, corrupt, dripping, edge_of, honest, pass_for, peer_of, silent
from tests.unit.weights.kit import LEARNER


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


async def fetch(member, edge):
    await member.swarm.manifest(edge.name, max_bytes=len(edge.envelope))
    tally = await member.swarm.fetch(edge.name)
    assert member.store.is_complete(edge.name)
    assert member.store.payload_path(edge.name).read_bytes() == edge.payload
    return tally


async def test_one_node_fetches_everything_from_the_learner(world, autojump_clock):
    edge = edge_of(20)
    async with world.learner() as learner, world.node(1, to=[learner]) as node:
        learner.hold(edge)
        with trio.fail_after(10):
            await fetch(node, edge)
        assert node.swarm.progress.bytes_from_learner == len(edge.payload)
        assert node.swarm.progress.chunks_from_peers == 0
        assert learner.served() == len(edge.payload)


async def test_nodes_give_each_other_what_they_have(world, autojump_clock):
    edge, rate = edge_of(60), 200_000.0
    async with world.learner(upload_bytes_per_s=rate) as learner:
        learner.hold(edge)
        async with (
            world.node(1, to=[learner], upload_bytes_per_s=rate) as one,
            world.node(2, to=[learner, one], upload_bytes_per_s=rate) as two,
            world.node(3, to=[learner, one, two], upload_bytes_per_s=rate) as three,
            world.node(4, to=[learner, one, two, three], upload_bytes_per_s=rate) as four,
        ):
            started = trio.current_time()
            nodes = (one, two, three, four)
            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    for node in nodes:
                        nursery.start_soon(fetch, node, edge)
            assert all(node.swarm.progress.chunks_from_peers > 0 for node in nodes)
            total = sum(node.swarm.progress.bytes_from_peers + node.swarm.progress.bytes_from_learner for node in nodes)
            assert total == 4 * len(edge.payload)
            assert learner.served() < 2 * len(edge.payload)
            one_to_all_s = 4 * len(edge.payload) / rate
            assert trio.current_time() - started < 0.5 * one_to_all_s


async def test_a_node_that_nobody_can_dial_serves_over_the_connection_it_opened(world, autojump_clock):
    edge = edge_of(12)
    async with world.learner() as learner, world.node(1) as public, world.node(2, to=[learner, public]) as hidden:
        hidden.hold(edge)
        public.hold(edge, chunks=())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(public.swarm.fetch, edge.name)
            with trio.fail_after(30):
                while not public.store.is_complete(edge.name):
                    await trio.sleep(0.1)
        assert public.swarm.progress.chunks_from_peers == 12


async def test_who_was_only_spoken_to_may_ask_as_well(world, autojump_clock):
    """A peer shows its pass by opening a have stream; the other side of that stream must show its own."""
    edge = edge_of(13)
    async with world.node(1) as one, world.node(2, to=[one]) as two:
        one.hold(edge, chunks=range(6))
        two.hold(edge, chunks=range(6, 12))  # and nobody has the last one
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.swarm.fetch, edge.name)
            await trio.sleep(1)
            nursery.start_soon(two.swarm.fetch, edge.name)
            with trio.fail_after(limits.REST_S):
                while not len(one.store.held(edge.name)) == len(two.store.held(edge.name)) == 12:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert one.fetching.conduct.next_release(now=0) is two.fetching.conduct.next_release(now=0) is None


async def test_a_corrupt_chunk_ends_its_sender_and_costs_nobody_else_anything(world, autojump_clock):
    edge = edge_of(12)
    async with (
        world.learner() as learner,
        world.node(1, to=[learner]) as node,
        world.rogue(9, edge, answer=corrupt, to=[node]) as rogue,
    ):
        learner.hold(edge)
        with trio.fail_after(10):
            tally = await fetch(node, edge)
        assert 1 <= len(rogue.asked) <= limits.FIRST_WINDOW
        assert tally.chunks[rogue.peer] == 0
        await trio.sleep(5)
        assert rogue.peer not in node.mesh.links()
        assert LEARNER.peer in node.mesh.links()


@pytest.mark.parametrize("answer", [silent, dripping])
async def test_a_silent_or_dripping_peer_is_struck_out_and_asked_around(world, autojump_clock, answer):
    edge = edge_of(12)
    async with (
        world.learner() as learner,
        world.node(1, to=[learner]) as node,
        world.rogue(9, edge, answer=answer, to=[node]) as rogue,
    ):
        node.hold(edge, chunks=())
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.swarm.fetch, edge.name)
            await trio.sleep(limits.FIRST_CHUNK_S + limits.CHUNK_S + 1)
            assert len(rogue.asked) == limits.FIRST_WINDOW
            assert not node.fetching.conduct.is_free(rogue.peer, now=trio.current_time())
            assert not node.store.is_complete(edge.name)
            learner.hold(edge)  # published late: now there is somebody else
            await learner.sharing.exchange.notice(edge.name)
            with trio.fail_after(60):
                while not node.store.is_complete(edge.name):
                    await trio.sleep(0.1)
        assert trio.current_time() - started < 30
        assert node.swarm.progress.chunks_from_learner == 12


async def test_beside_an_honest_source_a_silent_peer_costs_less_than_a_deadline(world, autojump_clock):
    edge = edge_of(12)
    async with (
        world.learner() as learner,
        world.node(1, to=[learner]) as node,
        world.rogue(9, edge, answer=silent, to=[node]),
    ):
        learner.hold(edge)
        with trio.fail_after(limits.CHUNK_S):
            await fetch(node, edge)


async def slowly(stream, edge, index):
    await trio.sleep(0.2)
    await honest(stream, edge, index)


async def test_a_peer_that_dies_in_the_middle_is_replaced(world, autojump_clock):
    edge = edge_of(40)
    async with (
        world.learner() as learner,
        world.node(1, to=[learner]) as node,
        world.rogue(8, edge, answer=slowly, to=[node]) as dying,
        world.rogue(9, edge, answer=slowly, to=[node]) as staying,
    ):
        node.hold(edge, chunks=())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.swarm.fetch, edge.name)
            await trio.sleep(0.7)
            assert dying.asked
            world.network.kill(dying.peer)
            with trio.fail_after(10):
                while not node.store.is_complete(edge.name):
                    await trio.sleep(0.1)
        assert len(staying.asked) > len(dying.asked)


async def test_the_learner_dies_in_the_middle_and_the_peers_finish_without_it(world, autojump_clock):
    edge = edge_of(40)
    async with (
        world.node(1) as one,
        world.node(2, to=[one]) as two,
        world.rogue(LEARNER, edge, answer=slowly, to=[one, two]) as learner,
    ):
        one.hold(edge, chunks=range(0, 36, 2))
        two.hold(edge, chunks=range(1, 36, 2))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.swarm.fetch, edge.name)
            nursery.start_soon(two.swarm.fetch, edge.name)
            await trio.sleep(0.5)
            taken = one.store.held(edge.name) | two.store.held(edge.name)
            world.network.kill(LEARNER.peer)
            await trio.sleep(30)
            assert one.store.held(edge.name) == two.store.held(edge.name) == taken
            assert learner.asked
            async with world.learner() as again:
                again.hold(edge)
                for node in (one, two):
                    await node.mesh.connect(again.mesh.addresses[0])
                with trio.fail_after(10):
                    while not (one.store.is_complete(edge.name) and two.store.is_complete(edge.name)):
                        await trio.sleep(0.1)


async def test_a_fetch_goes_on_where_the_last_process_stopped(world, autojump_clock):
    edge = edge_of(40)
    async with world.learner(upload_bytes_per_s=40_000.0) as learner:
        learner.hold(edge)
        async with world.node(1, to=[learner]) as node:
            node.hold(edge, chunks=())
            with trio.move_on_after(2.0):
                await node.swarm.fetch(edge.name)
            held = len(node.store.held(edge.name))
            assert 0 < held < 40
        async with world.node(1, to=[learner]) as again:
            assert len(again.store.held(edge.name)) == held
            await fetch(again, edge)
            assert again.swarm.progress.chunks_from_learner == 40 - held


async def test_waiting_without_any_source_says_so_and_ends_when_one_appears(world, autojump_clock):
    edge = edge_of(4)
    async with world.node(1) as node:
        node.hold(edge, chunks=())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.swarm.fetch, edge.name)
            await trio.sleep(1000)
            assert "no peer that has any of it is connected" in node.swarm.progress.waiting_for
            async with world.node(2) as other:
                other.hold(edge)
                await node.mesh.connect(other.mesh.addresses[0])
                with trio.fail_after(10):
                    while not node.store.is_complete(edge.name):
                        await trio.sleep(0.1)
        assert node.swarm.progress.waiting_for == ""


# --- what is not served --------------------------------------------------------------------------------------------
async def greedy(mesh, peer, edge, index):
    stream = await mesh.open_stream(peer, CHUNK)
    try:
        await stream.send(ChunkRequest(manifest=edge.name, indices=(index,)).encode())
        return opened_answer(await stream.receive(1 << 20), answer_bytes=1 << 20)
    finally:
        await stream.reset()


async def test_an_ask_that_was_withdrawn_leaves_the_queue(world, autojump_clock):
    """Whoever gives a stream up is sent nothing more, and is not charged for it."""
    edge = edge_of(10)
    rate = len(edge.chunk(0)) / 1.5
    async with (
        world.learner(slots=1, upload_bytes_per_s=rate) as learner,
        world.network.join(bytes(32)) as stranger,
    ):
        learner.hold(edge)
        await stranger.connect(learner.mesh.addresses[0])
        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(greedy, stranger, LEARNER.peer, edge, index)
            await trio.sleep(1)
            assert learner.seeder.chunks_served == 1
            nursery.cancel_scope.cancel()
        started = trio.current_time()
        await greedy(stranger, LEARNER.peer, edge, 9)
        assert trio.current_time() - started < 2 * 1.5
        await trio.sleep(10)
        assert learner.seeder.chunks_served == 2


async def test_more_than_its_share_of_a_file_is_refused(world, autojump_clock):
    edge = edge_of(10)
    async with world.learner() as learner, world.network.join(bytes(32)) as stranger:
        learner.hold(edge)
        await stranger.connect(learner.mesh.addresses[0])
        for index in range(15):
            assert await greedy(stranger, LEARNER.peer, edge, index % 10) == edge.chunk(index % 10)
        with pytest.raises(Refused) as refused:
            await greedy(stranger, LEARNER.peer, edge, 5)
        assert refused.value.code == "chunk.served"
        assert learner.served() <= limits.SERVED_FILE_RATIO * len(edge.payload) + 100
        await trio.sleep(limits.SERVED_WINDOW_S + 1)
        assert await greedy(stranger, LEARNER.peer, edge, 5)


async def test_a_peer_that_is_not_admitted_gets_nothing(world, autojump_clock):
    edge = edge_of(3)
    async with world.node(1) as node, world.network.join(bytes(32)) as stranger:
        node.hold(edge)
        await stranger.connect(node.mesh.addresses[0])
        with pytest.raises(Refused) as refused:
            await greedy(stranger, node.peer, edge, 0)
        assert refused.value.code == "node.not_admitted"
        with pytest.raises(Refused) as refused:
            request = ManifestRequest(name=edge.name).encode()
            await ask(stranger, node.peer, MANIFEST, request, answer_bytes=1 << 20, deadline_s=5)
        assert refused.value.code == "node.not_admitted"
        assert node.served() == 0


@pytest.mark.parametrize(
    "admission",
    [pass_for(peer_of(3)), pass_for(peer_of(2), run="another-run"), b"garbage"],
    ids=["of another peer", "of another run", "garbage"],
)
async def test_a_wrong_pass_opens_nothing(world, autojump_clock, admission):
    edge = edge_of(3)
    async with world.node(1) as one, world.node(2, to=[one], admission=admission) as two:
        one.hold(edge)
        two.hold(edge, chunks=())
        with trio.move_on_after(60):
            await two.swarm.fetch(edge.name)
        assert two.store.held(edge.name) == frozenset()
        assert one.served() == 0


async def test_a_quarantined_peer_is_served_no_more(world, autojump_clock):
    edge = edge_of(30)
    async with world.node(1, upload_bytes_per_s=40_000.0) as one, world.node(2, to=[one]) as two:
        one.hold(edge)
        two.hold(edge, chunks=())
        with trio.move_on_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(two.swarm.fetch, edge.name)
                await trio.sleep(1)
                assert two.store.held(edge.name)
                one.sharing.passes.revoke(two.peer)
        assert not two.store.is_complete(edge.name)


async def test_the_learner_serves_whom_it_admits_and_looks_at_no_pass(world, autojump_clock):
    edge = edge_of(3)
    async with world.learner(admits=lambda peer: peer == peer_of(1)) as learner:
        learner.hold(edge)
        async with world.node(1, to=[learner], admission=b"x") as one, world.node(2, to=[learner]) as two:
            with trio.fail_after(10):
                await fetch(one, edge)
            with pytest.raises(LinkLost):
                await fetch(two, edge)


# --- manifests -------------------------------------------------------------------------------------------------------
async def test_a_manifest_comes_from_a_neighbour_when_the_learner_is_away(world, autojump_clock):
    edge = edge_of(5)
    async with world.node(1) as one, world.node(2, to=[one]) as two:
        one.hold(edge)
        with trio.fail_after(10):
            await fetch(two, edge)


async def test_a_neighbour_that_sends_another_manifest_is_shunned(world, autojump_clock):
    edge, other = edge_of(5), edge_of(6)

    async def answer(stream):
        await stream.receive(1 << 16)
        await stream.send(closed_answer(other.envelope))

    async with world.node(1) as node, world.rogue(9, edge, answer=honest, to=[node]) as rogue:
        rogue.mesh.serve(MANIFEST, answer)
        with pytest.raises(LinkLost), trio.fail_after(limits.TRANSFER_S + 10):
            await node.swarm.manifest(edge.name, max_bytes=1 << 20)
        assert node.fetching.conduct.is_shunned(rogue.peer, now=trio.current_time())
        assert node.store.names() == ()


async def test_learner_only_means_no_neighbours(world, autojump_clock):
    edge = edge_of(8)
    async with (
        world.learner() as learner,
        world.node(1) as one,
        world.node(2, to=[learner, one], learner_only=True) as two,
    ):
        learner.hold(edge)
        one.hold(edge)
        with trio.fail_after(10):
            await fetch(two, edge)
        assert two.swarm.progress.chunks_from_peers == 0


async def test_a_peer_hears_at_once_of_what_it_lacks_and_later_of_what_it_has(world, autojump_clock):
    edge = edge_of(20)
    async with world.node(1) as other, world.node(2, to=[other]) as node:
        other.hold(edge, chunks=range(10))
        node.hold(edge, chunks=())
        exchange, told = node.sharing.exchange, []

        async def watch():
            seen = 0
            while True:
                held = other.sharing.exchange.num_held(edge.name, node.peer)
                if held != seen:
                    seen = held
                    told.append((held, trio.current_time()))
                await trio.sleep(0.01)

        async with (
            exchange.fetching(edge.name) as mine,
            other.sharing.exchange.fetching(edge.name),
            trio.open_nursery() as nursery,
        ):
            exchange.join(mine, other.peer)
            await trio.sleep(1)
            nursery.start_soon(watch)
            started = trio.current_time()
            mine.gain(3)  # the other side has it
            await trio.sleep(limits.HAVE_LAZY_S / 2)
            assert told == []
            mine.gain(15)  # and lacks this one
            await trio.sleep(0.2)
            assert [held for held, _ in told] == [2]
            mine.gain(4)
            await trio.sleep(limits.HAVE_LAZY_S + 1)
            assert [held for held, _ in told] == [2, 3]
            assert told[1][1] - started > 1.5 * limits.HAVE_LAZY_S
            nursery.cancel_scope.cancel()
