"""How long the real swarm takes to spread a payload over shaped links, in virtual time, and how long it should take.

``python -m tests.unit.swarm.pace --nodes 4 8 16 32 --harm none killed corrupt hidden`` prints a table; ``test_pace``
holds some of its rows to the bound.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import trio
import trio.testing

from rollmesh_peer.mesh.requests import Route
from rollmesh_peer.weights.introductions import introduce
from rollmesh_protocol import limits
from rollmesh_protocol.messages import Head, PeersAnswer, PeersRequest
from rollmesh_protocol.streams import PEERS
from tests.unit.swarm.conftest import inline
from tests.unit.swarm.peers import IMAGE, World, corrupt, peer_of
from tests.unit.swarm.shaped import Rates, ShapedNetwork
from tests.unit.weights.kit import LEARNER, MIXED, sign

MBIT = 1e6 / 8
SOURCE = Rates(up=60 * MBIT, down=60 * MBIT)
DOWN = 20 * MBIT
SLOWEST, FASTEST = 4 * MBIT, 20 * MBIT
"""Uplinks are spread evenly between these."""
ROGUE = 900
SETTLE_S = 20.0
"""For the nodes to find neighbours before anything is published."""

HARMS = {
    "none": {},
    "killed": {"killed": 0.2},
    "corrupt": {"corrupting": 1},
    "hidden": {"hidden": 0.5},
}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Who is there, and what goes wrong. The uplinks of the nodes are drawn from ``seed``."""

    nodes: int
    seed: int = 0
    payload_bytes: int = 20_000_000
    latency_s: float = 0.04
    speed: float = 1.0
    """Of all links, against the rates above."""
    killed: float = 0.0
    """The share of the nodes that die in the middle."""
    corrupting: int = 0
    """Peers besides the nodes that send wrong bytes."""
    hidden: float = 0.0
    """The share of the nodes that nobody can dial."""

    def rates(self):
        chance, speed = Random(self.seed), self.speed
        down = DOWN * speed
        nodes = {peer_of(n): Rates(chance.uniform(SLOWEST, FASTEST) * speed, down) for n in range(1, self.nodes + 1)}
        rogues = {peer_of(ROGUE + n): Rates(FASTEST * speed, down) for n in range(self.corrupting)}
        return {LEARNER.peer: Rates(up=SOURCE.up * speed, down=SOURCE.down * speed), **nodes, **rogues}

    @property
    def bound_s(self):
        """The least time in which everybody can have everything, T*."""
        rates = self.rates()
        source_up = rates[LEARNER.peer].up
        uplinks = source_up + sum(rates[peer_of(n)].up for n in range(1, self.nodes + 1))
        size = self.payload_bytes
        return max(size / source_up, size / (DOWN * self.speed), self.nodes * size / uplinks)


@dataclass
class Outcome:
    """When each surviving node had everything, and what that took."""

    times: dict[int, float] = field(default_factory=dict)
    wasted: float = 0.0
    """What a node received beyond the payload, in payloads."""
    from_source: float = 0.0
    """What the source sent, in payloads."""
    source_busy: float = 0.0
    """The share of the time in which its uplink was."""
    nodes_busy: float = 0.0

    @property
    def last_s(self):
        return max(self.times.values())

    @property
    def most_s(self):
        """When 90 % of them had it."""
        return sorted(self.times.values())[math.ceil(0.9 * len(self.times)) - 1]


