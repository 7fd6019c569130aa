"""A hostile learner that publishes: forged, old, endless, corrupt and exploding weights against a real node process.

The node works on version 1 when the attack comes. It says what is wrong, keeps the weights it has, stays small, and
goes on by itself as soon as the learner publishes something honest.
"""

from __future__ import annotations

import json
import pickle
import secrets
import struct
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import zstandard
from libp2p.exceptions import BaseLibp2pError

from rollmesh_node.joining import open_card
from rollmesh_node.own_limits import OwnLimits, check_card
from rollmesh_peer.mesh.announcements import Announcer
from rollmesh_peer.mesh.requests import closed_answer
from rollmesh_peer.testing.fake_learner import FakeLearner
from rollmesh_protocol import codec, limits
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.manifest import Edge
from rollmesh_protocol.messages import Head, ManifestRequest, PolicyHeader
from rollmesh_protocol.patch.codec import encode_patch
from rollmesh_protocol.streams import CHUNK, HAVE, MANIFEST
from tests.integration.nodes import PATIENCE_S, NodeProcess, children_of, image_of, open_learner, start_node, wait_for
from tests.support.attacker import Weight
from tests.unit.node.cards import LAYOUT, LEARNER, RUN, STRANGER, make_card
from tests.unit.swarm.peers import Rogue, corrupt, honest
from tests.unit.weights.kit import SignedEdge, root_of, sign

pytestmark = pytest.mark.timeout(300)

OLD, NEW = image_of(1), image_of(2)
PATCH = encode_patch(LAYOUT, old=OLD, new=NEW)
GIANT = 1 << 30


def edge_to(version: int = 2, *, payload: bytes | None = PATCH, image: bytes = NEW, **options) -> SignedEdge:
    """A patch from version 1, signed by the learner unless said otherwise."""
    fields = {"parent": root_of(LAYOUT, OLD), "identity": LEARNER, "run": RUN} | options
    return sign(LAYOUT, version=version, image=image, payload=payload, **fields)


def short_of(edge: SignedEdge, **changes) -> Edge:
    manifest = edge.manifest
    fields = {
        "kind": manifest.kind, "version": manifest.version, "step": manifest.step, "parent": manifest.parent,
        "root": manifest.root, "manifest": edge.name, "manifest_bytes": len(edge.envelope),
        "payload_bytes": manifest.payload_bytes,
    }  # fmt: skip
    return Edge(**(fields | changes))


class Publisher:
    """Says what it likes about weights, in the name of a fake learner whose own word can be had back."""

    def __init__(self, learner: FakeLearner) -> None:
        self.learner = learner
        self._handlers = learner.mesh._host.multiselect.handlers
        self._honest = dict(self._handlers)
        self._announcer: Announcer = learner._announcer

    async def offer(self, edge: SignedEdge, *, answer=None, is_head: bool = True, **changes) -> Rogue:
        """Announce ``edge`` and serve its manifest, true or not; its chunks are served by ``answer`` or as they are."""
        short = short_of(edge, **changes)

        async def manifests(stream) -> None:
            request = ManifestRequest.decode(await stream.receive(limits.SMALL_BYTES), limit=limits.SMALL_BYTES)
            envelope = edge.envelope if request.name == edge.name else self.learner._store.envelope(request.name)
            await stream.send(closed_answer(envelope))

        rogue = Rogue(self.learner.mesh, edge, None, answer or honest)  # takes over the chunk and have streams
        self.learner.mesh.serve(MANIFEST, manifests)
        self.learner._edges.append(short)
        if is_head:
            self.learner.head = Head(version=short.version, step=short.step, root=short.root)
        await self._announcer.announce(PolicyHeader(**short.model_dump(exclude={"kind"})))
        return rogue

    async def repent(self) -> bytes:
        """Publish an honest anchor, newer than everything else."""
        for protocol in (CHUNK, HAVE, MANIFEST):
            self._handlers[protocol] = self._honest[protocol]
        self.learner._edges.clear()
        return await self.learner.publish(image_of(9), version=99)


async def endless(stream, edge, index) -> None:
    """A frame that says it has a gigabyte, and as much of it as the node reads."""
    with suppress(BaseLibp2pError):
        await stream._stream.write(GIANT.to_bytes(4, "big"))
        for _ in range(GIANT >> 16):
            await stream._stream.write(bytes(1 << 16))


async def dripping(stream, edge, index) -> None:
    """One byte a second."""
    frame = closed_answer(edge.chunk(index))
    with suppress(BaseLibp2pError):
        for byte in len(frame).to_bytes(4, "big") + frame:
            await stream._stream.write(bytes([byte]))
            await trio.sleep(1)


