"""Two worlds in which meshes meet, behind one interface: inside this process, and over sockets on loopback."""

from __future__ import annotations

from contextlib import asynccontextmanager

import trio

from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_peer.testing.memory_mesh import MemoryNetwork


def seed(number: int) -> bytes:
    """A key seed by number."""
    return number.to_bytes(32, "big")


async def eventually(condition, *, within=5.0):
    """Wait until ``condition()`` holds; for states of real sockets and processes that nothing announces."""
    with trio.fail_after(within):
        while not condition():
            await trio.sleep(0.01)


class MemoryWorld:
    name = "memory"

    def __init__(self):
        self.network = MemoryNetwork()

    @asynccontextmanager
    async def join(self, number):
        async with self.network.join(seed(number)) as mesh:
            yield mesh


class SocketWorld:
    name = "libp2p"

    @asynccontextmanager
    async def join(self, number):
        options = HostOptions(key_seed=seed(number), listen=("/ip4/127.0.0.1/tcp/0",))
        async with open_mesh(options) as mesh:
            yield mesh


WORLDS = {"memory": MemoryWorld, "libp2p": SocketWorld}