class Stage:
    """Plays one scene."""

    def __init__(self, scene, folder):
        self.scene = scene
        self.chance = Random(scene.seed)
        self.numbers = range(1, scene.nodes + 1)
        payload = np.random.default_rng(scene.seed).bytes(scene.payload_bytes)
        size = limits.PATCH_CHUNK_BYTES
        self.edge = sign(MIXED, version=1, parent=bytes(32), image=IMAGE, payload=payload, chunk_bytes=size)
        self.world = World(folder)
        self.hidden = frozenset(peer_of(n) for n in self.numbers if n <= scene.hidden * scene.nodes)
        self.network = self.world.network = ShapedNetwork(
            latency_s=scene.latency_s, rates=scene.rates(), hidden=self.hidden
        )
        self.members = {}
        self.outcome = Outcome()

    async def play(self):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.network.run)
            learner = await nursery.start(_stay, self._learner())
            nodes = {n: await nursery.start(_stay, self.world.node(n)) for n in self.numbers}
            for node in nodes.values():
                self.members[node.peer] = () if node.peer in self.hidden else node.mesh.addresses
                nursery.start_soon(node.mesh.connect, learner.mesh.addresses[0])
            await trio.sleep(SETTLE_S)
            for n in range(self.scene.corrupting):
                able = [node for node in nodes.values() if node.peer not in self.hidden]
                victims = self.chance.sample(able, min(4, len(able)))
                rogue = self.world.rogue(ROGUE + n, self.edge, answer=corrupt, to=victims)
                await nursery.start(_stay, rogue)
            learner.hold(self.edge)
            await self._spread(learner, nodes)
            nursery.cancel_scope.cancel()
        return self.outcome

    async def _spread(self, learner, nodes):
        scene, started = self.scene, trio.current_time()
        uplinks = {member.peer: member.mesh.uplink for member in (learner, *nodes.values())}
        before = {peer: uplink.sent for peer, uplink in uplinks.items()}
        dying = self.chance.sample(sorted(nodes), round(scene.killed * scene.nodes))
        alive = [n for n in nodes if n not in dying]
        async with trio.open_nursery() as others:
            with trio.fail_after(20 * scene.bound_s):
                async with trio.open_nursery() as survivors:
                    for n in nodes:
                        (others if n in dying else survivors).start_soon(self._fetch, n, nodes[n], started)
                    if dying:
                        await trio.sleep(scene.bound_s / 2)
                        for n in dying:
                            self.network.kill(nodes[n].peer)
            others.cancel_scope.cancel()
        self.outcome.times = {n: self.outcome.times[n] for n in alive}
        took_s, size = trio.current_time() - started, scene.payload_bytes
        busy = {peer: (link.sent - before[peer]) / link.rates.up / took_s for peer, link in uplinks.items()}
        self.outcome.source_busy = busy[learner.peer]
        self.outcome.nodes_busy = float(np.mean([busy[nodes[n].peer] for n in alive]))
        self.outcome.from_source = learner.served() / size
        self.outcome.wasted = float(np.mean([nodes[n].mesh.received for n in alive])) / size - 1

    async def _fetch(self, number, node, started):
        await node.swarm.manifest(self.edge.name, max_bytes=limits.MANIFEST_BYTES)
        await node.swarm.fetch(self.edge.name)
        self.outcome.times[number] = trio.current_time() - started

    @asynccontextmanager
    async def _learner(self):
        async def peers(peer, message):
            count = PeersRequest.decode(message, limit=limits.SMALL_BYTES).count
            chosen = introduce(self.members, to=peer, count=count, random=self.chance)
            return PeersAnswer(peers=chosen, head=Head(version=1, step=0, root=bytes(32))).encode()

        async with self.world.learner() as learner:
            small, large = limits.SMALL_BYTES, limits.PEERS_BYTES
            learner.router.register(
                learner.mesh, Route(protocol=PEERS, request_bytes=small, answer_bytes=large, handle=peers)
            )
            yield learner


async def _stay(member, task_status):
    """Be there until killed."""
    async with member as present:
        task_status.started(present)
        await trio.sleep_forever()


def measure(scene, folder, monkeypatch):
    """The outcome of a scene, the same every time."""
    monkeypatch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    monkeypatch.setattr(trio._core._run, "_r", Random(scene.seed))
    monkeypatch.setattr(trio.to_thread, "run_sync", inline)
    return trio.run(Stage(scene, folder).play, clock=trio.testing.MockClock(autojump_threshold=0))


def main():
    import pytest

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("--harm", nargs="*", default=["none"], choices=HARMS)
    parser.add_argument("--speed", type=float, default=1.0, help="all rates times this")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    options = parser.parse_args()
    for harm in options.harm:
        for nodes in options.nodes:
            for seed in options.seeds:
                scene = Scene(nodes=nodes, seed=seed, speed=options.speed, **HARMS[harm])
                began = time.monotonic()
                with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
                    got = measure(scene, Path(folder), patch)
                bound_s = scene.bound_s
                print(
                    f"{harm:8} N={nodes:<3} seed={seed:<3} T*={bound_s:5.2f} s  90%={got.most_s:5.2f} "
                    f"last={got.last_s:5.2f}  (last - 1 s)/T*={(got.last_s - 1) / bound_s:4.2f}  "
                    f"from source={got.from_source:4.2f} F  wasted={got.wasted:5.3f} F  "
                    f"busy: source={got.source_busy:4.2f} nodes={got.nodes_busy:4.2f}  "
                    f"[{time.monotonic() - began:.0f} s]",
                    flush=True,
                )


if __name__ == "__main__":
    main()
