"""The draw around a real book and ledger: after the scores, once, and nothing is consumed before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from rollmesh_learner.audit import drawing
from rollmesh_learner.audit.draw import is_drawn
from rollmesh_learner.audit.drawing import MEANS
from rollmesh_learner.audit.weighing import Means
from rollmesh_learner.members.standing import Record, StandingRules
from rollmesh_learner.members.withheld import TELLING_Z
from rollmesh_learner.records.audits import audit_tokens, draw_means, withheld_leases
from rollmesh_learner.work.book import Rules
from rollmesh_protocol.messages import ReturnRequest
from tests.unit.learner.world import FakeNode, Life, settled_life

RULES = Rules(steps=200, staleness=2, groups_per_step=2, samples_per_group=2)
STEADY = Record(passed=1000)
PROBATION = Record(passed=7)
"""In the world of these tests: 5 audits passed, not yet 10; its rate is 0.5."""


def stand(life: Life, node: FakeNode, record: Record) -> None:
    life.registry.set_record(node.identity.peer, record)


async def share_out(life: Life, north: FakeNode, south: FakeNode) -> int:
    """One group of which each node has one sample; both are delivered. Its id."""
    await north.ask(life, groups=1)
    (lease,) = north.leases
    group = life.book.groups[lease.group]
    group.samples[1].reopen()
    life.book.leases[lease.lease_id].indices = (0,)
    north.leases = [lease.model_copy(update={"samples": lease.samples[:1]})]
    await south.ask(life, groups=1)
    for node in (north, south):
        (mine,) = node.leases
        node.generate(mine)
        await node.submit(life, mine.lease_id)
        node.leases.clear()
    return lease.group


async def test_nothing_counts_before_its_whole_group_is_scored(folder: Path) -> None:
    async with settled_life(folder, RULES) as (life, (north, south)):
        stand(life, north, PROBATION)
        stand(life, south, PROBATION)
        group = life.book.groups[await share_out(life, north, south)]
        first, second = (sample.rollout for sample in group.samples)
        assert first is not None and second is not None
        await life.score_one(first, reward=1.0)
        assert (first.state, first.reward) == ("scoring", 1.0)
        assert [*life.book.unscored()] == [second]
        await life.score_one(second, reward=0.0)
        assert {first.state, second.state} <= {"ready", "auditing"}
        stored = await life.ledger.fetch("SELECT drawn, state FROM rollouts ORDER BY sample")
        assert stored == [(int(r.drawn), r.state) for r in (first, second)]


async def test_where_everything_is_audited_nobody_waits_for_the_others_of_a_group(folder: Path) -> None:
    async with settled_life(folder, RULES) as (life, (north, south)):
        life.registry.rules = replace(life.registry.rules, rate_new=1.0)
        group = life.book.groups[await share_out(life, north, south)]
        first = group.samples[0].rollout
        assert first is not None
        await life.score_one(first)
        assert first.state == "auditing"


async def test_a_restart_keeps_every_draw_and_scores_again_what_was_not_drawn_yet(folder: Path) -> None:
    async with settled_life(folder, RULES) as (life, (north, south)):
        stand(life, north, STEADY)
        stand(life, south, PROBATION)
        for _ in range(3):
            await north.work_off(life, groups=1)
        await life.score_all_but_audits()
        before = {s.rollout.key: s.rollout.drawn for g in life.book.groups.values() for s in g.samples if s.rollout}
        half = life.book.groups[await share_out(life, north, south)].samples[0].rollout
        assert half is not None and before
        await life.score_one(half, reward=1.0)
        means = life.drawer.means
    world = life.world
    async with world.life() as again:
        await again.stepper.settle()
        for key, drawn in before.items():
            rollout = again.book.rollout(key)
            assert rollout is not None and rollout.drawn == drawn
        undecided = again.book.rollout(half.key)
        assert undecided is not None and (undecided.state, undecided.reward) == ("scoring", 1.0)
        assert await draw_means(again.ledger, MEANS) == means


async def test_in_full_standing_the_telling_ones_are_drawn_and_the_mean_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: dict[tuple[bytes, int], float] = {}

    def noted(key: bytes, *, lease_id: bytes, sample: int, rate: float) -> bool:
        rates[lease_id, sample] = rate
        return is_drawn(key, lease_id=lease_id, sample=sample, rate=rate)

    monkeypatch.setattr(drawing, "is_drawn", noted)
    async with settled_life(folder, RULES) as (life, (north, _)):
        stand(life, north, STEADY)
        life.registry.rules = StandingRules(
            new_rollouts=0, probation_rollouts=0, rate_new=1.0, rate_probation=1.0, rate_steady=0.1
        )
        won: list[float] = []
        lost: list[float] = []
        for _ in range(150):
            life.put_prompts()
            if life.book.batch_is_ready():
                life.book.assemble(wall_time=0)
                life.book.next_step = 0  # weights of one version for ever
            await north.work_off(life, groups=2)
            for rollout in [*life.book.unscored()]:
                await life.score_one(rollout, reward=float(rollout.group_id % 3 == 0 and rollout.sample == 0))
            decided = [r for state in ("ready", "auditing") for r in life.book.pending(state)]
            for r in decided:
                (won if r.reward else lost).append(rates[r.lease_id, r.sample])
            for rollout in [*life.book.pending("auditing")]:
                await life.ledger.commit(*life.book.pass_audit(rollout.key, rollout.logprobs))
        assert len(won) > 40 and mean(won) > 1.5 * mean(lost)
        assert mean(won + lost) == pytest.approx(0.1, rel=0.1)
        tokens = await audit_tokens(life.ledger)
        assert tokens.work == life.drawer.work_tokens == life.drawer.means.work_tokens


async def test_the_draw_is_that_of_the_key_whatever_the_rate(folder: Path) -> None:
    async with settled_life(folder, RULES) as (life, (north, _)):
        stand(life, north, PROBATION)
        for _ in range(3):
            await north.work_off(life, groups=1)
        await life.score_all_but_audits()
        rollouts = [s.rollout for g in life.book.groups.values() for s in g.samples if s.rollout]
        assert len(rollouts) == 6
        for r in rollouts:
            assert r.drawn == is_drawn(bytes(32), lease_id=r.lease_id, sample=r.sample, rate=0.5)


@pytest.mark.parametrize("how", ["returned", "expired"])
async def test_what_a_node_lets_go_of_is_compared_when_another_has_done_it(folder: Path, how: str) -> None:
    """North delivers what is right and lets go of what is wrong; the ledger alone tells it after a restart, too."""
    async with settled_life(folder, RULES) as (life, (north, south)):
        peer = north.identity.peer
        for number in range(24):
            life.put_prompts()
            await north.ask(life, groups=1)
            (lease,) = north.leases
            if number % 2:
                if how == "returned":
                    request = ReturnRequest(lease_ids=(lease.lease_id,), code="node.stopping").encode()
                    await life.desk.take_back(peer, request)
                else:
                    record = life.book.leases[lease.lease_id]
                    await life.ledger.commit(*life.book.end_lease(record, "expired", now=0.0))
                await south.work_off(life, groups=1)
            else:
                north.generate(lease)
                await north.submit(life, lease.lease_id)
            north.leases.clear()
            for rollout in [*life.book.unscored()]:
                await life.score_one(rollout, reward=float(number % 2 == 0))
            for rollout in [*life.book.pending("auditing")]:
                await life.ledger.commit(*life.book.pass_audit(rollout.key, rollout.logprobs))
            if life.book.batch_is_ready():
                life.book.assemble(wall_time=0)
                life.book.next_step = 0
        found = life.drawer.withheld.judge(peer)
        assert (found.abandoned, found.delivered) == (12, 12)
        assert found.reward_z > TELLING_Z and found.length_z == 0
        assert not life.drawer.withheld.judge(south.identity.peer).is_telling
        assert not life.registry.record_of(peer).rejected, "it is audited more, and nothing else"
        assert (await withheld_leases(life.ledger)).judge(peer) == found


def test_the_means_start_from_what_is_usual() -> None:
    assert 1.0 < Means().weight / Means().count < 7.0
