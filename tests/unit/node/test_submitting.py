"""Submitting: the same bytes until the learner has answered for them, and a tally of what it said."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import trio

from rollmesh_node.own_limits import OwnLimits, open_lease
from rollmesh_node.spool import Spool
from rollmesh_node.submitting import Submitter
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import LeaseRequest
from rollmesh_protocol.rollout import Result, SampleResult, Segment
from tests.unit.node.cards import NODE, RUN, STRANGER, make_card
from tests.unit.node.world import SOON_S, World, open_world

OWN = OwnLimits(prompt_tokens=128, new_tokens=64, disk_bytes=limits.GIB, download_bytes=limits.GIB)


def result_of(lease: Lease, *, token: int = 7, by=NODE, root: bytes | None = None) -> bytes:
    """A sealed result that passes every check, unless it is told otherwise."""
    tokens = np.full(lease.max_new_tokens, token, "<u4").tobytes()
    logprobs = np.full(lease.max_new_tokens, -1.0, "<f4").tobytes()
    segments = (Segment(first_token=0, root=root or lease.root),)
    samples = tuple(
        SampleResult(index=s.index, tokens=tokens, logprobs=logprobs, finish="length", segments=segments)
        for s in lease.samples
    )
    result = Result(lease_id=lease.lease_id, samples=samples, engine="test", generate_s=0.1)
    return seal(result.encode(), run=RUN, kind="result", identity=by).encode()


class Desk:
    def __init__(self, world: World, submitter: Submitter, spool: Spool, receipts: list[None]) -> None:
        self.world, self.submitter, self.spool, self.receipts = world, submitter, spool, receipts

    async def lease(self) -> Lease:
        request = LeaseRequest(
            groups=1, version_held=1, root_held=self.world.learner.head.root, tokens_per_s=0, waiting_for=""
        )
        answer = await self.world.uplink.lease(request)
        return open_lease(answer.leases[0], card=make_card(), node=NODE.peer, own=OWN)

    async def lease_of_a_learner_that_then_forgets_us(self) -> Lease:
        self.world.membership.renew()
        with trio.fail_after(SOON_S):
            await self.world.membership.wait_admitted()
        lease = await self.lease()
        self.world.learner.forget(NODE.peer)
        return lease

    async def finish(self, lease: Lease, sealed: bytes) -> None:
        await trio.to_thread.run_sync(self.spool.put, lease.lease_id, sealed)
        self.submitter.notify(lease.lease_id)

    async def empty(self) -> None:
        with trio.fail_after(SOON_S):
            await self.submitter.wait_empty()


@contextlib.asynccontextmanager
async def open_desk(folder: Path) -> AsyncIterator[Desk]:
    async with open_world(folder) as world:
        spool = Spool(folder / "spool")
        receipts: list[None] = []
        submitter = Submitter(
            uplink=world.uplink, membership=world.membership, spool=spool, on_receipt=lambda: receipts.append(None)
        )
        desk = Desk(world, submitter, spool, receipts)
        with trio.fail_after(SOON_S):
            await world.membership.join()
        world.nursery.start_soon(world.membership.keep)
        world.nursery.start_soon(submitter.run)
        yield desk


async def test_accepted_work_is_counted_and_forgotten(tmp_path: Path) -> None:
    async with open_desk(tmp_path) as desk:
        for _ in range(6):
            lease = await desk.lease()
            await desk.finish(lease, result_of(lease))
        await desk.empty()
        tally = desk.submitter.tally
        assert (tally.accepted, tally.rejected, tally.last_refusal) == (24, 0, "")
        assert tally.last_accepted_at is not None and tally.standing is not None
        assert desk.spool.pending() == () and len(desk.receipts) == 6


async def test_a_result_that_comes_while_the_folder_is_listed_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_desk(tmp_path) as desk:
        first, second = await desk.lease(), await desk.lease()
        listing, may_return = threading.Event(), threading.Event()
        pending = desk.spool.pending

        def slow_pending() -> tuple[bytes, ...]:
            found = pending()
            if found and not listing.is_set():
                listing.set()
                may_return.wait(SOON_S)
            return found

        monkeypatch.setattr(desk.spool, "pending", slow_pending)
        await desk.finish(first, result_of(first))
        await trio.to_thread.run_sync(listing.wait, SOON_S)
        await desk.finish(second, result_of(second))
        may_return.set()
        await desk.empty()
        assert desk.submitter.tally.accepted == 8


async def test_a_lost_receipt_sends_the_same_bytes_again(tmp_path: Path) -> None:
    async with open_desk(tmp_path) as desk:
        desk.world.learner.script.lose_receipts = 1
        lease = await desk.lease()
        sealed = result_of(lease)
        await desk.finish(lease, sealed)
        await desk.empty()
        assert desk.world.learner.heard.submitted == [(lease.lease_id, sealed)] * 2
        assert desk.world.learner.heard.accepted == [lease.lease_id]
        assert desk.submitter.tally.accepted == 4


async def test_a_refused_result_is_told_with_advice_and_not_sent_again(tmp_path: Path) -> None:
    async with open_desk(tmp_path) as desk:
        lease = await desk.lease()
        await desk.finish(lease, result_of(lease, root=b"\7" * 32))
        await desk.empty()
        tally = desk.submitter.tally
        assert (tally.accepted, tally.rejected) == (0, 4)
        assert tally.last_refusal.startswith("result.root: ") and "update rollmesh" in tally.last_refusal
        assert len(desk.world.learner.heard.submitted) == 1 and desk.spool.pending() == ()


async def test_a_result_that_nobody_ordered_is_dropped(tmp_path: Path) -> None:
    async with open_desk(tmp_path) as desk:
        lease = (await desk.lease()).model_copy(update={"lease_id": b"x" * 16})
        await desk.finish(lease, result_of(lease))
        forged = await desk.lease()
        await desk.finish(forged, result_of(forged, by=STRANGER))
        await desk.empty()
        assert desk.spool.pending() == () and desk.submitter.tally.rejected == 8


async def test_results_wait_out_a_lost_link_and_a_forgetful_learner(tmp_path: Path) -> None:
    async with open_desk(tmp_path) as desk:
        lease = await desk.lease()
        desk.world.network.cut(desk.world.learner.mesh.peer_id, NODE.peer)
        await desk.finish(lease, result_of(lease))
        assert desk.submitter.unsent == 1
        desk.world.learner.forget(NODE.peer)
        desk.world.network.heal(desk.world.learner.mesh.peer_id, NODE.peer)
        await desk.empty()
        assert desk.submitter.tally.accepted == 4
        lease = await desk.lease_of_a_learner_that_then_forgets_us()  # over a link that is up
        await desk.finish(lease, result_of(lease))
        await desk.empty()
        assert desk.submitter.tally.accepted == 8
