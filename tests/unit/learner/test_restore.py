"""Going back to a checkpoint: what of the ledger counts afterwards, and what those who ask meanwhile are told."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import trio

from rollmesh_learner.members.standing import Record
from rollmesh_learner.work.book import Rules
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.messages import Head, ReturnRequest
from tests.unit.learner.world import FakeNode, Life, World, root_of

RULES = Rules(steps=20, staleness=2, groups_per_step=2, samples_per_group=2)
BATCH = RULES.groups_per_step * RULES.samples_per_group


@pytest.fixture
def world(folder: Path) -> World:
    return World(folder, Random(0), RULES, checkpoint_every=100)


async def _begin(life: Life, *nodes: FakeNode) -> None:
    await life.stepper.settle()
    life.put_prompts()
    for node in nodes:
        node.join(life)
        node.hear(life.versions.head)


async def _make_steps(life: Life, node: FakeNode, count: int) -> None:
    """Let one node work and the stepper step, until ``count`` steps are trained and published."""
    goal = life.book.next_step + count
    async with trio.open_nursery() as nursery:
        nursery.start_soon(life.stepper.run)
        while life.versions.head.step < goal:
            if life.book.next_step < goal:
                life.put_prompts()
                node.hear(life.versions.head)
                await node.work_off(life, groups=1)
                await life.score_all()
            await trio.sleep(0.001)
        nursery.cancel_scope.cancel()


async def _states(life: Life) -> dict[str, int]:
    found = await life.ledger.fetch("SELECT state, count(*) FROM rollouts GROUP BY state")
    return {str(state): int(str(count)) for state, count in found}


async def test_a_batch_beyond_the_checkpoint_goes_back_and_what_lost_weights_made_is_orphaned(world: World) -> None:
    node = world.nodes[0]
    async with world.life() as life:
        await _begin(life, node)
        await _make_steps(life, node, 4)
        before = await _states(life)
        assert before["assigned"] == 4 * BATCH
        lost = range(2, life.versions.head.version + 1)
    async with world.life() as life:
        await life.stepper.settle()
        assert (life.book.next_step, life.trainer.opened_at_step) == (0, 0)
        after = await _states(life)
        assert sum(after.values()) == sum(before.values()), "everything acknowledged is counted once"
        assert after.keys() <= {"ready", "orphaned", "auditing", "scoring"}
        rows = await life.ledger.fetch("SELECT state, step FROM rollouts")
        assert all((state == "orphaned") == (int(str(step)) > 0) for state, step in rows)
        in_book = [s.rollout for group in life.book.groups.values() for s in group.samples if s.rollout is not None]
        assert len(in_book) == sum(count for state, count in after.items() if state != "orphaned")
        published = await life.ledger.fetch("SELECT version, state FROM versions ORDER BY version")
        assert published == [(1, "published"), *((v, "orphaned") for v in lost), (max(lost) + 1, "published")]
        assert life.versions.head == Head(version=max(lost) + 1, step=0, root=root_of(()))


async def test_steps_of_the_checkpoint_are_final_although_the_ledger_was_not_told(world: World) -> None:
    node = world.nodes[0]
    async with world.life() as life:
        await _begin(life, node)
        await _make_steps(life, node, 3)
        world.saved[2] = life.trainer.weights[:2]  # a kill between the checkpoint and the ledger
    async with world.life() as life:
        await life.stepper.settle()
        steps = await life.ledger.fetch("SELECT step, state FROM steps ORDER BY step")
        assert steps == [(0, "final"), (1, "final"), (2, "rolled_back")]
        assert (await _states(life))["consumed"] == 2 * BATCH
        assert life.book.next_step == 2


async def test_leases_are_put_back_with_their_time_and_those_of_lost_weights_are_void(world: World) -> None:
    north, south = world.nodes
    async with world.life() as life:
        await _begin(life, north, south)
        for _ in range(RULES.groups_per_step):
            await north.work_off(life, groups=1)
        await south.ask(life, groups=1)  # under version 1, which stays, and not for the next step
        await _make_steps(life, north, 1)
        north.hear(life.versions.head)
        await north.ask(life, groups=2)
        (kept,), lost = south.leases, north.leases
        assert lost
        assert all(lease.step == 1 for lease in lost)
    async with world.life() as life:
        now = trio.current_time()
        await _begin(life, north, south)
        assert list(life.book.leases) == [kept.lease_id]
        assert life.book.leases[kept.lease_id].expires_at >= now + kept.duration_s
        states = dict(await life.ledger.fetch("SELECT lease_id, state FROM leases"))
        assert all(states[lease.lease_id] == "void" for lease in lost)
        south.generate(kept)
        assert (await south.submit(life, kept.lease_id)).accepted == tuple(s.index for s in kept.samples)
        for lease in lost:
            north.generate(lease)
            told = await north.submit(life, lease.lease_id)
            assert (told.accepted, told.code) == ((), "result.stale")
            assert told.standing.state != "quarantined"


async def test_no_work_is_given_for_weights_that_are_lost(world: World) -> None:
    node = world.nodes[0]
    async with world.life() as life:
        await _begin(life, node)
        await _make_steps(life, node, 2)
        node.hear(life.versions.head)
    async with world.life() as life:
        await life.stepper.settle()
        life.put_prompts()
        node.join(life)
        answer = await node.ask(life, groups=2)
        assert not answer.leases
        assert answer.wait is not None
        assert f"version {life.versions.head.version}" in answer.wait.why
        node.hear(answer.head)
        assert (await node.ask(life, groups=2)).leases


async def test_a_result_is_received_once_however_often_and_whenever_it_comes(world: World) -> None:
    node = world.nodes[0]
    async with world.life() as life:
        await _begin(life, node)
        await node.ask(life, groups=1)
        (lease,) = node.leases
        node.generate(lease)
        told = []

        async def send() -> None:
            told.append(await node.submit(life, lease.lease_id))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(send)
        life.book.leases.clear()  # as when it ended long ago
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(send)
        assert len({receipt.encode() for receipt in told}) == 1
        assert sum((await _states(life)).values()) == len(lease.samples)
    async with world.life() as life:
        await _begin(life, node)
        assert await node.submit(life, lease.lease_id) == told[0], "after a restart too"


async def test_what_comes_late_counts_as_long_as_nobody_else_has_done_it(world: World) -> None:
    node = world.nodes[0]
    async with world.life() as life:
        await _begin(life, node)
        await node.ask(life, groups=1)
        (lease,) = node.leases
        record = life.book.leases[lease.lease_id]
        await life.ledger.commit(*life.book.end_lease(record, "expired", now=trio.current_time()))
    async with world.life() as life:
        await _begin(life, node)
        assert lease.lease_id not in life.book.leases
        node.generate(lease)

        async def send() -> None:
            assert (await node.submit(life, lease.lease_id)).accepted

        async with trio.open_nursery() as nursery:  # several at once, of a lease that only the ledger knows
            for _ in range(4):
                nursery.start_soon(send)
        assert sum((await _states(life)).values()) == len(lease.samples)
        assert life.registry.record_of(node.identity.peer).accepted == len(lease.samples)


async def test_who_asks_while_the_book_is_suspended_is_told_to_come_again(world: World) -> None:
    node = world.nodes[0]
    async with world.life() as life:
        await _begin(life, node)
        await node.ask(life, groups=1)
        (lease,) = node.leases
        node.generate(lease)
        life.book.suspend()
        with pytest.raises(Refused) as refusal:
            await node.submit(life, lease.lease_id)
        assert refusal.value.code == "request.busy"
        answer = await node.ask(life, groups=1)
        assert answer.wait is not None
        assert "checkpoint" in answer.wait.why
        life.put_prompts()
        assert not (await node.ask(life, groups=1)).leases, "there are prompts, but their numbers may be taken"
        returned = ReturnRequest(lease_ids=(lease.lease_id,), code="node.engine").encode()
        await life.desk.take_back(node.identity.peer, returned)
        await life.rewind(0)
        assert (await node.submit(life, lease.lease_id)).accepted
        assert await life.ledger.fetch("SELECT code FROM offences") == []


async def test_prompts_of_numbers_that_were_leased_are_never_made_again(world: World) -> None:
    node = world.nodes[0]
    seen: set[int] = set()
    for _ in range(4):
        async with world.life() as life:
            await _begin(life, node)
            await _make_steps(life, node, 1)
            groups = {int(str(row[0])) for row in await life.ledger.fetch("SELECT group_id FROM groups")}
            assert seen <= groups
            assert not any(index % 7 == 3 for index in groups), "a prompt that is passed over was leased"
            prompts = dict(await life.ledger.fetch("SELECT group_id, prompt FROM groups"))
            assert all(prompt == int(str(index)).to_bytes(4, "little") for index, prompt in prompts.items())
            seen = groups


async def test_work_of_a_node_that_was_thrown_out_meanwhile_does_not_come_back(world: World) -> None:
    node = world.nodes[0]
    async with world.life() as life:
        await _begin(life, node)
        await node.work_off(life, groups=1)
        await life.discipline.offend(node.identity.peer, "result.sampling", detail="", rollouts=1)
        assert (await _states(life)) == {"void": RULES.samples_per_group}
    async with world.life() as life:
        await life.stepper.settle()
        assert not any(sample.rollout for group in life.book.groups.values() for sample in group.samples)
        assert life.registry.record_of(node.identity.peer) == Record()  # the coordinator loads it, not the world
