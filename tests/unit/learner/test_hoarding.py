"""Nodes that take work and do not do it: how long they can hold a run up. Real desk, book, intake and ledger."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from rollmesh_learner.members.nodes import NEWCOMER_MARGIN, Node
from rollmesh_learner.members.shares import Pace
from rollmesh_learner.members.standing import Record
from rollmesh_learner.work import overtaking
from rollmesh_learner.work.book import Rules
from rollmesh_learner.work.groups import LeaseRecord
from rollmesh_learner.work.leasing import RETURN_S
from rollmesh_learner.work.overtaking import patience_s
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.messages import Head, Hello, ReturnRequest
from tests.unit.learner.world import FakeNode, Life, settled_life

RULES = Rules(steps=2000, staleness=2, groups_per_step=2, samples_per_group=2)
SECONDS = 400
HELLO = Hello(majors=(1,), software="", name="", role="worker", engine=None, addresses=(), invite=None)


def identity(number: int) -> Identity:
    return Identity(bytes([100 + number]) * 32)


def lease_of(node: str, *, duration_s: float) -> LeaseRecord:
    return LeaseRecord(
        lease_id=bytes(16), node=node, group_id=0, indices=(0,), version=1, step=0, root=bytes(32),
        duration_s=duration_s, issued_at=0.0,
    )  # fmt: skip


def test_newcomers_are_waited_for_less_than_nodes_that_have_delivered_and_nobody_longer_than_half_his_time() -> None:
    lease = lease_of("a", duration_s=600)
    assert patience_s(lease, has_delivered=False, typical_s=0.0) == overtaking.LEAST_S
    assert patience_s(lease, has_delivered=False, typical_s=20.0) == 40.0
    assert patience_s(lease, has_delivered=True, typical_s=20.0) == 80.0
    assert patience_s(lease_of("a", duration_s=30), has_delivered=True, typical_s=20.0) == 15.0


def test_work_is_kept_for_a_few_unknown_nodes_only() -> None:
    assert Pace(working=8, unknown=100).sharers == 10
    assert Pace(working=1, unknown=100).sharers == 2
    assert Pace(working=3, unknown=0).sharers == 3
    assert Pace(working=0, unknown=5).sharers == 5, "at the beginning of a run everybody is unknown"


def test_a_lease_of_an_unknown_node_stands_as_long_as_others_would_need_and_more() -> None:
    node = Node("a", HELLO, Record(), last_seen=0.0)
    terms = {"tokens": 1000, "least_s": 30.0, "most_s": 600.0}
    assert node.lease_duration(**terms) == 600.0
    assert node.lease_duration(**terms, typical_s=1.0) == 30.0
    assert node.lease_duration(**terms, typical_s=5.0) == 5.0 * NEWCOMER_MARGIN


class Hoarder(FakeNode):
    """Takes a group, holds it for as long as it may, gives it back or lets it run out, and takes the next."""

    gives_back = True

    async def hold(self, life: Life) -> None:
        self.hear(life.versions.head)
        has_nothing = not self.leases
        await self.ask(life, groups=1 if has_nothing else 0)  # a sign of life, or more
        if has_nothing:
            self.since = trio.current_time()
        lease = self.leases[0] if self.leases else None
        if lease is not None and trio.current_time() - self.since >= 0.95 * lease.duration_s:
            self.leases.clear()
            if self.gives_back:
                request = ReturnRequest(lease_ids=(lease.lease_id,), code="node.stopping")
                await life.desk.take_back(self.identity.peer, request.encode())


def advance(life: Life) -> None:
    """Train on what is ready, and publish."""
    while life.book.batch_is_ready():
        life.book.assemble(wall_time=0.0)
        step = life.book.next_step
        life.versions.publish(Head(version=1 + step, step=step, root=step.to_bytes(32, "big")))


async def steps_in(life: Life, honest: FakeNode, hoarders: list[Hoarder], clock: trio.testing.MockClock) -> int:
    """Steps of a run in which one honest node does a second's work in no time."""
    for node in hoarders:
        node.join(life)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(life.desk.watch)
        for _ in range(SECONDS):
            for node in hoarders:
                await node.hold(life)
            life.put_prompts()
            honest.hear(life.versions.head)
            await honest.work_off(life, groups=4)
            await life.score_all()
            advance(life)
            clock.jump(1.0)
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return life.book.next_step


@pytest.mark.parametrize("gives_back", [True, False])
async def test_a_crowd_that_only_holds_work_slows_a_run_down_but_does_not_stop_it(
    folder: Path, mock_clock: trio.testing.MockClock, gives_back: bool
) -> None:
    """Eight at once; each holds up a batch a few times, and then rests for longer and longer."""
    async with settled_life(folder, RULES) as (life, nodes):
        hoarders = [Hoarder(life.world, identity(number)) for number in range(8)]
        for node in hoarders:
            node.gives_back = gives_back
        steps = await steps_in(life, nodes[0], hoarders, mock_clock)
        assert steps > 0.8 * SECONDS, "it would be 2 a second without them, and one in 20 if they were waited for"


