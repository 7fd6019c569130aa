"""A hostile learner that publishes: forged, old, endless, corrupt and exploding weights against a real node process.

The node works on version 1 when the attack comes. It says what is wrong, keeps the weights it has, stays small, and
goes on by itself as soon as the learner publishes something honest.
"""

from __future__ import annotations

import json
import pickle
import secrets
import struct
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import zstandard

from rollmesh_peer.mesh.announcements import Announcer
from rollmesh_peer.mesh.requests import closed_answer
from rollmesh_peer.testing.fake_learner import FakeLearner
from rollmesh_protocol import codec, limits
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.manifest import Edge
from rollmesh_protocol.messages import Head, ManifestRequest, PolicyHeader
from rollmesh_protocol.patch import encode_patch
from rollmesh_protocol.streams import CHUNK, HAVE, MANIFEST
from tests.integration.nodes import NodeProcess, children_of, image_of, open_learner, start_node, wait_for
from tests.support.attacker import Weight
from tests.unit.node.cards import LAYOUT, LEARNER, RUN, STRANGER, make_card
from tests.unit.swarm.peers import Rogue, corrupt, dripping
from tests.unit.weights.kit import SignedEdge, root_of, sign

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

    async def offer(self, edge: SignedEdge, *, answer=None, is_head: bool = True, **changes) -> None:
        """Announce ``edge`` and serve its manifest, true or not; its chunks are served by ``answer`` or as they are."""
        short = short_of(edge, **changes)

        async def manifests(stream) -> None:
            request = ManifestRequest.decode(await stream.receive(limits.SMALL_BYTES), limit=limits.SMALL_BYTES)
            envelope = edge.envelope if request.name == edge.name else self.learner._store.envelope(request.name)
            await stream.send(closed_answer(envelope))

        Rogue(self.learner.mesh, edge, None, answer or whole)  # takes over the chunk and have streams
        self.learner.mesh.serve(MANIFEST, manifests)
        self.learner._edges.append(short)
        if is_head:
            self.learner.head = Head(version=short.version, step=short.step, root=short.root)
        await self._announcer.announce(PolicyHeader(**short.model_dump(exclude={"kind"})))

    async def repent(self, version: int = 9) -> bytes:
        """Publish an honest anchor."""
        for protocol in (CHUNK, HAVE, MANIFEST):
            self._handlers[protocol] = self._honest[protocol]
        self.learner._edges.clear()
        return await self.learner.publish(image_of(version), version=version)


async def whole(stream, edge, index) -> None:
    await stream.send(closed_answer(edge.chunk(index)))


async def endless(stream, edge, index) -> None:
    """A frame that says it has a gigabyte, and as much of it as the node reads."""
    await stream._stream.write((GIANT).to_bytes(4, "big"))
    for _ in range(GIANT >> 16):
        await stream._stream.write(bytes(1 << 16))


@asynccontextmanager
async def victim(folder: Path, *settings: str):
    """A learner, a node that has had work for version 1 accepted, and afterwards the proof that it goes on."""
    async with open_learner(folder / "learner") as learner:
        with start_node(folder / "home", learner.mesh.addresses[0], settings=settings) as node:
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
    """Neither the daemon nor a child of it takes more than a few megabytes for what comes."""
    weights = [Weight(pid) for pid in (node.process.pid, *children_of(node.process.pid))]
    yield
    for weight in weights:
        assert weight.growth_mib < 40


async def still_holds(node: NodeProcess, version: int = 1) -> None:
    status = await node.status()
    assert (status.version_held, status.root_held) == (version, root_of(LAYOUT, image_of(version)))


