"""The lease desk against nodes that take work to and fro, or let it run out. Real ledger and book, no network."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from rollmesh_learner.work.book import Rules
from rollmesh_protocol import limits
from rollmesh_protocol.messages import Head, ReturnAnswer, ReturnRequest
from tests.unit.learner.world import FakeNode, Life, settled_life

RULES = Rules(steps=20, staleness=2, groups_per_step=2, samples_per_group=2)
NEWER = Head(version=2, step=0, root=b"\2" * 32)


@asynccontextmanager
async def desk(folder: Path):
    """A learner and two nodes that hold its first version."""
    async with settled_life(folder, RULES) as (life, nodes):
        yield life, *nodes


async def give_back(life: Life, node: FakeNode, *, code: str) -> int:
    request = ReturnRequest(lease_ids=tuple(lease.lease_id for lease in node.leases), code=code)
    node.leases.clear()
    raw = await life.desk.take_back(node.identity.peer, request.encode())
    return ReturnAnswer.decode(raw, limit=limits.SMALL_BYTES).returned


async def test_what_is_given_back_goes_to_others_first(folder: Path) -> None:
    async with desk(folder) as (life, node, other):
        await node.ask(life, groups=1)
        (lease,) = node.leases
        assert await give_back(life, node, code="node.stopping") == 1
        await node.ask(life, groups=1)
        assert node.leases[0].group != lease.group
        await other.ask(life, groups=1)
        assert other.leases[0].group == lease.group


async def test_newer_weights_are_no_excuse_where_there_are_none(folder: Path) -> None:
    async with desk(folder) as (life, node, _):
        await node.ask(life, groups=1)
        (lease,) = node.leases
        await give_back(life, node, code="node.weights")
        await node.ask(life, groups=1)
        assert node.leases[0].group != lease.group, "as with any other return, others come first"


async def test_whoever_has_newer_weights_works_with_those(folder: Path) -> None:
    async with desk(folder) as (life, node, _):
        await node.ask(life, groups=1)
        (lease,) = node.leases
        life.versions.publish(NEWER)
        await give_back(life, node, code="node.weights")
        answer = await node.ask(life, groups=1)
        assert not node.leases
        assert answer.wait is not None
        assert answer.wait.why == "weights newer than version 1, for which it gave leases back"
        node.held = NEWER
        await node.ask(life, groups=1)
        assert (node.leases[0].group, node.leases[0].root) == (lease.group, NEWER.root), "at once, and the same work"


async def test_nobody_gives_back_the_leases_of_others(folder: Path) -> None:
    async with desk(folder) as (life, node, other):
        await node.ask(life, groups=1)
        (lease,) = node.leases
        other.leases = [lease]
        assert await give_back(life, other, code="node.stopping") == 0
        assert life.book.leases[lease.lease_id].state == "open"


async def test_a_hoarder_gets_no_more_than_its_allowance_and_then_rests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh_learner.work.leasing._WATCH_S", 0.001)
    async with desk(folder) as (life, node, other), trio.open_nursery() as nursery:
        nursery.start_soon(life.desk.watch)
        for lapse in (1, 2):
            for _ in range(10):
                await node.ask(life, groups=16)
            assert sum(len(lease.samples) for lease in node.leases) == RULES.samples_per_group, lapse
            for lease in node.leases:
                life.book.leases[lease.lease_id].duration_s = 0.0  # its time is over
            node.leases.clear()
            with trio.fail_after(5):
                while life.book.outstanding(node.identity.peer):
                    await trio.sleep(0.001)
        answer = await node.ask(life, groups=16)
        assert not node.leases and answer.wait is not None
        await other.ask(life, groups=16)
        assert other.leases, "others are not concerned"
        nursery.cancel_scope.cancel()