async def lease_again(life: Life, holder: FakeNode, other: FakeNode, *, after_s: float) -> bool:
    """Whether ``other``, which has nothing to do, is given what ``holder`` has held for so long."""
    for lease in holder.leases:
        life.book.leases[lease.lease_id].issued_at -= after_s
    await other.ask(life, groups=4)
    return bool(other.leases)


async def exhaust(life: Life, node: FakeNode) -> None:
    """Let ``node`` do all the work there is."""
    while await node.work_off(life, groups=4):
        await life.score_all()


async def test_an_idle_node_takes_over_what_the_next_batch_waits_for_and_the_first_result_counts(folder: Path) -> None:
    async with settled_life(folder, RULES) as (life, (holder, other)):
        await holder.ask(life, groups=1)
        await exhaust(life, other)
        assert not life.book.batch_is_ready()
        assert not await lease_again(life, holder, other, after_s=overtaking.LEAST_S / 2)
        assert await lease_again(life, holder, other, after_s=overtaking.LEAST_S)
        (theirs,), (mine,) = holder.leases, other.leases
        assert (mine.group, mine.samples) == (theirs.group, theirs.samples), "the same seeds"
        other.generate(mine)
        assert (await other.submit(life, mine.lease_id)).accepted == (0, 1)
        await life.score_all()
        assert life.book.batch_is_ready()
        holder.generate(theirs)
        late = await holder.submit(life, theirs.lease_id)
        assert (late.accepted, late.code) == ((), "lease.expired")
        assert life.registry.record_of(holder.identity.peer).soft_in_a_row == 0, "it is no offence"


async def test_who_was_overtaken_may_still_be_first(folder: Path) -> None:
    async with settled_life(folder, RULES) as (life, (holder, other)):
        await holder.ask(life, groups=1)
        await exhaust(life, other)
        assert await lease_again(life, holder, other, after_s=overtaking.LEAST_S)
        (theirs,), (mine,) = holder.leases, other.leases
        holder.generate(theirs)
        assert (await holder.submit(life, theirs.lease_id)).accepted == (0, 1)
        other.generate(mine)
        assert (await other.submit(life, mine.lease_id)).code == "lease.expired"
        await life.score_all()
        assert life.book.batch_is_ready()
        assert not [lease for lease in life.book.leases.values() if lease.state == "open"]


async def test_what_was_let_go_of_is_kept_for_nodes_that_deliver(folder: Path) -> None:
    async with settled_life(folder, RULES) as (life, (holder, other)):
        stranger = FakeNode(life.world, identity(0))
        stranger.join(life)
        stranger.hear(life.versions.head)
        await other.work_off(life, groups=1)
        await holder.ask(life, groups=1)
        (lease,) = holder.leases
        await life.desk.take_back(
            holder.identity.peer, ReturnRequest(lease_ids=(lease.lease_id,), code="node.stopping").encode()
        )
        life.shares._looked_at = -1.0  # a second later
        await stranger.ask(life, groups=1)
        assert stranger.leases[0].group != lease.group, "it may only pass it on"
        await other.ask(life, groups=1)
        assert other.leases[0].group == lease.group


@pytest.mark.parametrize(("held_s", "rests"), [(RETURN_S / 2, False), (2 * RETURN_S, True)])
async def test_giving_work_back_late_is_like_letting_it_run_out(folder: Path, held_s: float, rests: bool) -> None:
    async with settled_life(folder, RULES) as (life, (holder, other)):
        for _ in range(2):
            await holder.ask(life, groups=1)
            (lease,) = holder.leases
            holder.leases.clear()
            life.book.leases[lease.lease_id].issued_at -= held_s
            await life.desk.take_back(
                holder.identity.peer, ReturnRequest(lease_ids=(lease.lease_id,), code="node.stopping").encode()
            )
            await trio.sleep(0.01)  # two at one time count once
        await holder.ask(life, groups=1)
        assert (not holder.leases) == rests
        await other.ask(life, groups=1)
        assert other.leases


async def test_idle_identities_take_no_work_from_those_who_deliver(folder: Path) -> None:
    async with settled_life(folder, RULES) as (life, (node, *_)):
        await node.work_off(life, groups=1)
        await life.score_all()
        for number in range(6):
            FakeNode(life.world, identity(number)).join(life)
        life.shares._looked_at = -1.0
        await node.ask(life, groups=4)
        assert len(node.leases) >= 3, "of six groups within S, one is done"
