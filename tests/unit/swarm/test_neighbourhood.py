"""Neighbours found, kept, replaced and dropped, on a memory mesh under a virtual clock."""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import pytest
import trio

from rollmesh_peer.mesh.peer_cache import PeerCache
from rollmesh_peer.mesh.requests import Route, Router
from rollmesh_peer.testing.memory_mesh import MemoryNetwork
from rollmesh_peer.weights.conduct import ConductBook
from rollmesh_peer.weights.introductions import introduce
from rollmesh_peer.weights.neighbourhood import Neighbourhood
from rollmesh_protocol import limits
from rollmesh_protocol.messages import Head, PeersAnswer, PeersRequest
from rollmesh_protocol.streams import PEERS
from tests.unit.swarm.peers import seed
from tests.unit.weights.kit import LEARNER

HEAD = Head(version=4, step=3, root=bytes(32))


class Town:
    """A learner that introduces everybody to everybody, and people to be introduced."""

    def __init__(self):
        self.network = MemoryNetwork()
        self.people = {}
        self.asked = 0

    @asynccontextmanager
    async def learner(self):
        async def peers(peer, message):
            self.asked += 1
            count = PeersRequest.decode(message, limit=1 << 16).count
            known = {name: mesh.addresses for name, mesh in self.people.items()}
            return PeersAnswer(peers=introduce(known, to=peer, count=count, random=Random(0)), head=HEAD).encode()

        async with self.network.join(LEARNER.seed) as mesh:
            route = Route(protocol=PEERS, request_bytes=1 << 16, answer_bytes=limits.PEERS_BYTES, handle=peers)
            Router().register(mesh, route)
            yield mesh

    async def settle(self, stack, *numbers):
        for number in numbers:
            mesh = await stack.enter_async_context(self.network.join(seed(number)))
            self.people[mesh.peer_id] = mesh

    @asynccontextmanager
    async def newcomer(self, *, to=None, **options):
        async with self.network.join(seed(999)) as mesh, trio.open_nursery() as nursery:
            self.heads = []
            options.setdefault("conduct", ConductBook())
            neighbourhood = Neighbourhood(
                mesh, learner=LEARNER.peer, random=Random(1), on_head=self.heads.append, **options
            )
            if to is not None:
                await mesh.connect(to.addresses[0])
            nursery.start_soon(neighbourhood.run)
            yield mesh, neighbourhood
            nursery.cancel_scope.cancel()


@pytest.fixture
def town():
    return Town()


async def test_it_finds_as_many_as_it_wants_through_the_learner(town, autojump_clock):
    async with town.learner() as learner, AsyncExitStack() as stack:
        await town.settle(stack, *range(1, 31))
        async with town.newcomer(to=learner) as (_mesh, neighbourhood):
            await trio.sleep(10)
            assert len(neighbourhood.peers()) == limits.NEIGHBOURS_WANTED
            assert LEARNER.peer not in neighbourhood.peers()
            assert town.heads[0] == HEAD
            asked = town.asked
            await trio.sleep(120)
            assert town.asked <= asked + 1


async def test_lost_neighbours_are_replaced_also_without_the_learner(town, autojump_clock):
    async with town.learner() as learner, AsyncExitStack() as stack:
        await town.settle(stack, *range(1, 13))
        async with town.newcomer(to=learner) as (_mesh, neighbourhood):
            await trio.sleep(10)
            town.network.kill(LEARNER.peer)
            for peer in neighbourhood.peers()[:4]:
                town.network.kill(peer)
            assert len(neighbourhood.peers()) == 4
            await trio.sleep(60)
            assert len(neighbourhood.peers()) == 8


async def test_those_who_dial_us_count_and_there_are_never_too_many(town, autojump_clock):
    async with AsyncExitStack() as stack:
        await town.settle(stack, *range(1, 25))
        async with town.newcomer() as (mesh, neighbourhood):
            for other in town.people.values():
                await other.connect(mesh.addresses[0])
            await trio.sleep(10)
            assert len(neighbourhood.peers()) == limits.MAX_NEIGHBOURS


async def test_a_shunned_peer_is_disconnected_and_not_dialled_again(town, autojump_clock):
    conduct = ConductBook()
    async with town.learner() as learner, AsyncExitStack() as stack:
        await town.settle(stack, 1, 2, 3)
        async with town.newcomer(to=learner, conduct=conduct) as (mesh, neighbourhood):
            await trio.sleep(10)
            bad = neighbourhood.peers()[0]
            conduct.shun(bad, now=trio.current_time())
            assert bad not in neighbourhood.peers()
            await trio.sleep(60)
            assert bad not in mesh.links()
            assert len(neighbourhood.peers()) == 2


async def test_learner_only_dials_nobody_and_has_no_neighbours(town, autojump_clock):
    async with town.learner() as learner, AsyncExitStack() as stack:
        await town.settle(stack, 1, 2, 3)
        async with town.newcomer(to=learner, learner_only=True) as (mesh, neighbourhood):
            await trio.sleep(100)
            assert set(mesh.links()) == {LEARNER.peer}
            assert town.asked == 0
            await town.people[next(iter(town.people))].connect(mesh.addresses[0])
            assert neighbourhood.peers() == ()


async def test_the_useless_make_room_when_there_are_others(town, autojump_clock):
    async with town.learner() as learner, AsyncExitStack() as stack:
        await town.settle(stack, *range(1, 31))
        async with town.newcomer(to=learner) as (_mesh, neighbourhood):
            await trio.sleep(10)
            first = set(neighbourhood.peers())
            useful = set(list(first)[:5])
            for _ in range(20):
                neighbourhood.fetch_ended(useful)
                await trio.sleep(5)
            now = set(neighbourhood.peers())
            assert useful <= now
            assert now != first
            assert len(now) == limits.NEIGHBOURS_WANTED


async def test_peers_of_the_last_run_are_dialled_before_the_learner_answers(town, autojump_clock, tmp_path):
    cache = PeerCache(tmp_path / "peers.json")
    async with AsyncExitStack() as stack:
        await town.settle(stack, 1, 2)
        for other in town.people.values():
            cache.remember(other.addresses[0])
        async with town.newcomer(cache=PeerCache(tmp_path / "peers.json")) as (_mesh, neighbourhood):
            await trio.sleep(5)
            assert set(neighbourhood.peers()) == set(town.people)


async def test_found_neighbours_are_remembered(town, autojump_clock, tmp_path):
    cache = PeerCache(tmp_path / "peers.json")
    async with town.learner() as learner, AsyncExitStack() as stack:
        await town.settle(stack, 1, 2)
        async with town.newcomer(to=learner, cache=cache):
            await trio.sleep(10)
    assert set(PeerCache(tmp_path / "peers.json").peers()) == set(town.people)


async def test_a_peer_that_cannot_be_reached_is_tried_less_and_less(town, autojump_clock):
    async with town.learner() as learner, AsyncExitStack() as stack:
        await town.settle(stack, 1)
        (gone,) = town.people
        town.network.kill(gone)
        async with town.newcomer(to=learner) as (mesh, _neighbourhood):
            dials = []
            connect = mesh.connect

            async def counting(address):
                dials.append(trio.current_time())
                return await connect(address)

            mesh.connect = counting
            await trio.sleep(600)
            gaps = [later - earlier for earlier, later in itertools.pairwise(dials)]
            assert 4 <= len(dials) <= 12
            assert gaps[-1] > 10 * gaps[0]
