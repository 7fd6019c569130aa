"""The chunk swarm over real sockets: one learner here, nodes as processes, all on loopback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from random import Random

import numpy as np
import pytest
import trio

from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_peer.mesh.requests import Route, Router
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.introductions import introduce
from rollmesh_peer.weights.passes import PassBook
from rollmesh_peer.weights.sharing import Sharing
from rollmesh_protocol import limits
from rollmesh_protocol.messages import Head, PeersAnswer, PeersRequest
from rollmesh_protocol.streams import PEERS
from tests.unit.swarm.peers import IMAGE
from tests.unit.weights.kit import LEARNER, MIXED, RUN, sign, write

pytestmark = pytest.mark.timeout(400)

PATIENCE_S = 240.0
"""For what takes some ten seconds on a quiet machine."""
PAYLOAD_BYTES = 30_000_000
NODES = 4
FAST = 20_000_000.0
"""Bytes a second of a learner's uplink: less than loopback, so that nobody is done before the others begin."""
SLOW = 6_000_000.0
"""The same, with a middle to interfere in."""


class Learner:
    """Serves one payload and introduces the nodes it knows."""

    def __init__(self, mesh, sharing):
        self.mesh = mesh
        self.sharing = sharing
        self.members = {}

    async def peers(self, peer, message):
        request = PeersRequest.decode(message, limit=limits.SMALL_BYTES)
        chosen = introduce(self.members, to=peer, count=request.count, random=Random(0))
        return PeersAnswer(peers=chosen, head=Head(version=1, step=0, root=bytes(32))).encode()


@asynccontextmanager
async def learner_with(edge, folder, **options):
    store = EdgeStore(folder, run=RUN, learner=LEARNER.peer, layout=MIXED, quota_bytes=limits.GIB)
    store.add_manifest(edge.name, edge.envelope, payload=write(folder.parent / "published", edge.payload))
    host = HostOptions(key_seed=LEARNER.seed, listen=("/ip4/127.0.0.1/tcp/0",), gossip=False)
    async with open_mesh(host) as mesh, trio.open_nursery() as nursery:
        passes = PassBook(run=RUN, learner=LEARNER.peer, newest_version=lambda: 0, admits=lambda peer: True)
        learner = Learner(mesh, Sharing(mesh, store=store, passes=passes, origin=Random(0), **options))
        introductions = Route(
            protocol=PEERS,
            request_bytes=limits.SMALL_BYTES,
            answer_bytes=limits.PEERS_BYTES,
            handle=learner.peers,
        )
        Router().register(mesh, *learner.sharing.routes(), introductions)
        nursery.start_soon(learner.sharing.run)
        yield learner
        nursery.cancel_scope.cancel()


class Node:
    """A child process."""

    def __init__(self, process):
        self.process = process
        self._text = b""

    async def hear(self):
        while b"\n" not in self._text:
            piece = await self.process.stdout.receive_some()
            assert piece, "a node ended"
            self._text += piece
        line, _, self._text = self._text.partition(b"\n")
        return json.loads(line)


@asynccontextmanager
async def node_process(number, folder, *, learner, name):
    command = [sys.executable, "-m", "tests.support.swarm_child", str(number), str(folder), learner, name.hex()]
    command += [str(NODES - 1)]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Node(process)
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()


def published():
    payload = np.random.default_rng(0).bytes(PAYLOAD_BYTES)
    return sign(MIXED, version=1, parent=bytes(32), image=IMAGE, payload=payload, chunk_bytes=limits.PATCH_CHUNK_BYTES)


async def start_nodes(stack, learner, edge, tmp_path):
    """Nodes that are introduced to each other and have begun to fetch."""
    nodes = []
    for number in range(1, NODES + 1):
        folder = tmp_path / f"node{number}"
        process = node_process(number, folder, learner=learner.mesh.addresses[0], name=edge.name)
        nodes.append(await stack.enter_async_context(process))
    for node in nodes:
        hello = await node.hear()
        learner.members[hello["peer"]] = (hello["address"],)
    for node in nodes:
        await node.hear()
    for node in nodes:
        await node.process.stdin.send_all(b"!")
    return nodes


def is_spread(tmp_path, edge):
    """True when every chunk lies on the disk of some node."""
    size = edge.manifest.chunk_bytes
    missing = set(range(edge.manifest.chunk_count))
    for number in range(1, NODES + 1):
        for suffix in ("part", "payload"):
            with suppress(FileNotFoundError):
                held = (tmp_path / f"node{number}" / f"{edge.name.hex()}.{suffix}").read_bytes()
                places = ((index, slice(index * size, (index + 1) * size)) for index in missing)
                missing -= {index for index, place in places if held[place] == edge.payload[place]}
    return not missing


def is_whole(tmp_path, number, edge):
    return (tmp_path / f"node{number}" / f"{edge.name.hex()}.payload").read_bytes() == edge.payload


async def test_four_nodes_fetch_thirty_megabytes_mostly_from_each_other(tmp_path):
    edge = published()
    with trio.fail_after(PATIENCE_S):
        async with (
            learner_with(edge, tmp_path / "learner", upload_bytes_per_s=FAST) as learner,
            AsyncExitStack() as stack,
        ):
            nodes = await start_nodes(stack, learner, edge, tmp_path)
            figures = [await node.hear() for node in nodes]
            served = learner.sharing.seeder.bytes_served
    print(json.dumps({"origin": served / PAYLOAD_BYTES, "nodes": figures}, indent=1))
    for number, figure in enumerate(figures, start=1):
        assert is_whole(tmp_path, number, edge)
        assert figure["learner"] + figure["peers"] == PAYLOAD_BYTES
        assert figure["chunks_from_peers"] > 0
    assert served < 3 * PAYLOAD_BYTES


async def test_the_rest_finish_when_one_node_is_killed_and_one_is_stopped(tmp_path):
    edge = published()
    with trio.fail_after(PATIENCE_S):
        async with (
            learner_with(edge, tmp_path / "learner", upload_bytes_per_s=SLOW) as learner,
            AsyncExitStack() as stack,
        ):
            nodes = await start_nodes(stack, learner, edge, tmp_path)
            while learner.sharing.seeder.bytes_served < PAYLOAD_BYTES // 3:
                await trio.sleep(0.02)
            nodes[0].process.kill()
            nodes[1].process.send_signal(signal.SIGSTOP)
            figures = [await node.hear() for node in nodes[2:]]
            nodes[1].process.send_signal(signal.SIGCONT)
            figures.append(await nodes[1].hear())
            served = learner.sharing.seeder.bytes_served
    print(json.dumps({"origin": served / PAYLOAD_BYTES, "nodes": figures}, indent=1))
    assert all(is_whole(tmp_path, number, edge) for number in (2, 3, 4))


async def test_the_nodes_finish_among_themselves_when_the_learner_is_gone(tmp_path):
    edge = published()
    with trio.fail_after(PATIENCE_S):
        async with AsyncExitStack() as stack:
            async with learner_with(edge, tmp_path / "learner", upload_bytes_per_s=SLOW) as learner:
                nodes = await start_nodes(stack, learner, edge, tmp_path)
                while learner.sharing.seeder.chunks_sent_once(edge.name) < edge.manifest.chunk_count:
                    await trio.sleep(0.02)
                while not is_spread(tmp_path, edge):  # the last ones may be on their way still
                    await trio.sleep(0.1)
            figures = [await node.hear() for node in nodes]
    print(json.dumps(figures, indent=1))
    assert all(is_whole(tmp_path, number, edge) for number in range(1, NODES + 1))
