"""Rolling back: nothing of a step that tripped gets out, what it undoes is void, and no kill changes that."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from random import Random
from typing import cast

import pytest
import trio

from rollmesh_learner.records import rollbacks
from rollmesh_learner.records.summary import summarise
from rollmesh_learner.training.tripwires import Bounds
from rollmesh_learner.work.book import Rules
from rollmesh_learner.work.groups import StoredRollout
from rollmesh_peer import faults
from tests.unit.learner.test_steps import Misfortune
from tests.unit.learner.world import Killed, Life, World, hurry, root_of

RULES = Rules(steps=8, staleness=2, groups_per_step=2, samples_per_group=2)
BATCH = RULES.groups_per_step * RULES.samples_per_group
POINTS = [point for point in faults.POINTS if point.startswith("rollback.")]
MODULES = ("steps", "work.leasing", "work.intake", "records.rollbacks")


@pytest.fixture
def world(folder: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    hurry(monkeypatch)
    return World(folder, Random(1), RULES)


async def _finish(world: World, *, most_lives: int = 1) -> int:
    with trio.fail_after(60):
        lives = await world.run_to_the_end(most_lives=most_lives)
    await world.conclude()
    await _nothing_bad_is_left(world)
    return lives


async def _nothing_bad_is_left(world: World) -> None:
    used = {group for batch, _ in world.saved[max(world.saved)] for group, _ in batch}
    assert not used & set(world.poisoned), "a batch that tripped is part of the weights"
    async with world.life() as life:
        unfinished = await life.ledger.fetch("SELECT count(*) FROM rollbacks WHERE state != 'done'")
        assert unfinished == [(0,)]
        for group in world.poisoned:
            states = await life.ledger.fetch("SELECT DISTINCT state FROM rollouts WHERE group_id = ?", group)
            assert {state for (state,) in states} <= {"void", "orphaned", "stale", "ready", "auditing", "scoring"}


async def _rollbacks(world: World) -> tuple[rollbacks.Rollback, ...]:
    async with world.life() as life:
        return await rollbacks.all_rollbacks(life.ledger)


async def test_what_tripped_is_neither_saved_nor_published_nor_used_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.poisoned = {5}

    def look(point: str) -> None:
        if point in ("trainer.export", "trainer.checkpoint"):
            got_out.extend(group for batch, _ in lives[-1].trainer.weights for group, _ in batch)

    lives: list[Life] = []
    got_out: list[int] = []
    world.hook = look
    with caplog.at_level(logging.INFO):
        async with world.life() as life:
            lives.append(life)
            with trio.fail_after(30):
                assert await life.run()
            assert life.stepper.num_rollbacks == 1
            assert "gradient norm" in life.stepper.last_rollback
            summary = await summarise(life.ledger, run="", full_bytes=0, bubble_fraction=0, checkpoint=None)
    await world.conclude()
    await _nothing_bad_is_left(world)
    (rollback,) = await _rollbacks(world)
    assert (rollback.wire, rollback.value, rollback.bound) == ("gradient norm", 1e6, 1000.0)
    assert rollback.to_step in (rollback.tripped_step, rollback.tripped_step - 1), "the newest checkpoint"
    assert rollback.voided >= BATCH
    counts = await world.check()
    assert counts["void"] >= rollback.voided
    lines = [json.loads(line) for line in (world.folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line.get("rollbacks") for line in lines}[rollback.to_step] == [rollback.as_record()]
    assert summary.rollbacks == (rollback.as_record(),)
    assert str(rollback) in caplog.text
    assert 0 in got_out
    assert 5 not in got_out


async def test_nodes_get_the_old_weights_under_a_new_version(world: World) -> None:
    world.poisoned = {5}
    world.checkpoint_every = 100
    await _finish(world)
    (rollback,) = await _rollbacks(world)
    assert rollback.to_step == 0 < rollback.tripped_step
    async with world.life() as life:
        rows = await life.ledger.fetch("SELECT version, step, root, state FROM versions WHERE root NOT NULL")
        undone = [version for version, _, _, state in rows if state == "orphaned"]
        assert undone
        (base, again) = [(version, root, state) for version, step, root, state in rows if step == 0]
        assert base == (1, root_of(()), "published")
        assert again[1:] == base[1:]
        assert cast(int, again[0]) > max(cast(list[int], undone))


@pytest.mark.parametrize("point", POINTS)
async def test_a_kill_on_the_way_back_ends_in_the_same_state(
    world: World, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    world.poisoned = {9}
    world.checkpoint_every = 1
    strikes = 0

    def strike(name: str) -> None:
        nonlocal strikes
        strikes += name == point
        if name == point and strikes == 1:
            raise Killed

    world.hook = strike
    world.bounds = Bounds(min_steps=2)
    for module in MODULES:
        monkeypatch.setattr(f"rollmesh_learner.{module}.fault_point", strike)
    if point == "rollback.discarding":  # only what later steps tell goes back beyond a checkpoint
        world.poisoned = ()
        monkeypatch.setattr("rollmesh_learner.training.tripwires.CHANCE_NATS", -1.0)
        world.reward = lambda rollout: 0.0 if rollout.group_id in (8, 9) else 0.9
    lives = await _finish(world, most_lives=3)
    assert strikes >= 1
    assert lives == 2
    found = await _rollbacks(world)
    assert len(found) == 1
    assert found[0].voided >= BATCH


async def test_a_collapse_that_is_seen_later_undoes_what_was_final(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of step 4 or later answer badly: they, their versions, checkpoints and consumed rollouts are undone."""
    monkeypatch.setattr("rollmesh_learner.training.tripwires.CHANCE_NATS", 0.1)
    world.bounds = Bounds(min_steps=3)
    world.checkpoint_every = 1
    bad: dict[bytes, int] = {}

    def reward(rollout: StoredRollout) -> float:
        if rollout.step >= 4 and not bad:  # which versions the nodes hear of is chance
            bad[rollout.root] = rollout.step
        return 0.0 if rollout.root in bad else 0.9

    world.reward = reward
    await _finish(world)
    (rollback,) = await _rollbacks(world)
    assert rollback.wire == "reward"
    ((root, step),) = bad.items()
    assert rollback.to_step < step <= rollback.tripped_step
    async with world.life() as life:
        made = await life.ledger.fetch("SELECT DISTINCT state FROM rollouts WHERE root = ?", root)
        assert {state for (state,) in made} <= {"void", "orphaned"}
        states = await life.ledger.fetch("SELECT state FROM versions WHERE root = ?", root)
        assert set(states) == {("orphaned",)}


