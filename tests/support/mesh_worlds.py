"""Two worlds in which meshes meet, behind one interface: inside this process, and over sockets on loopback."""

from __future__ import annotations

from contextlib import asynccontextmanager

import trio
import trio.testing

from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_peer.testing.memory_mesh import MemoryNetwork


def seed(number: int) -> bytes:
    """A key seed by number."""
    return number.to_bytes(32, "big")


async def eventually(condition, *, within=20.0):
    """Wait until ``condition()`` holds; for states of real sockets and processes that nothing announces."""
    with trio.fail_after(within):
        while not condition():
            await trio.sleep(0.01)


class MemoryWorld:
    """Everything is known everywhere at once."""

    name = "memory"

    def __init__(self):
        self.network = MemoryNetwork()

    @asynccontextmanager
    async def join(self, number):
        async with self.network.join(seed(number)) as mesh:
            yield mesh

    async def gossip_is_up(self, *meshes, topic):
        pass


async def gossip_is_up(*meshes, topic):
    """Every subscription to ``topic`` is known to the neighbours, and they pass messages on to each other."""

    def is_up():
        by_peer = {mesh.peer_id: mesh._gossip for mesh in meshes}
        for mesh in meshes:
            gossip = mesh._gossip
            for peer in set(mesh.links()) & {peer for peer, other in by_peer.items() if topic in other.topic_ids}:
                if peer not in map(str, gossip.peer_topics.get(topic, ())):
                    return False
                if topic in gossip.topic_ids and peer not in map(str, gossip.overlay.mesh.get(topic, ())):
                    return False
        return True

    await trio.testing.wait_all_tasks_blocked()
    await eventually(is_up, within=20)


class SocketWorld:
    """Real sockets on loopback, in one process."""

    name = "libp2p"

    @asynccontextmanager
    async def join(self, number):
        options = HostOptions(key_seed=seed(number), listen=("/ip4/127.0.0.1/tcp/0",))
        async with open_mesh(options) as mesh:
            yield mesh

    async def gossip_is_up(self, *meshes, topic):
        await gossip_is_up(*meshes, topic=topic)


WORLDS = {"memory": MemoryWorld, "libp2p": SocketWorld}
