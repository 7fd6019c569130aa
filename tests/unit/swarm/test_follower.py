"""A node on its way to the head: what it takes, what it refuses, and that it never chases. On a virtual clock."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.lowlevel

from rollmesh_peer.mesh.requests import Route
from rollmesh_peer.weights.follower import Follower
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed, Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.layout import Layout, TensorSpec
from rollmesh_protocol.manifest import Edge
from rollmesh_protocol.messages import EdgesAnswer, EdgesRequest, Head, PolicyHeader
from rollmesh_protocol.streams import EDGES
from tests.unit.swarm.peers import World
from tests.unit.weights.kit import LEARNER, MIXED, nudged, random_image, root_of, sign

IMAGES = [random_image(MIXED, 0)]
for _version in range(1, 30):
    IMAGES.append(nudged(MIXED, IMAGES[-1], _version))
ROOTS = [root_of(MIXED, image) for image in IMAGES]


def step_edge(version, *, parent=None, chunks=3, **options):
    """The edge to ``version`` from the one before or from ``parent``, with noise for a payload."""
    start = version - 1 if parent is None else parent
    payload = bytes([version]) * (chunks * 4096 - 5)
    return sign(MIXED, version=version, parent=ROOTS[start], image=IMAGES[version], payload=payload, **options)


def short_of(edge, **changes):
    manifest = edge.manifest
    kind = changes.pop("kind", manifest.kind)
    fields = {
        "version": manifest.version,
        "step": manifest.step,
        "parent": manifest.parent,
        "root": manifest.root,
        "manifest": edge.name,
        "manifest_bytes": len(edge.envelope),
        "payload_bytes": manifest.payload_bytes,
    }
    return Edge(kind=kind, **{**fields, **changes})


def head_of(edge):
    return Head(version=edge.manifest.version, step=edge.manifest.step, root=edge.manifest.root)


def header_of(edge, **changes):
    short = short_of(edge)
    fields = short.model_dump(exclude={"kind"})
    return PolicyHeader(**{**fields, **changes})


class ScriptedKeeper:
    """Keeps roots, not weights: takes a path when it leads on from what is held."""

    def __init__(self, version=0):
        self.root = ROOTS[version]
        self.version = self.highest = version
        self.taken = []
        self.refused = set()
        self.bad = set()
        self.failures = []
        self.prepared = []
        self.prepares = trio.lowlevel.checkpoint

    @property
    def is_quarantined(self):
        return self.version < self.highest

    def is_refused(self, name):
        return name in self.refused

    async def advance(self, path):
        await trio.lowlevel.checkpoint()
        if self.failures:
            raise self.failures.pop(0)
        at = self.root
        for name, manifest in path:
            if manifest.parent not in (None, at):
                raise Refused("manifest.parent")
            if name in self.bad:
                self.refused.add(name)
                raise Refused("patch.root")
            at = manifest.root
        last = path[-1][1]
        assert last.version > self.highest or (last.version == self.highest and self.is_quarantined)
        self.root, self.version, self.highest = at, last.version, last.version
        self.taken.append([manifest.version for _, manifest in path])

    async def prepare(self, link):
        self.prepared.append(link[1].version)
        await self.prepares()

    async def confirm(self, *, root, version, step):
        if root != self.root:
            return False
        if version > self.highest:
            self.version = self.highest = version
        return True


class Publisher:
    """The learner's edges, and its answers about them."""

    def __init__(self, learner):
        self.learner = learner
        self.offered = []
        self.head = None
        self.asked = []

    def publish(self, edge, **changes):
        self.learner.hold(edge)
        self.offered.append(short_of(edge, **changes))
        if self.head is None or edge.manifest.version >= self.head.version:
            self.head = head_of(edge)

    async def edges(self, peer, message):
        self.asked.append(EdgesRequest.decode(message, limit=1 << 16).root)
        return EdgesAnswer(head=self.head, edges=tuple(self.offered)).encode()

    def route(self):
        return Route(protocol=EDGES, request_bytes=1 << 16, answer_bytes=limits.EDGES_BYTES, handle=self.edges)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@asynccontextmanager
