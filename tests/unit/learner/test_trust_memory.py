"""What a restart must not forget of trust, what absence does through the real desks, and who is held back when."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest

from rollmesh_learner.members.nodes import Node
from rollmesh_learner.members.shares import LATELY_S, at_work
from rollmesh_learner.members.standing import Record, state_of
from rollmesh_learner.records import restore
from rollmesh_learner.records.audits import recent_margins
from rollmesh_learner.records.ledger import Statement
from rollmesh_learner.work.book import Rules
from rollmesh_protocol.messages import Hello
from rollmesh_protocol.verdicts.margins import KEPT_WINDOWS, Thresholds
from tests.unit.learner.world import FakeNode, Life, World, settled_life

RULES = Rules(steps=20, staleness=2, groups_per_step=4, samples_per_group=2)
WEEK = 7 * 86_400.0
HELLO = Hello(majors=(1,), software="", name="", role="worker", engine=None, addresses=(), invite=None)


def audit_row(number: int, *, node: str = "a", verdict: str = "pass", tokens: int = 10, low: int = 0) -> Statement:
    return Statement(
        "INSERT INTO audits (lease_id, sample, node, verdict, tokens, over_half, over_one, over_three, largest, at)"
        " VALUES (?, 0, ?, ?, ?, ?, 0, 0, 0.1, ?)",
        (number.to_bytes(16, "little"), node, verdict, tokens, low, float(number)),
    )


async def test_the_windows_over_which_nodes_are_judged_outlive_the_process(folder: Path) -> None:
    async with settled_life(folder, RULES) as (life, _):
        await life.ledger.commit(
            *(audit_row(number, node="a", low=number) for number in range(5)),
            *(audit_row(10 + number, node="b", tokens=1000) for number in range(20)),
            audit_row(40, node="c", low=7),
            audit_row(41, node="c", verdict="soft", low=7),
            audit_row(42, node="c", low=1),
        )
        found = await recent_margins(life.ledger, Thresholds())
        assert found["a"] == [(10, number, 0) for number in range(5)], "the oldest first"
        assert found["c"] == [(10, 1, 0)], "after a soft failure it began anew"
        assert len(found["b"]) * 1000 == KEPT_WINDOWS * Thresholds().window_tokens


async def test_whoever_comes_back_is_judged_over_the_same_window(folder: Path) -> None:
    async with settled_life(folder, RULES) as (life, (node, _)):
        kept = life.registry.get(node.identity.peer)
        assert kept is not None
        kept.recent_margins.append((10, 1, 0))
        kept.last_seen = -1e9
        life.registry._forget_gone(0.0)
        assert life.registry.get(node.identity.peer) is None
        node.join(life)
        again = life.registry.get(node.identity.peer)
        assert again is not None and again.recent_margins == [(10, 1, 0)]


async def test_absence_and_offences_are_in_the_ledger(folder: Path) -> None:
    async with settled_life(folder, RULES) as (life, (node, other)):
        long_ago = time.time() - WEEK - 60
        life.registry.set_record(node.identity.peer, Record(passed=1000, worked_at=long_ago))
        await node.work_off(life, groups=1)
        await life.discipline.offend(other.identity.peer, "result.logprob", detail="", rollouts=1)
        records = await restore.load_records(life.ledger)
        back = records[node.identity.peer]
        assert state_of(back, life.registry.rules) == "probation"
        assert back.worked_at == pytest.approx(time.time(), abs=60)
        bad = records[other.identity.peer]
        assert (bad.soft_in_a_row, bad.soft_at) == (1.0, pytest.approx(time.time(), abs=60))


# --- who counts as at work -------------------------------------------------------------------------------------------
def worker(peer: str, *, speed: float = 1.0, accepted_at: float | None = 0.0, failures: int = 0) -> Node:
    node = Node(peer, HELLO, Record(), last_seen=0.0, failures=failures, last_accepted_at=accepted_at)
    node.samples_per_s = speed
    return node


def test_who_counts_is_who_delivers() -> None:
    nodes = [
        worker("delivers", speed=2.0),
        worker("promises", speed=0.0, accepted_at=None),
        worker("let leases run out", failures=1),
        worker("stopped", accepted_at=-LATELY_S - 1),
        worker("is slow, and at it", speed=0.5, accepted_at=-1000.0),
    ]
    working = at_work(nodes, holders={"promises", "is slow, and at it"}, now=0.0)
    assert [node.samples_per_s for node in working] == [2.0, 0.5]


# --- shares and audits, at the desk ----------------------------------------------------------------------------------
async def start(life: Life, *nodes: FakeNode) -> None:
    await life.stepper.settle()
    life.put_prompts()
    for node in nodes:
        node.join(life)
        node.hear(life.versions.head)


async def test_two_new_nodes_have_their_share_and_a_steady_one_is_not_asked(folder: Path) -> None:
    world = World(folder, Random(0), RULES, cap=0.25)
    north, south = world.nodes
    async with world.life() as life:
        await start(life, north, south)
        for node in world.nodes:
            await node.work_off(life, groups=1)
            known = life.registry.get(node.identity.peer)
            assert known is not None
            known.samples_per_s = 100.0  # equal, and enough for any allowance
        life.shares._looked_at = -1e9  # as after a second
        life.put_prompts()
        answer = await north.ask(life, groups=4)
        while answer.leases:
            answer = await north.ask(life, groups=4)
        held = [len(lease.samples) for lease in north.leases]
        assert sum(held) == 4 + 6, "six of each batch of eight; of the first it had two already"
        assert answer.wait is not None
        assert answer.wait.why == "others: below full standing a node makes at most 75% of a batch"
        life.registry.set_record(north.identity.peer, Record(passed=1000))
        assert (await north.ask(life, groups=4)).leases


async def test_new_nodes_wait_while_audits_are_behind_and_steady_ones_do_not(folder: Path) -> None:
    world = World(folder, Random(0), RULES, queue=4)
    north, south = world.nodes
    async with world.life() as life:
        await start(life, north, south)
        life.registry.rules = type(life.registry.rules)(
            new_rollouts=5, probation_rollouts=10, rate_new=1.0, rate_probation=0.5, rate_steady=0.0
        )
        south_record = Record(passed=1000)
        life.registry.set_record(south.identity.peer, south_record)
        for _ in range(2):
            assert (await north.work_off(life, groups=1))[0].accepted
            await life.score_all_but_audits()
        assert life.shares.load(now=0.0).waiting == 4
        answer = await north.ask(life, groups=1)
        assert not answer.leases and answer.wait is not None
        assert answer.wait.why.startswith("audits, which are behind")
        assert (await south.ask(life, groups=1)).leases
        for rollout in [*life.book.pending("auditing")][:2]:
            await life.ledger.commit(*life.book.pass_audit(rollout.key, rollout.logprobs))
        assert (await north.ask(life, groups=1)).leases


async def test_who_only_holds_leases_keeps_nobody_from_work(folder: Path) -> None:
    world = World(folder, Random(0), RULES, queue=4)
    north, south = world.nodes
    async with world.life() as life:
        await start(life, north, south)
        life.registry.rules = type(life.registry.rules)(
            new_rollouts=5, probation_rollouts=10, rate_new=1.0, rate_probation=1.0, rate_steady=0.0
        )
        hoarder = life.registry.get(south.identity.peer)
        assert hoarder is not None
        await south.ask(life, groups=4)
        assert south.leases and life.shares.load(now=0.0).expected == 0
        hoarder.samples_per_s = 1.0  # it has delivered once
        assert life.shares.load(now=0.0).expected == sum(len(lease.samples) for lease in south.leases)
        hoarder.failures = 1  # and let a lease run out
        assert life.shares.load(now=0.0).expected == 0
        assert (await north.ask(life, groups=1)).leases
