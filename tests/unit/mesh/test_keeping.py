"""Keeping a link, over the memory mesh and under a virtual clock."""

from __future__ import annotations

import random

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_peer.mesh.keeping import Backoff, LinkKeeper, dial_remembered
from rollmesh_peer.mesh.peer_cache import PeerCache
from rollmesh_peer.testing.memory_mesh import MemoryNetwork
from rollmesh_protocol import limits
from rollmesh_protocol.errors import UsageError

LEARNER = bytes(31) + b"\x01"
NODE = bytes(31) + b"\x02"


def test_the_wait_doubles_up_to_its_bound():
    waits, backoff = [], Backoff()
    for _ in range(12):
        backoff = backoff.failed()
        waits.append(backoff.delay_s(chance=1.0))
    assert waits[:4] == [0.25, 0.5, 1.0, 2.0]
    assert waits[-1] == limits.BACKOFF_MOST_S


@given(st.integers(min_value=0, max_value=10_000), st.floats(min_value=0, max_value=0.999))
def test_the_wait_is_never_nothing_and_never_long(failures, chance):
    delay_s = Backoff(failures).delay_s(chance=chance)
    assert limits.BACKOFF_FIRST_S / 2 <= delay_s <= limits.BACKOFF_MOST_S


class CountingMesh:
    """Counts the dials of a mesh."""

    def __init__(self, mesh):
        self._mesh = mesh
        self.dials = []

    def __getattr__(self, name):
        return getattr(self._mesh, name)

    async def connect(self, address):
        self.dials.append((trio.current_time(), address))
        return await self._mesh.connect(address)


async def test_a_learner_that_comes_late_goes_and_returns(autojump_clock, nursery):
    network = MemoryNetwork()
    async with network.join(NODE) as mesh:
        counting = CountingMesh(mesh)
        async with network.join(LEARNER, port=4700) as learner:
            address, peer = learner.addresses[0], learner.peer_id
        keeper = LinkKeeper(counting, [address], chance=random.Random(1))
        nursery.start_soon(keeper.run)
        assert keeper.waiting_for == "connecting to the learner"
        await trio.sleep(600)
        assert not keeper.is_linked
        assert keeper.waiting_for.startswith("the learner at /ip4/127.0.0.1/tcp/4700 does not answer; next try in ")
        assert 600 / limits.BACKOFF_MOST_S <= len(counting.dials) <= 2 * 600 / limits.BACKOFF_MOST_S + 10
        for _ in range(3):
            async with network.join(LEARNER, port=4700):
                with trio.fail_after(limits.BACKOFF_MOST_S + 1):
                    await keeper.wait_linked()
                assert keeper.waiting_for == ""
                assert peer in mesh.links()
                await trio.sleep(limits.STEADY_S + 1)
            await trio.sleep(0.01)
            assert not keeper.is_linked
            assert keeper.waiting_for.startswith("the connection to the learner was lost")
        nursery.cancel_scope.cancel()


async def test_after_a_steady_link_the_first_try_comes_soon(autojump_clock, nursery):
    network = MemoryNetwork()
    async with network.join(NODE) as mesh, network.join(LEARNER) as learner:
        keeper = LinkKeeper(mesh, learner.addresses)
        nursery.start_soon(keeper.run)
        await keeper.wait_linked()
        await trio.sleep(limits.STEADY_S + 1)
        await learner.disconnect(mesh.peer_id)
        started = trio.current_time()
        await trio.testing.wait_all_tasks_blocked()
        await keeper.wait_linked()
        assert trio.current_time() - started <= limits.BACKOFF_FIRST_S
        nursery.cancel_scope.cancel()


async def test_a_link_that_never_lasts_is_tried_less_and_less(autojump_clock, nursery):
    network = MemoryNetwork()
    async with network.join(NODE) as mesh, network.join(LEARNER) as learner:
        counting = CountingMesh(mesh)
        keeper = LinkKeeper(counting, learner.addresses)
        nursery.start_soon(keeper.run)
        with trio.move_on_after(300):
            while True:
                await keeper.wait_linked()
                await trio.sleep(0.1)
                await learner.disconnect(mesh.peer_id)
                await trio.testing.wait_all_tasks_blocked()
        assert len(counting.dials) < 35
        nursery.cancel_scope.cancel()


async def test_every_address_is_tried_and_the_good_one_comes_first(autojump_clock, nursery, tmp_path):
    network = MemoryNetwork()
    async with network.join(NODE) as mesh, network.join(LEARNER, port=4700) as learner:
        counting = CountingMesh(mesh)
        dead = learner.addresses[0].replace("4700", "1")
        cache = PeerCache(tmp_path / "peers.json")
        keeper = LinkKeeper(counting, [dead, learner.addresses[0]], cache=cache)
        nursery.start_soon(keeper.run)
        await keeper.wait_linked()
        assert [address for _, address in counting.dials] == [dead, learner.addresses[0]]
        counting.dials.clear()
        await learner.disconnect(mesh.peer_id)
        await trio.testing.wait_all_tasks_blocked()
        await keeper.wait_linked()
        assert [address for _, address in counting.dials] == [learner.addresses[0]]
        assert cache.addresses_of(learner.peer_id) == learner.addresses
        nursery.cancel_scope.cancel()


async def test_a_remembered_address_is_tried_too(autojump_clock, nursery, tmp_path):
    network = MemoryNetwork()
    async with network.join(NODE) as mesh, network.join(LEARNER, port=4700) as learner:
        cache = PeerCache(tmp_path / "peers.json")
        cache.remember(learner.addresses[0])
        keeper = LinkKeeper(mesh, [learner.addresses[0].replace("4700", "1")], cache=cache)
        nursery.start_soon(keeper.run)
        await keeper.wait_linked()
        nursery.cancel_scope.cancel()


async def test_peers_of_the_last_run_are_dialled_once(autojump_clock, tmp_path):
    network = MemoryNetwork()
    cache = PeerCache(tmp_path / "peers.json")
    async with network.join(NODE) as mesh, network.join(LEARNER) as one, network.join(bytes(32)) as other:
        cache.remember(other.addresses[0])
        cache.remember("/ip4/127.0.0.1/tcp/1/p2p/" + one.peer_id)
        cache.remember(mesh.addresses[0])
        assert await dial_remembered(mesh, cache, at_most=5) == 1
        assert list(mesh.links()) == [other.peer_id]
        assert await dial_remembered(mesh, cache, at_most=0) == 0


async def test_addresses_must_name_one_peer():
    network = MemoryNetwork()
    async with network.join(NODE) as mesh, network.join(LEARNER) as learner:
        for addresses in ([], [*mesh.addresses, *learner.addresses], ["garbage"]):
            with pytest.raises(UsageError):
                LinkKeeper(mesh, addresses)


async def test_a_cut_and_its_healing(autojump_clock, nursery):
    network = MemoryNetwork()
    async with network.join(NODE) as mesh, network.join(LEARNER) as learner:
        keeper = LinkKeeper(mesh, learner.addresses, name="the seed")
        nursery.start_soon(keeper.run)
        await keeper.wait_linked()
        network.cut(mesh.peer_id, learner.peer_id)
        await trio.sleep(100)
        assert "the seed" in keeper.waiting_for
        network.heal(mesh.peer_id, learner.peer_id)
        with trio.fail_after(limits.BACKOFF_MOST_S + 1):
            await keeper.wait_linked()
        network.kill(learner.peer_id)
        await trio.sleep(1)
        assert not keeper.is_linked
        nursery.cancel_scope.cancel()