async def following(world, *, version=0, max_download_bytes=limits.GIB, rate=None, to=None):
    """A learner that publishes, and a node that follows it."""
    async with world.learner(upload_bytes_per_s=rate) as learner:
        publisher = Publisher(learner)
        learner.router.register(learner.mesh, publisher.route())
        async with world.node(1, to=[learner] if to is None else to) as node:
            keeper = ScriptedKeeper(version)
            follower = Follower(
                node.mesh,
                learner=LEARNER.peer,
                store=node.store,
                keeper=keeper,
                swarm=node.swarm,
                max_download_bytes=max_download_bytes,
                chance=lambda: 0.5,
            )
            follower.publisher, follower.keeper, follower.node = publisher, keeper, node
            follower.told = []
            follower.listen(lambda version, root: follower.told.append((version, root)))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(follower.run)
                yield follower
                nursery.cancel_scope.cancel()


async def reach(follower, version, *, within_s=30):
    with trio.fail_after(within_s):
        while follower.keeper.version != version:
            await trio.sleep(0.01)
    assert follower.keeper.root == ROOTS[version]


async def test_a_header_is_enough_to_follow_without_asking(world, autojump_clock):
    async with following(world) as follower:
        for version in (1, 2, 3):
            edge = step_edge(version)
            follower.publisher.publish(edge)
            follower.hear_header(header_of(edge))
            await reach(follower, version)
            assert follower.told[-1] == (version, ROOTS[version])
        assert follower.publisher.asked == []
        assert follower.waiting_for == ""


async def test_what_came_of_a_patch_is_prepared_while_the_rest_is_fetched(world, autojump_clock):
    async with following(world, rate=4096) as follower:
        edge = step_edge(1, chunks=6)
        follower.publisher.publish(edge)
        follower.hear_header(header_of(edge))
        await reach(follower, 1)
        assert follower.keeper.prepared == [1] * 5  # not for the last chunk: then it is applied


async def test_a_fetch_does_not_wait_for_what_is_prepared(world, autojump_clock):
    async with following(world, rate=4096) as follower:
        follower.keeper.prepares = trio.sleep_forever
        edge = step_edge(1, chunks=6)
        follower.publisher.publish(edge)
        follower.hear_header(header_of(edge))
        await reach(follower, 1)
        assert follower.keeper.prepared == [1]


async def test_an_anchor_is_not_prepared_and_trouble_in_it_ends_only_that(world, autojump_clock):
    async with following(world, rate=4096) as follower:

        async def fail():
            raise ChildFailed("the worker died")

        follower.keeper.prepares = fail
        edge = step_edge(1, chunks=6)
        follower.publisher.publish(edge)
        follower.hear_header(header_of(edge))
        await reach(follower, 1)
        assert follower.keeper.prepared == [1]
        leap = sign(MIXED, version=2, parent=None, image=IMAGES[2], payload=IMAGES[2])
        follower.publisher.publish(leap)
        follower.hear_header(header_of(leap))
        await reach(follower, 2)
        assert follower.keeper.prepared == [1]


async def test_a_head_alone_makes_it_ask_for_edges(world, autojump_clock):
    async with following(world) as follower:
        for version in (1, 2):
            follower.publisher.publish(step_edge(version))
        follower.hear_head(follower.publisher.head)
        await reach(follower, 2)
        assert follower.publisher.asked == [ROOTS[0]]


async def test_it_takes_the_cheapest_way(world, autojump_clock):
    async with following(world) as follower:
        for version in range(1, 9):
            follower.publisher.publish(step_edge(version))
        follower.publisher.publish(step_edge(8, parent=0, chunks=5))
        follower.hear_head(follower.publisher.head)
        await reach(follower, 8)
        assert follower.keeper.taken == [[8]]


async def test_after_a_long_sleep_it_asks_for_a_shorter_way_than_the_headers_tell(world, autojump_clock):
    async with following(world) as follower:
        edges = [step_edge(version) for version in range(1, 9)]
        for edge in edges:
            follower.publisher.publish(edge)
        follower.publisher.publish(step_edge(8, parent=0, chunks=4))
        for edge in edges:
            follower.hear_header(header_of(edge))
        await reach(follower, 8)
        assert [8] in follower.keeper.taken


