"""A learner that only publishes: the product's parts, as the coordinator wires them, and a script instead of training.

``python -m tests.lab.learner FOLDER ADDRESS MEGABYTES CHUNK_KIB``; then one JSON object a line on stdin, one back on
stdout: ``{"do": "prepare", "share": 1.0}`` makes the next version (so many of the weights change) and tells its size,
``{"do": "announce"}`` gossips it and tells when, ``{"do": "figures"}`` tells what was served. It ends with stdin.

Mesh host, gossip, admission, introductions, ledger, publisher with its worker, and sharing are the learner's own.
Nobody leases or submits here: the nodes are seeds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import trio

from rollmesh_learner.members.nodes import Nodes
from rollmesh_learner.members.standing import StandingRules
from rollmesh_learner.members.welcome import AdmissionTerms, WelcomeDesk
from rollmesh_learner.publishing.publisher import Prepared, Publisher
from rollmesh_learner.publishing.versions import Versions
from rollmesh_learner.records.ledger import open_ledger
from rollmesh_peer.logging_setup import set_up_logging
from rollmesh_peer.mesh.announcements import Announcer, SequenceFile
from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_peer.mesh.requests import Route, Router
from rollmesh_peer.weights.passes import PassBook
from rollmesh_peer.weights.sharing import Sharing
from rollmesh_peer.weights.workshop import open_workshop
from rollmesh_protocol import limits, streams
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.layout import Layout, TensorSpec
from rollmesh_protocol.messages import ModelReference, RunCard, RunLimits

RUN = "lab"
PORT = 4700
TENSORS = 8
COLUMNS = 1000


def layout_of(num_bytes: int) -> Layout:
    """A bf16 model of about this size."""
    rows = max(1, round(num_bytes / (2 * COLUMNS * TENSORS)))
    return Layout(tensors=tuple(TensorSpec(name=f"w{i}", dtype="bf16", shape=(rows, COLUMNS)) for i in range(TENSORS)))


class LabLearner:
    """One learner, from its base version on."""

    def __init__(self, folder: Path, *, layout: Layout, publisher: Publisher, versions: Versions) -> None:
        self.folder = folder
        self.layout = layout
        self.publisher = publisher
        self.versions = versions
        self.sharing: Sharing | None = None
        self.announcer: Announcer | None = None
        self._chance = np.random.default_rng(1)
        self._image = np.frombuffer(self._chance.bytes(layout.image_bytes), np.uint16).copy()
        self._prepared: Prepared | None = None

    async def begin(self) -> bytes:
        """Publish the base; its root."""
        header = await self.publisher.publish_base(self._write(), version=1)
        self.versions.publish(self.publisher.head)
        return header.root

    async def prepare(self, share: float) -> dict[str, object]:
        """Make the next version durable. Bits drawn at random: a patch cannot be smaller than what changed."""
        count = round(share * len(self._image))
        where = self._chance.choice(len(self._image), count, replace=False) if share < 1 else slice(None)
        self._image[where] ^= np.frombuffer(self._chance.bytes(2 * count), np.uint16)
        version = self.versions.head.version + 1
        self._prepared = await self.publisher.prepare(self._write(), version=version, step=version - 1)
        assert self._prepared is not None
        header = self._prepared.header
        return {"version": version, "payload_bytes": header.payload_bytes, "manifest_bytes": header.manifest_bytes}

    async def announce(self) -> dict[str, object]:
        """Tell everybody of what was prepared; the time is that before the first message."""
        assert self._prepared is not None
        assert self.announcer is not None
        self.publisher.announced(self._prepared)
        at = time.time()
        self.versions.publish(self._prepared.entry.head)
        await self.announcer.announce(self._prepared.header)
        return {"version": self.versions.head.version, "at": at}

    async def figures(self) -> dict[str, object]:
        """What has left so far."""
        assert self.sharing is not None
        return {"bytes_served": self.sharing.seeder.bytes_served, "links": len(self.sharing.mesh.links())}

    def _write(self) -> Path:
        path = self.folder / "ram" / f"image-{time.monotonic_ns()}"
        path.write_bytes(self._image.tobytes())
        return path


def make_card(layout: Layout, *, learner: str, base_root: bytes) -> RunCard:
    """A run whose base model nobody has at hand."""
    return RunCard(
        run=RUN,
        name=RUN,
        learner=learner,
        model=ModelReference(
            source="lab:random", parameters=layout.image_bytes // 2, base_root=base_root, config=b'{"model_type":"lab"}'
        ),
        layout=layout,
        vocabulary=100,
        stop_tokens=(2,),
        tokenizer_digest=bytes(32),
        environments=("lab",),
        limits=RunLimits(prompt_tokens=64, new_tokens=32, samples_per_group=2),
        swap_modes=("drain",),
    )


def route(protocol: str, handle, request_bytes: int, answer_bytes: int) -> Route:
    return Route(protocol=protocol, request_bytes=request_bytes, answer_bytes=answer_bytes, handle=handle)


async def main(folder: Path, address: str, num_bytes: int, chunk_kib: int) -> None:
    identity = Identity(os.urandom(32))
    layout = layout_of(num_bytes)
    for name in ("ram", "published"):
        (folder / name).mkdir(parents=True)
    host = HostOptions(
        key_seed=identity.seed,
        listen=(f"/ip4/{address}/tcp/{PORT}",),
        max_connections=limits.MAX_LEARNER_CONNECTIONS,
    )
    async with (
        open_ledger(folder / "ledger.sqlite") as ledger,
        open_workshop(layout) as workshop,
        open_mesh(host) as mesh,
        trio.open_nursery() as nursery,
    ):
        publisher = Publisher(
            folder / "published", ram=folder / "ram", run=RUN, identity=identity, layout=layout, workshop=workshop,
            ring_versions=3, anchor_every=64, keep_versions=64, patch_chunk_bytes=chunk_kib * limits.KIB,
        )  # fmt: skip
        versions = Versions()
        learner = LabLearner(folder, layout=layout, publisher=publisher, versions=versions)
        base_root = await learner.begin()
        rules = StandingRules(new_rollouts=0, probation_rollouts=0, rate_new=0.0, rate_probation=0.0, rate_steady=0.0)
        nodes = Nodes({}, max_nodes=limits.MAX_LEARNER_CONNECTIONS, rules=rules)
        passes = PassBook(
            run=RUN,
            learner=identity.peer,
            newest_version=lambda: versions.head.version,
            admits=nodes.is_admitted,
        )
        learner.sharing = sharing = Sharing(mesh, store=publisher.store, passes=passes, origin=Random())
        learner.announcer = Announcer(
            mesh, run=RUN, identity=identity, sequence=SequenceFile(folder / "notice.sequence")
        )
        welcome = WelcomeDesk(
            AdmissionTerms(mode="open", allow=(), per_block=limits.MAX_CONNECTIONS_PER_BLOCK),
            card=make_card(layout, learner=identity.peer, base_root=base_root),
            identity=identity,
            mesh=mesh,
            nodes=nodes,
            versions=versions,
            ledger=ledger,
            edges_towards_head=publisher.edges_towards_head,
            random=Random(),
        )
        Router(places=256).register(
            mesh,
            route(streams.HELLO, welcome.hello, limits.HELLO_BYTES, limits.CARD_BYTES),
            route(streams.PEERS, welcome.peers, limits.SMALL_BYTES, limits.PEERS_BYTES),
            route(streams.EDGES, welcome.edges, limits.SMALL_BYTES, limits.EDGES_BYTES),
            *sharing.routes(),
        )
        nursery.start_soon(sharing.run)
        nursery.start_soon(welcome.watch)
        say(join=mesh.addresses[0])
        await obey(learner)
        nursery.cancel_scope.cancel()


async def obey(learner: LabLearner) -> None:
    """Do what stdin says, until it ends."""
    stdin = trio.lowlevel.FdStream(os.dup(sys.stdin.fileno()))
    heard = b""
    async for piece in stdin:
        *lines, heard = (heard + piece).split(b"\n")
        for line in lines:
            order = json.loads(line)
            match order["do"]:
                case "prepare":
                    say(**await learner.prepare(order["share"]))
                case "announce":
                    say(**await learner.announce())
                case "figures":
                    say(**await learner.figures())


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    set_up_logging(form="json", level="debug")
    trio.run(main, Path(sys.argv[1]), sys.argv[2], int(1e6 * float(sys.argv[3])), int(sys.argv[4]))