@asynccontextmanager
async def victim(folder: Path, *settings: str):
    """A learner, a node that has had work for version 1 accepted, and afterwards the proof that it goes on."""
    async with open_learner(folder / "learner") as learner:
        pace = {"rollout_s": 0.05}
        with start_node(folder / "home", learner.mesh.addresses[0], script=pace, settings=settings) as node:
            await wait_for(learner, lambda seen: seen.heard.accepted)
            publisher = Publisher(learner)
            with light(node):
                yield publisher, node
            assert node.process.poll() is None and "Traceback" not in node.log
            root = await publisher.repent()
            await node.until(lambda status: status.root_held == root)
            before = len(learner.heard.accepted)
            await wait_for(learner, lambda seen: len(seen.heard.accepted) > before + 1)


@contextmanager
def light(node: NodeProcess):
    """Neither the daemon nor a child of it takes memory for what comes.

    The first patch of all, good or bad, loads the codec's machine code: some 45 MiB.
    """
    weights = [Weight(pid) for pid in (node.process.pid, *children_of(node.process.pid))]
    yield
    for weight in weights:
        assert weight.growth_mib < 80


async def still_holds(node: NodeProcess, version: int = 1) -> None:
    status = await node.status()
    assert (status.version_held, status.root_held) == (version, root_of(LAYOUT, image_of(version)))


# --- manifests -------------------------------------------------------------------------------------------------------
SAID = "does not say what its announcement said"
BAD_EDGES = {
    "signed by somebody else": ({"identity": STRANGER}, {}, "signed by a key that may not say this"),
    "of another run": ({"run": "another-run"}, {}, "belongs to another run"),
    "an old one under a new name": ({}, {"version": 35, "step": 35}, SAID),
    "from weights that nobody holds": ({"parent": bytes(32)}, {}, "no edge leads from the weights held"),
    "larger than announced": ({}, {"payload_bytes": 5}, SAID),
    "larger than the node allows": ({}, {"payload_bytes": 1 << 39}, "512.00 GiB, and this node allows 100"),
    "with a manifest larger than announced": ({}, {"manifest_bytes": 10}, "has the manifest"),
}


async def test_an_edge_that_is_not_as_it_should_be_is_not_taken(tmp_path: Path) -> None:
    async with victim(tmp_path) as (publisher, node):
        for number, (what, (options, changes, words)) in enumerate(BAD_EDGES.items()):
            version = changes.get("version", 10 * number + 10)  # each newer than the one before
            edge = edge_to(10 * number + 10, **options)
            await publisher.offer(edge, **(changes | {"version": version}))
            await node.until_logged(f"not at version {version} yet")
            lines = [line for line in node.log.splitlines() if f"not at version {version} yet" in line]
            assert words in lines[0], what
            await still_holds(node)
        assert (await node.status()).learner_connected


async def test_an_old_version_is_not_taken_again(tmp_path: Path) -> None:
    async with victim(tmp_path) as (publisher, node):
        await publisher.offer(edge_to())
        await node.until(lambda status: status.version_held == 2)
        back = edge_to(1, parent=root_of(LAYOUT, NEW), image=OLD)
        await publisher.offer(back)  # true, signed, and older than what the node has
        await trio.sleep(1)
        await still_holds(node, 2)


# --- payloads --------------------------------------------------------------------------------------------------------
def bomb() -> bytes:
    """A patch whose head unpacks to a gigabyte."""
    head = zstandard.ZstdCompressor(level=1).compress(bytes(GIANT))
    return struct.pack("<4sI", b"RMP2", len(head)) + head


async def test_a_payload_that_does_not_lead_where_it_should_changes_nothing(tmp_path: Path) -> None:
    payloads = {
        "the tensor w does not have the promised digest": encode_patch(LAYOUT, old=OLD, new=image_of(3)),
        "the payload is not a patch of codec context-1": secrets.token_bytes(300),
        "the payload does not end with its last block": PATCH[:-3],
        "a stream of a size that does not fit": bomb(),
    }
    async with victim(tmp_path) as (publisher, node):
        for version, (words, payload) in enumerate(payloads.items(), 2):
            await publisher.offer(edge_to(version, payload=payload))
            await node.until_logged(f"version {version} is not taken: {words}")
            await still_holds(node)
        await trio.sleep(0.5)
        assert node.log.count("is not taken") == len(payloads), "none is fetched or tried again"


@pytest.mark.parametrize("answer", [corrupt, endless, dripping], ids=["corrupt", "endless", "a slow drip"])
async def test_chunks_that_never_come_right_cost_nothing_but_time(tmp_path: Path, answer) -> None:
    """Meanwhile the node works on with the weights that it has."""
    async with victim(tmp_path) as (publisher, node):
        rogue = await publisher.offer(edge_to(), answer=answer, is_head=False)
        if answer is corrupt:
            await node.until_logged("sent a chunk with a wrong digest")
        with trio.fail_after(PATIENCE_S):
            while not rogue.asked:
                await trio.sleep(0.05)
        before = len(publisher.learner.heard.accepted)
        await wait_for(publisher.learner, lambda seen: len(seen.heard.accepted) > before + 5)
        await still_holds(node)