async def test_a_slow_node_converges_by_skip_patches_and_does_not_chase(world, autojump_clock):
    """One patch takes three publication periods to fetch; skips over eight versions cost two patches."""
    period_s, chunks = 2.0, 3
    async with following(world, rate=chunks * 4096 / (3 * period_s)) as follower:
        for version in range(1, 25):
            edge = step_edge(version, chunks=chunks)
            follower.publisher.publish(edge)
            if version % 8 == 0:
                follower.publisher.publish(step_edge(version, parent=version - 8, chunks=2 * chunks))
            follower.hear_header(header_of(edge))
            await trio.sleep(period_s)
        behind = 24 - follower.keeper.version
        assert behind <= 16
        await reach(follower, 24, within_s=100)
        fetched = sum(len(taken) for taken in follower.keeper.taken)
        assert fetched < 20


async def test_weights_published_again_under_a_new_name_are_named_and_not_fetched(world, autojump_clock):
    async with following(world, version=3) as follower:
        follower.hear_head(Head(version=7, step=1, root=ROOTS[3]))
        await trio.sleep(1)
        assert follower.keeper.version == 7
        assert follower.told == [(7, ROOTS[3])]
        assert follower.node.store.names() == ()


async def test_after_a_rollback_to_weights_that_it_had_before_it_takes_the_new_patches(world, autojump_clock):
    """Versions 5 and 6 have the roots of 1 and 2: the free way over old patches ends below what was verified."""
    async with following(world) as follower:
        for version in range(1, 5):
            edge = step_edge(version)
            follower.publisher.publish(edge)
            follower.hear_header(header_of(edge))
            await reach(follower, version)
        for version, parent, image in ((5, 4, 1), (6, 1, 2)):
            follower.publisher.publish(
                sign(MIXED, version=version, parent=ROOTS[parent], image=IMAGES[image], payload=bytes([version]) * 9000)
            )
        follower.hear_head(follower.publisher.head)
        with trio.fail_after(30):
            while follower.keeper.version != 6:
                await trio.sleep(0.01)
        assert follower.keeper.root == ROOTS[2]
        assert follower.keeper.taken[4:] == [[5], [6]]
        assert follower.waiting_for == ""


# --- what it refuses -------------------------------------------------------------------------------------------------
async def stays(follower, version, *, seconds=200):
    await trio.sleep(seconds)
    assert follower.keeper.version == version
    assert follower.keeper.root == ROOTS[version]
    assert follower.keeper.taken == []


async def test_a_manifest_by_another_key_is_refused(world, autojump_clock):
    forger = Identity(b"\x07" * 32)
    async with following(world) as follower:
        forged = step_edge(1, identity=forger)
        serve_manifest(follower, forged)
        follower.publisher.offered, follower.publisher.head = [short_of(forged)], head_of(forged)
        follower.hear_head(head_of(forged))
        await stays(follower, 0)
        assert "key" in follower.waiting_for
        assert follower.node.store.names() == ()


async def test_a_manifest_of_another_model_is_refused(world, autojump_clock):
    other = Layout(tensors=(TensorSpec(name="w", dtype="bf16", shape=(64,)),))
    image = random_image(other, 3)
    async with following(world) as follower:
        mixed = sign(other, version=1, parent=ROOTS[0], image=image, payload=b"x" * 5000)
        serve_manifest(follower, mixed)
        follower.publisher.offered, follower.publisher.head = [short_of(mixed)], head_of(mixed)
        follower.hear_head(head_of(mixed))
        await stays(follower, 0)
        assert "another model" in follower.waiting_for


async def test_a_manifest_that_says_something_else_than_its_edge_is_refused(world, autojump_clock):
    async with following(world) as follower:
        edge = step_edge(2)
        follower.publisher.publish(edge, version=1, root=ROOTS[1], parent=ROOTS[0])
        follower.publisher.head = Head(version=1, step=0, root=ROOTS[1])
        follower.hear_head(follower.publisher.head)
        await stays(follower, 0)
        assert "does not say what its announcement said" in follower.waiting_for


async def test_an_old_version_is_refused(world, autojump_clock):
    async with following(world, version=5) as follower:
        old = step_edge(3, parent=5)
        follower.publisher.publish(old)
        follower.hear_header(header_of(old))
        await stays(follower, 5)
        assert "version 5 was verified here" in follower.waiting_for
        assert follower.node.store.names() == ()


