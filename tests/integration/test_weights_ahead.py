"""Decoding ahead with the real worker process: a keeper that is told of chunks as they come."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
import trio

from rollmesh_peer import faults
from rollmesh_peer.weights.board import Pulse
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.keeper import Keeper
from rollmesh_peer.weights.lineage import Link
from rollmesh_peer.weights.preparing import prepare_while_fetched
from rollmesh_peer.weights.worker_calls import AheadAnswer
from rollmesh_protocol.errors import ChildFailed, Refused
from rollmesh_protocol.layout import Layout, TensorSpec
from tests.integration.test_weights_keeper import Bench, fetch, holds
from tests.unit.weights.kit import SignedEdge, nudged, patch, random_image, root_of, sign

LAYOUT = Layout(
    tensors=(
        TensorSpec(name="a", dtype="bf16", shape=(60_000,)),
        TensorSpec(name="b", dtype="f16", shape=(60_000,)),
        TensorSpec(name="c", dtype="f32", shape=(30_000,)),
    )
)
"""Three blocks, each with a span of several chunks."""
BASE = random_image(LAYOUT, 1)
NEW = nudged(LAYOUT, BASE, 2, share=0.3)
NEXT = nudged(LAYOUT, NEW, 3, share=0.3)
EDGE, EDGE_AFTER = patch(LAYOUT, BASE, NEW, version=2), patch(LAYOUT, NEW, NEXT, version=3)


class Watched:
    """A keeper that notes what it was answered, and lets a test wait for it."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.answers: list[AheadAnswer | None] = []
        self.news = Pulse()

    async def prepare(self, link: Link) -> AheadAnswer | None:
        answer = await self.keeper.prepare(link)
        self.answers.append(answer)
        self.news.fire()
        return answer


@pytest.fixture(params=[False, True], ids=["memory", "disk"])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Bench:
    return Bench(tmp_path, layout=LAYOUT, is_on_disk=request.param)


def bring(store: EdgeStore, edge: SignedEdge, *chunks: int) -> None:
    store.add_manifest(edge.name, edge.envelope)
    for index in chunks:
        store.write_chunk(edge.name, index, edge.chunk(index))


async def test_blocks_are_decoded_before_the_last_chunk_comes(bench: Bench) -> None:
    count = EDGE.manifest.chunk_count
    assert count > 10
    order = Random(5).sample(range(1, count), count - 1)
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base(BASE))
        watched, gained = Watched(keeper), Pulse()
        bring(store, EDGE, 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: prepare_while_fetched(EDGE.link, keeper=watched, store=store, gained=gained))
            for index in order[:-1]:
                await watched.news.wait()
                bring(store, EDGE, index)
                gained.fire()
            await watched.news.wait()
            await holds(keeper, BASE, version=0)
            bring(store, EDGE, order[-1])
            gained.fire()
        ready = [answer.ready for answer in watched.answers if answer is not None]
        assert len(ready) == count - 1
        assert ready == sorted(ready)
        assert ready[-1] == 2
        await keeper.advance([EDGE.link])
        await holds(keeper, NEW, version=2)
        # And on with the next one, of which the first chunks are of no use for the weights before.
        bring(store, EDGE_AFTER, *range(EDGE_AFTER.manifest.chunk_count - 1))
        answer = await keeper.prepare(EDGE_AFTER.link)
        assert answer is not None
        assert answer.ready == 2
        await keeper.advance(fetch(store, EDGE_AFTER))
        await holds(keeper, NEXT, version=3)
    async with bench.opened() as (keeper, store):
        await holds(keeper, NEXT, version=3)


async def test_a_worker_killed_in_the_middle_costs_the_head_start_and_no_weights(bench: Bench, tmp_path: Path) -> None:
    environ = {**os.environ, faults.FAULT: "weights.decoded_ahead:2", faults.ONCE: str(tmp_path / "fired")}
    async with bench.opened(environ=environ) as (keeper, store):
        await keeper.adopt_base(bench.base(BASE))
        bring(store, EDGE, *range(8))
        answer = await keeper.prepare(EDGE.link)
        assert answer is not None
        assert answer.ready > 0
        bring(store, EDGE, 8)
        with pytest.raises(ChildFailed):
            await keeper.prepare(EDGE.link)
        assert (tmp_path / "fired").exists()
        await holds(keeper, BASE, version=0)
        await keeper.advance(fetch(store, EDGE))
        await holds(keeper, NEW, version=2)


async def test_a_wrong_patch_is_refused_though_it_was_decoded_ahead(bench: Bench) -> None:
    other = nudged(LAYOUT, BASE, 9)
    bad = sign(LAYOUT, version=2, parent=root_of(LAYOUT, BASE), image=other, payload=EDGE.payload)
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base(BASE))
        bring(store, bad, *range(bad.manifest.chunk_count - 1))
        answer = await keeper.prepare(bad.link)
        assert answer is not None
        assert answer.ready == 2
        with pytest.raises(Refused) as caught:
            await keeper.advance(fetch(store, bad))
        assert caught.value.code == "patch.root"
        assert keeper.is_refused(bad.name)
        await holds(keeper, BASE, version=0)
        bring(store, EDGE, 0, 1, 2)
        await keeper.prepare(EDGE.link)
        await keeper.advance(fetch(store, EDGE))
        await holds(keeper, NEW, version=2)


async def test_there_is_nothing_to_do_for_other_weights_a_whole_payload_or_a_busy_keeper(tmp_path: Path) -> None:
    bench = Bench(tmp_path, layout=LAYOUT)
    async with bench.opened() as (keeper, store):
        bring(store, EDGE, 0, 1, 2)
        assert await keeper.prepare(EDGE.link) is None
        await keeper.adopt_base(bench.base(BASE))
        bring(store, EDGE_AFTER, 0)
        assert await keeper.prepare(EDGE_AFTER.link) is None
        path = fetch(store, EDGE)
        assert await keeper.prepare(EDGE.link) is None
        async with trio.open_nursery() as nursery, keeper.reading():
            nursery.start_soon(keeper.advance, path)
            await trio.testing.wait_all_tasks_blocked()
            bring(store, EDGE_AFTER, 1)
            assert await keeper.prepare(EDGE_AFTER.link) is None
        await holds(keeper, NEW, version=2)
