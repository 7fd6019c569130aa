"""A member of the run that says it has everything and sends noise. ``python -m tests.lab.hostile JOIN ADDRESS``.

It joins as a node does, connects to every node that the learner names, and answers every request for a chunk with as
many bytes as the chunk has. One JSON line when it has neighbours; it serves until it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

import trio

from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_peer.mesh.join import JoinLine
from rollmesh_peer.mesh.requests import ask, closed_answer
from rollmesh_peer.mesh.seam import Mesh, MeshStream
from rollmesh_protocol import limits, streams
from rollmesh_protocol.chunks import to_bitmap
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.manifest import Manifest
from rollmesh_protocol.messages import (
    MAJOR,
    ChunkRequest,
    HaveRequest,
    HaveUpdate,
    Hello,
    ManifestRequest,
    PeersAnswer,
    PeersRequest,
    Welcome,
)

ROUNDS = 4
"""Introductions name only some of the nodes; so many are asked for."""


class Corrupter:
    """One hostile member."""

    def __init__(self, mesh: Mesh, learner: str) -> None:
        self._mesh = mesh
        self._learner = learner
        self._run = ""
        self._manifests: dict[bytes, Manifest] = {}
        self.num_sent = 0

    async def join(self) -> None:
        """Become a member, and everybody's neighbour."""
        hello = Hello(
            majors=(MAJOR,), software="lab", name="corrupter", role="seed", engine=None,
            addresses=self._mesh.addresses, invite=None,
        )  # fmt: skip
        welcome = Welcome.decode(await self._ask(streams.HELLO, hello.encode()), limit=limits.CARD_BYTES)
        self._run = Envelope.decode(welcome.card, limit=limits.CARD_BYTES).run
        self._mesh.serve(streams.HAVE, self._have)
        self._mesh.serve(streams.CHUNK, self._chunks)
        for _ in range(ROUNDS):
            request = PeersRequest(count=limits.MAX_NEIGHBOURS).encode()
            answer = PeersAnswer.decode(await self._ask(streams.PEERS, request), limit=limits.PEERS_BYTES)
            for neighbour in answer.peers:
                if neighbour.peer not in self._mesh.links():
                    with contextlib.suppress(LinkLost, Refused):
                        await self._mesh.connect(neighbour.addresses[0])

    async def _ask(self, protocol: str, request: bytes) -> bytes:
        return await ask(
            self._mesh, self._learner, protocol, request, answer_bytes=limits.CARD_BYTES, deadline_s=limits.REQUEST_S
        )

    async def _manifest(self, name: bytes) -> Manifest:
        if name not in self._manifests:
            envelope = await self._ask(streams.MANIFEST, ManifestRequest(name=name).encode())
            body = Envelope.decode(envelope, limit=limits.MANIFEST_BYTES).open(
                run=self._run, kind="manifest", signer=self._learner
            )
            self._manifests[name] = Manifest.decode(body, limit=limits.MANIFEST_BYTES)
        return self._manifests[name]

    async def _have(self, stream: MeshStream) -> None:
        request = HaveRequest.decode(await stream.receive(1 << 20), limit=1 << 20)
        count = (await self._manifest(request.manifest)).chunk_count
        update = HaveUpdate(bitmap=to_bitmap(range(count), chunk_count=count))
        await stream.send(closed_answer(update.encode()))
        while True:
            await stream.receive(1 << 20)

    async def _chunks(self, stream: MeshStream) -> None:
        while True:
            request = ChunkRequest.decode(await stream.receive(1 << 16), limit=1 << 16)
            manifest = await self._manifest(request.manifest)
            for index in request.indices:
                await stream.send(closed_answer(os.urandom(manifest.chunk_length(index))))
                self.num_sent += 1
                print(json.dumps({"sent": self.num_sent}), flush=True)


async def main(join: str, address: str) -> None:
    line = JoinLine.parse(join)
    options = HostOptions(key_seed=os.urandom(32), listen=(f"/ip4/{address}/tcp/4001",), gossip=False)
    async with open_mesh(options) as mesh:
        await mesh.connect(str(line.addresses[0]))
        corrupter = Corrupter(mesh, line.learner)
        await corrupter.join()
        print(json.dumps({"neighbours": len(mesh.links()) - 1}), flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2])