# --- leases and cards ------------------------------------------------------------------------------------------------
async def test_a_lease_for_weights_that_nobody_published_goes_back(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        changes = {"root": bytes(32), "version": 5, "duration_s": 4.0}
        learner.script = replace(learner.script, alter_lease=lambda lease: lease.model_copy(update=changes))
        with start_node(tmp_path / "home", learner.mesh.addresses[0]) as node:
            await wait_for(learner, lambda seen: "node.weights" in dict(map(reversed, seen.heard.returned)))
            assert learner.heard.submitted == []
            assert len([request for request in learner.heard.requests if request.groups]) < 30
            await node.until_logged("code=node.weights")


def table(shape: tuple[int, ...]) -> dict[str, object]:
    """A layout of one tensor, as it travels."""
    return {"tensors": ({"name": "w", "dtype": "bf16", "shape": shape},)}


def altered_card(**changes) -> bytes:
    """A card with fields that our own side would not make, sealed by the learner."""
    fields = make_card().model_dump() | changes
    return seal(codec.pack(fields), run=RUN, kind="card", identity=LEARNER).encode()


BAD_CARDS = {
    "a stop token outside": ({"stop_tokens": (2, 100)}, "card.model"),
    "a negative stop token": ({"stop_tokens": (-1,)}, "request.invalid"),
    "a giant stop token": ({"stop_tokens": (1 << 40,)}, "request.invalid"),
    "a thousand stop tokens": ({"stop_tokens": tuple(range(1000))}, "request.invalid"),
    "a giant vocabulary": ({"vocabulary": 1 << 40}, "request.invalid"),
    "weights changed in a way that nobody knows": ({"swap_modes": ("keep",)}, "request.invalid"),
    "an unknown field": ({"program": "import os"}, "request.invalid"),
    "endless tensors": ({"layout": table((1 << 62, 1 << 62))}, "card.limits"),
    "negative sides": ({"layout": table((-4, -4))}, "request.invalid"),
}


@pytest.mark.parametrize("what", BAD_CARDS)
def test_a_card_that_makes_no_sense_is_refused(what: str) -> None:
    changes, code = BAD_CARDS[what]
    own = OwnLimits(prompt_tokens=4096, new_tokens=4096, disk_bytes=GIANT, download_bytes=GIANT)
    with pytest.raises(Refused) as refused:
        check_card(open_card(altered_card(**changes), learner=LEARNER.peer), own)
    assert refused.value.code == code


@pytest.mark.parametrize("what", ["a negative stop token", "endless tensors"])
async def test_and_the_node_ends_in_words(tmp_path: Path, what: str) -> None:
    changes, code = BAD_CARDS[what]
    async with open_learner(tmp_path / "learner") as learner:
        learner.script.card_bytes = altered_card(**changes)
        with start_node(tmp_path / "home", learner.mesh.addresses[0]) as node:
            assert await node.wait() == 1
            assert f"({code})" in node.log and "Traceback" not in node.log
            assert learner.heard.requests == []


# --- models ----------------------------------------------------------------------------------------------------------
async def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    """Not when a learner names a path on this machine, and not when the volunteer does."""
    folder, trap = tmp_path / "model", tmp_path / "trap"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(trap)))
    (folder / "modeling_evil.py").write_text(f"open({str(trap)!r}, 'w')")
    async with open_learner(tmp_path / "learner") as learner:
        reference = learner.card.model.model_copy(update={"source": str(folder)})
        learner.card = learner.card.model_copy(update={"model": reference})
        with start_node(tmp_path / "named by the learner", learner.mesh.addresses[0]) as node:
            await wait_for(learner, lambda seen: seen.heard.accepted)
            assert "the run names no public base model" in node.log
        settings = (f"weights.base={folder}",)
        with start_node(tmp_path / "named by the volunteer", learner.mesh.addresses[0], settings=settings) as node:
            await node.until_logged("holds its weights as pickle (pytorch_model.bin), which can run code when loaded")
            await node.until(lambda status: status.accepted > 0)
    assert not trap.exists()


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return (Path.touch, (self._path,))


async def test_a_config_that_is_not_the_layouts_model_is_never_built(tmp_path: Path) -> None:
    """The card's layout is what the limits are checked against; the engine must not build anything larger."""
    config = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 1 << 19, "intermediate_size": 1 << 20,
        "num_hidden_layers": 1000, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    card = make_card(config=json.dumps(config).encode())
    async with open_learner(tmp_path / "learner", card=card) as learner:
        settings = ("engine.backend=transformers", "engine.threads=1")
        with start_node(tmp_path / "home", learner.mesh.addresses[0], settings=settings) as node:
            assert await node.wait(100) == 1
            assert "the engine cannot load test:model" in node.log and "Traceback" not in node.log
            assert learner.heard.submitted == []