async def test_a_run_that_trips_again_and_again_stops_with_a_good_checkpoint(world: World) -> None:
    world.poisoned = range(4, 1000)
    world.most_rollbacks = 2
    for lives in range(2):
        async with world.life() as life:
            with trio.fail_after(30):
                assert not await life.run()
            assert life.stepper.state == life.stepper.given_up
            assert "3 rollbacks within 1000 steps are more than tripwires.most_rollbacks = 2" in life.stepper.given_up
            assert life.stepper.num_rollbacks == 3, "a second start makes no step"
            assert life.trainer.opened_at_step == max(world.saved, default=0)
        await world.check()
        assert all(group < 4 for weights in world.saved.values() for batch, _ in weights for group, _ in batch), lives
    world.poisoned = ()
    world.most_rollbacks = 3
    await _finish(world)


async def test_nobody_watches_a_run_that_is_not_to_be_watched(world: World) -> None:
    world.poisoned = {5}
    world.is_watched = False
    with trio.fail_after(30):
        await world.run_to_the_end(most_lives=1)
    await world.conclude()
    assert await _rollbacks(world) == ()


@pytest.mark.parametrize("block", range(6))
async def test_nothing_is_lost_or_trained_twice_whatever_happens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    hurry(monkeypatch)
    rolled_back = 0
    for seed in range(block * 5, block * 5 + 5):
        random = Random(seed)
        fortune = Misfortune(random, kills=random.choice((0.0, 0.03, 0.08)), faults=random.choice((0.0, 0.05, 0.15)))
        for module in MODULES:
            monkeypatch.setattr(f"rollmesh_learner.{module}.fault_point", fortune)
        home = folder / f"{seed}"
        home.mkdir()
        world = World(
            home, random, RULES, hook=fortune, checkpoint_every=random.choice((1, 2, 3)),
            publish_every=random.choice((1, 1, 2, 3)), poisoned=set(random.sample(range(24), 3)),
        )  # fmt: skip
        try:
            with trio.fail_after(60):
                await world.run_to_the_end()
            await world.conclude()
            await _nothing_bad_is_left(world)
            rolled_back += len(await _rollbacks(world))
        except BaseException as error:
            error.add_note(f"seed {seed}, struck: {sorted(fortune.struck)}")
            raise
    assert rolled_back
