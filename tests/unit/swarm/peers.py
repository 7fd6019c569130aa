"""Peers of a swarm on a memory mesh: a learner, nodes, and some that misbehave."""

from __future__ import annotations

from contextlib import asynccontextmanager
from random import Random

import numpy as np
import trio

from rollmesh_peer.mesh.requests import Router, closed_answer
from rollmesh_peer.testing.memory_mesh import MemoryNetwork
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.passes import PassBook
from rollmesh_peer.weights.sharing import Fetching, Sharing
from rollmesh_protocol import limits
from rollmesh_protocol.chunks import to_bitmap
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.messages import ChunkRequest, HaveUpdate, Pass
from rollmesh_protocol.streams import CHUNK, HAVE
from tests.unit.weights.kit import CHUNK as CHUNK_BYTES
from tests.unit.weights.kit import LEARNER, MIXED, RUN, SignedEdge, random_image, sign

IMAGE = random_image(MIXED, 1)


def seed(number: int) -> bytes:
    return number.to_bytes(32, "big")


def peer_of(number: int) -> str:
    return Identity(seed(number)).peer


def edge_of(chunks: int, *, version: int = 1, number: int = 0) -> SignedEdge:
    """An edge whose payload is noise: it is fetched, and never applied."""
    payload = np.random.default_rng(1000 * version + number).bytes(chunks * CHUNK_BYTES - 100)
    return sign(MIXED, version=version, parent=bytes(32), image=IMAGE, payload=payload)


def pass_for(peer: str, *, version: int = 0, identity: Identity = LEARNER, run: str = RUN) -> bytes:
    shown = Pass(peer=peer, issued_version=version)
    return seal(shown.encode(), run=run, kind="pass", identity=identity).encode()


class Member:
    """A peer with everything in place."""

    def __init__(self, mesh, sharing, fetching):
        self.mesh = mesh
        self.peer = mesh.peer_id
        self.store = sharing.store
        self.sharing = sharing
        self.seeder = sharing.seeder
        self.fetching = fetching
        self.router = Router()

    @property
    def swarm(self):
        return self.fetching.swarm

    def hold(self, edge: SignedEdge, chunks=None) -> None:
        """Put an edge's manifest, and these of its chunks (all by default), into the store."""
        self.store.add_manifest(edge.name, edge.envelope)
        for index in range(edge.manifest.chunk_count) if chunks is None else chunks:
            self.store.write_chunk(edge.name, index, edge.chunk(index))

    def served(self) -> int:
        return self.seeder.bytes_served


class World:
    """Members of one run on one memory network."""

    def __init__(self, folder):
        self.folder = folder
        self.network = MemoryNetwork()

    @asynccontextmanager
    async def learner(self, *, admits=lambda peer: True, **options):
        async with self.network.join(LEARNER.seed) as mesh:
            passes = PassBook(run=RUN, learner=LEARNER.peer, newest_version=lambda: 0, admits=admits)
            sharing = Sharing(mesh, store=self.store("learner"), passes=passes, origin=Random(0), **options)
            async with self._running(Member(mesh, sharing, None)) as member:
                yield member

    @asynccontextmanager
    async def node(self, number, *, to=(), admission=None, learner_only=False, **options):
        async with self.network.join(seed(number)) as mesh:
            sealed = pass_for(mesh.peer_id) if admission is None else admission
            passes = PassBook(run=RUN, learner=LEARNER.peer, newest_version=lambda: 0)
            sharing = Sharing(
                mesh, store=self.store(f"node{number}"), passes=passes, admission=lambda: sealed, **options
            )
            fetching = Fetching(sharing, learner=LEARNER.peer, random=Random(number), learner_only=learner_only)
            async with self._running(Member(mesh, sharing, fetching)) as member:
                for other in to:
                    await mesh.connect(other.mesh.addresses[0])
                yield member

    @asynccontextmanager
    async def rogue(self, number, edge, *, chunks=None, answer, to=()):
        """A peer that claims to hold chunks of ``edge`` and answers requests with ``answer(stream, index)``."""
        key = number.seed if isinstance(number, Identity) else seed(number)
        async with self.network.join(key) as mesh:
            rogue = Rogue(mesh, edge, chunks, answer)
            for other in to:
                await mesh.connect(other.mesh.addresses[0])
            yield rogue

    def store(self, name):
        folder = self.folder / name
        return EdgeStore(folder, run=RUN, learner=LEARNER.peer, layout=MIXED, quota_bytes=limits.GIB)

    @asynccontextmanager
    async def _running(self, member):
        member.router.register(member.mesh, *member.sharing.routes())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(member.sharing.run)
            if member.fetching is not None:
                nursery.start_soon(member.fetching.run)
            yield member
            nursery.cancel_scope.cancel()


class Rogue:
    """Says that it has chunks, and does what it likes when asked for one."""

    def __init__(self, mesh, edge, chunks, answer):
        self.mesh = mesh
        self.peer = mesh.peer_id
        self.asked = []
        self._edge = edge
        self._chunks = range(edge.manifest.chunk_count) if chunks is None else chunks
        self._answer = answer
        mesh.serve(HAVE, self._have)
        mesh.serve(CHUNK, self._chunk)

    async def _have(self, stream):
        await stream.receive(1 << 20)
        bitmap = to_bitmap(self._chunks, chunk_count=self._edge.manifest.chunk_count)
        await stream.send(closed_answer(HaveUpdate(bitmap=bitmap).encode()))
        while True:
            await stream.receive(1 << 20)

    async def _chunk(self, stream):
        while True:
            request = ChunkRequest.decode(await stream.receive(1 << 16), limit=1 << 16)
            for index in request.indices:
                self.asked.append(index)
                await self._answer(stream, self._edge, index)


async def honest(stream, edge, index):
    await stream.send(closed_answer(edge.chunk(index)))


async def corrupt(stream, edge, index):
    good = edge.chunk(index)
    await stream.send(closed_answer(bytes([good[0] ^ 1]) + good[1:]))


async def silent(stream, edge, index):
    await trio.sleep_forever()


async def dripping(stream, edge, index):
    """One byte every four seconds."""
    frame = closed_answer(edge.chunk(index))
    for byte in len(frame).to_bytes(4, "big") + frame:
        await stream._outgoing.write(bytes([byte]))
        await trio.sleep(4)