# --- manifests -------------------------------------------------------------------------------------------------------
BAD_EDGES = {
    "signed by somebody else": (edge_to(identity=STRANGER), {}, "signed by a key that may not say this"),
    "of another run": (edge_to(run="another-run"), {}, "belongs to another run"),
    "an old one under a new name": (edge_to(), {"version": 7, "step": 7}, "does not say what its announcement said"),
    "from weights that nobody holds": (edge_to(parent=bytes(32)), {}, "no edge leads from the weights held"),
    "larger than announced": (edge_to(), {"payload_bytes": 5}, "does not say what its announcement said"),
    "larger than the node allows": (
        edge_to(), {"payload_bytes": limits.MAX_MODEL_BYTES}, "a download of 512.00 GiB, and this node allows 100",
    ),
    "with a manifest larger than announced": (edge_to(), {"manifest_bytes": 10}, "has the manifest"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_EDGES)
async def test_an_edge_that_is_not_as_it_should_be_is_not_taken(tmp_path: Path, what: str) -> None:
    edge, changes, words = BAD_EDGES[what]
    async with victim(tmp_path) as (publisher, node):
        await publisher.offer(edge, **changes)
        await node.until_logged(words)
        await still_holds(node)
        status = await node.until(lambda status: words in status.waiting_for)
        assert status.learner_connected


async def test_an_old_version_is_not_taken_again(tmp_path: Path) -> None:
    async with victim(tmp_path) as (publisher, node):
        await publisher.offer(edge_to())
        await node.until(lambda status: status.version_held == 2)
        back = edge_to(1, parent=root_of(LAYOUT, NEW), image=OLD)
        await publisher.offer(back)  # true, signed, and older than what the node has
        await trio.sleep(2)
        await still_holds(node, 2)


# --- payloads --------------------------------------------------------------------------------------------------------
def bomb() -> bytes:
    """A patch whose streams unpack to a gigabyte each."""
    stream = zstandard.ZstdCompressor(level=19).compress(bytes(GIANT))
    return b"RMP1" + struct.pack("<III", len(stream), len(stream), len(stream)) + 3 * stream


BAD_PAYLOADS = {
    "a patch that leads elsewhere": (
        encode_patch(LAYOUT, old=OLD, new=image_of(3)), "the patched weights do not have the promised root",
    ),
    "noise": (secrets.token_bytes(300), "the payload is not a sparse-1 patch"),
    "a patch that is cut short": (PATCH[:-3], "the payload is cut short"),
    "a zstandard bomb": (bomb, "a stream larger than its section can use"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_PAYLOADS)
async def test_a_payload_that_does_not_lead_where_it_should_changes_nothing(tmp_path: Path, what: str) -> None:
    payload, words = BAD_PAYLOADS[what]
    edge = edge_to(payload=payload() if callable(payload) else payload)
    async with victim(tmp_path) as (publisher, node):
        await publisher.offer(edge)
        await node.until_logged(words)
        await still_holds(node)
        await trio.sleep(1)
        assert node.log.count(f"not taken: {words}") == 1, "it is not fetched or tried again"


@pytest.mark.parametrize("answer", [corrupt, endless, dripping], ids=["corrupt", "endless", "a slow drip"])
async def test_chunks_that_never_come_right_cost_nothing_but_time(tmp_path: Path, answer) -> None:
    """Meanwhile the node works on with the weights that it has."""
    async with victim(tmp_path) as (publisher, node):
        await publisher.offer(edge_to(), answer=answer, is_head=False)
        if answer is corrupt:
            await node.until_logged("sent a chunk with a wrong digest")
        await node.until(lambda status: "0 of 1 chunks of version 2" in status.waiting_for)
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


def altered_card(**changes) -> bytes:
    """A card with fields that our own side would not make, sealed by the learner."""
    fields = make_card().model_dump() | changes
    return seal(codec.pack(fields), run=RUN, kind="card", identity=LEARNER).encode()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"stop_tokens": (2, 100)}, "card.model"),
        ({"stop_tokens": (-1,)}, "request.invalid"),
        ({"stop_tokens": (1 << 40,)}, "request.invalid"),
        ({"stop_tokens": tuple(range(1000))}, "request.invalid"),
        ({"vocabulary": 1 << 40}, "request.invalid"),
        ({"swap_modes": ("recompute",)}, "card.limits"),
        ({"program": "import os"}, "request.invalid"),
        ({"layout": {"tensors": ({"name": "w", "dtype": "bf16", "shape": (1 << 62, 1 << 62)},)}}, "card.limits"),
        ({"layout": {"tensors": ({"name": "w", "dtype": "bf16", "shape": (-4, 4)},)}}, "request.invalid"),
    ],
    ids=[
        "a stop token outside", "a negative one", "a giant one", "a thousand", "a giant vocabulary", "swaps",
        "an unknown field", "endless tensors", "negative sides",
    ],
)  # fmt: skip
async def test_a_card_that_makes_no_sense_is_refused_in_words(tmp_path: Path, changes: dict, code: str) -> None:
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
            before = len(learner.heard.accepted)
            await wait_for(learner, lambda seen: len(seen.heard.accepted) > before)
            assert "holds its weights as pickle (pytorch_model.bin), which can run code when loaded" in node.log
    assert not trap.exists()


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return (Path.touch, (self._path,))


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 1 << 19, "intermediate_size": 1 << 20, "num_hidden_layers": 1000},
        {"model_type": "evil"},
        {"num_hidden_layers": 10**9},
    ],
    ids=["a petabyte", "an unknown type", "endless layers"],
)
async def test_a_config_that_is_not_the_layouts_model_is_never_built(tmp_path: Path, fields: dict) -> None:
    """The card's layout is what the limits are checked against; the engine must not build anything larger."""
    config = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    card = make_card(config=json.dumps(config | fields).encode())
    async with open_learner(tmp_path / "learner", card=card) as learner:
        settings = ("engine.backend=transformers", "engine.threads=1")
        with start_node(tmp_path / "home", learner.mesh.addresses[0], settings=settings) as node:
            assert await node.wait(100) == 1
            assert "the engine cannot load test:model" in node.log and "Traceback" not in node.log
            assert learner.heard.submitted == []