async def test_a_root_that_cannot_be_reached_makes_it_ask_again_until_there_is_a_way(world, autojump_clock):
    async with following(world) as follower:
        orphan = step_edge(9, parent=7)
        follower.publisher.publish(orphan)
        follower.hear_header(header_of(orphan))
        await stays(follower, 0, seconds=20)
        assert "no edge leads" in follower.waiting_for
        assert len(follower.publisher.asked) >= 2
        follower.publisher.publish(step_edge(7, parent=0))
        await reach(follower, 9, within_s=2 * limits.BACKOFF_MOST_S)


async def test_a_download_beyond_the_owners_limit_is_refused_with_the_numbers(world, autojump_clock):
    async with following(world, max_download_bytes=10_000) as follower:
        edge = step_edge(1)
        follower.publisher.publish(edge)
        follower.hear_header(header_of(edge))
        await stays(follower, 0)
        assert "GiB" in follower.waiting_for
        assert follower.node.store.names() == ()


async def test_an_announced_size_that_grows_is_refused(world, autojump_clock):
    """An endless download: the announcement says little, the manifest says much."""
    async with following(world, max_download_bytes=20_000) as follower:
        edge = step_edge(1, chunks=50)
        follower.publisher.publish(edge, payload_bytes=100)
        follower.hear_head(head_of(edge))
        await stays(follower, 0)
        assert follower.node.store.held(edge.name) == frozenset()


async def test_a_payload_with_the_wrong_result_is_not_taken_twice(world, autojump_clock):
    async with following(world) as follower:
        wrong = step_edge(1)
        follower.keeper.bad.add(wrong.name)
        follower.publisher.publish(wrong)
        follower.hear_header(header_of(wrong))
        await trio.sleep(20)
        assert follower.keeper.version == 0
        follower.publisher.publish(step_edge(2, parent=0))
        follower.hear_head(follower.publisher.head)
        await reach(follower, 2)


# --- trouble ---------------------------------------------------------------------------------------------------------
async def test_a_failing_worker_is_tried_again(world, autojump_clock):
    async with following(world) as follower:
        follower.keeper.failures = [ChildFailed("the worker died"), ChildFailed("the worker died")]
        edge = step_edge(1)
        follower.publisher.publish(edge)
        follower.hear_header(header_of(edge))
        await reach(follower, 1)


async def test_without_the_learner_it_says_so_and_goes_on_when_it_is_back(world, autojump_clock):
    async with following(world, to=[]) as follower:
        edge = step_edge(1)
        follower.publisher.publish(edge)
        follower.hear_head(head_of(edge))
        await stays(follower, 0, seconds=100)
        assert "no connection" in follower.waiting_for
        await follower.node.mesh.connect(follower.publisher.learner.mesh.addresses[0])
        await reach(follower, 1, within_s=2 * limits.BACKOFF_MOST_S)


async def test_an_edge_that_the_learner_withdrew_is_left_for_another(world, autojump_clock):
    async with following(world, rate=4096.0) as follower:
        gone = step_edge(3, parent=0, chunks=40)
        follower.publisher.publish(gone)
        follower.hear_head(head_of(gone))
        await trio.sleep(10)
        assert 0 < len(follower.node.store.held(gone.name)) < 40
        follower.publisher.learner.store.retain(())
        follower.publisher.offered.clear()
        follower.publisher.publish(step_edge(4, parent=0))
        await reach(follower, 4, within_s=200)


async def test_old_payloads_are_dropped_and_the_newest_kept_for_others(world, autojump_clock):
    async with following(world) as follower:
        for version in range(1, limits.RETAINED_EDGES + 6):
            edge = step_edge(version)
            follower.publisher.publish(edge)
            follower.hear_header(header_of(edge))
            await reach(follower, version)
        held = follower.node.store
        versions = sorted(held.manifest(name).version for name in held.names())
        assert versions == list(range(6, limits.RETAINED_EDGES + 6))


def serve_manifest(follower, edge):
    """The learner's store takes only what the learner signed: serve this one past it."""

    store = follower.publisher.learner.store
    store.envelope = lambda name: edge.envelope if name == edge.name else None
