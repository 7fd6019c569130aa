"""A learner that publishes what it should not: each time against one real node process that works when it comes.

The node must keep the weights that it has, say why, and take honest ones afterwards.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from tests.attacks.attack import Attack
from tests.attacks.hostile_learner import WAIT_S, until
from tests.integration.nodes import NodeProcess, image_of, wait_for
from tests.integration.test_node_hostile_weights import Publisher, corrupt, edge_to, endless, root_of, victim
from tests.unit.node.cards import LAYOUT, STRANGER
from tests.unit.weights.kit import SignedEdge

if TYPE_CHECKING:
    from tests.attacks.place import Lab


@asynccontextmanager
async def node_at_work() -> AsyncIterator[tuple[Publisher, NodeProcess]]:
    """A node with version 1; afterwards it must have taken honest weights and worked on."""
    with tempfile.TemporaryDirectory() as made:
        async with victim(Path(made)) as (publisher, node):
            yield publisher, node


class HostileEdge(Attack):
    """A manifest or a payload that is not what it should be; the node keeps its weights and says why."""

    kind = "weights"
    words = ""

    def edge(self) -> SignedEdge:
        raise NotImplementedError

    def changes(self) -> dict[str, object]:
        """What the announcement says otherwise."""
        return {}

    async def play(self, lab: Lab) -> None:
        async with node_at_work() as (publisher, node):
            await publisher.offer(self.edge(), **self.changes())
            await until(node, self.words)
            status = await node.status()
            kept = (status.version_held, status.root_held) == (1, root_of(LAYOUT, image_of(1)))
        self.outcome.no_effect = kept
        self.outcome.note = f"the node says: {self.words!r}; it kept version 1, and took honest weights afterwards"


class ForgedManifest(HostileEdge):
    name = "forged manifest"
    words = "signed by a key that may not say this"

    def edge(self) -> SignedEdge:
        return edge_to(10, identity=STRANGER)


class OtherRunsManifest(HostileEdge):
    name = "manifest of another run"
    words = "belongs to another run"

    def edge(self) -> SignedEdge:
        return edge_to(10, run="another-run")


class MixedManifest(HostileEdge):
    name = "mixed manifest: old patch under a new version"
    words = "does not say what its announcement said"

    def edge(self) -> SignedEdge:
        return edge_to(10)

    def changes(self) -> dict[str, object]:
        return {"version": 35, "step": 35}


class EndlessManifest(HostileEdge):
    name = "endless manifest: a patch of 512 GiB"
    words = "512.00 GiB, and this node allows 100"

    def edge(self) -> SignedEdge:
        return edge_to(10)

    def changes(self) -> dict[str, object]:
        return {"payload_bytes": 1 << 39}


class OldManifest(Attack):
    """A true manifest, signed by the learner, that leads back to older weights."""

    name = "old manifest replayed"
    kind = "weights"

    async def play(self, lab: Lab) -> None:
        async with node_at_work() as (publisher, node):
            new = image_of(2)
            await publisher.offer(edge_to())
            await node.until(lambda status: status.version_held == 2)
            await publisher.offer(edge_to(1, parent=root_of(LAYOUT, new), image=image_of(1)))
            await trio.sleep(2)
            self.outcome.no_effect = (await node.status()).version_held == 2
        self.outcome.note = "the node stayed at version 2, and took honest weights afterwards"


class HostileChunks(Attack):
    """Chunks that never come right: the node works on with what it has."""

    kind = "weights"
    answer = staticmethod(corrupt)

    async def play(self, lab: Lab) -> None:
        async with node_at_work() as (publisher, node):
            rogue = await publisher.offer(edge_to(), answer=self.answer, is_head=False)
            with trio.fail_after(WAIT_S):
                while not rogue.asked:
                    await trio.sleep(0.1)
            before = len(publisher.learner.heard.accepted)
            await wait_for(publisher.learner, lambda seen: len(seen.heard.accepted) > before + 5)
            self.outcome.no_effect = (await node.status()).version_held == 1
        self.outcome.note = f"{len(rogue.asked)} chunks asked for; more than five results accepted meanwhile"


class CorruptChunks(HostileChunks):
    name = "corrupt chunks"


class EndlessChunks(HostileChunks):
    name = "chunk without end"
    answer = staticmethod(endless)
