"""A learner and a node's own parts on one memory network, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import trio

from rollmesh_node.joining import Membership
from rollmesh_node.uplink import Uplink
from rollmesh_peer.mesh.keeping import LinkKeeper
from rollmesh_peer.testing.fake_learner import FakeLearner
from rollmesh_peer.testing.memory_mesh import MemoryMesh, MemoryNetwork
from rollmesh_protocol.messages import MAJOR, Hello, RunCard
from tests.unit.node.cards import LAYOUT, LEARNER, NODE, make_card

SOON_S = 20.0
"""Deadline of every wait; what is waited for takes milliseconds."""
LEARNER_PORT = 4700


@dataclass(kw_only=True)
class World:
    network: MemoryNetwork
    learner: FakeLearner
    mesh: MemoryMesh
    uplink: Uplink
    membership: Membership
    nursery: trio.Nursery
    checked: list[RunCard] = field(default_factory=list)
    pinned: list[RunCard] = field(default_factory=list)

    async def until(self, condition) -> None:
        """Until ``condition(learner)`` holds."""
        with trio.fail_after(SOON_S):
            await self.learner.until(condition)


def image(version: int) -> bytes:
    return bytes([version % 256]) * LAYOUT.image_bytes


@contextlib.asynccontextmanager
async def open_learner(network: MemoryNetwork, folder: Path, *, card=None) -> AsyncIterator[FakeLearner]:
    folder.mkdir(parents=True, exist_ok=True)
    async with network.join(LEARNER.seed, port=LEARNER_PORT) as mesh, trio.open_nursery() as nursery:
        learner = FakeLearner(mesh, identity=LEARNER, card=card or make_card(), folder=folder)
        nursery.start_soon(learner.run)
        await learner.publish(image(1))
        yield learner
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def open_world(folder: Path, *, card=None) -> AsyncIterator[World]:
    """A learner with version 1, and a node that has not said hello yet."""
    network = MemoryNetwork()
    checked: list[RunCard] = []
    pinned: list[RunCard] = []
    async with (
        open_learner(network, folder / "learner", card=card) as learner,
        network.join(NODE.seed) as mesh,
        trio.open_nursery() as nursery,
    ):
        link = LinkKeeper(mesh, learner.mesh.addresses)
        nursery.start_soon(link.run)
        uplink = Uplink(mesh, link)
        membership = Membership(uplink, node=NODE.peer, hello=hello, check=checked.append, pin=pinned.append)
        yield World(
            network=network, learner=learner, mesh=mesh, uplink=uplink, membership=membership, nursery=nursery,
            checked=checked, pinned=pinned,
        )  # fmt: skip
        nursery.cancel_scope.cancel()


def hello() -> Hello:
    return Hello(majors=(MAJOR,), software="test", name="pc", role="worker", engine=None, addresses=(), invite=None)
