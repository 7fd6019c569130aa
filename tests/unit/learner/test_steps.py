"""The stepper in a world of failing children, full disks and kills: what it promises holds in every history."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import trio

from rollmesh_learner.work.book import Rules
from rollmesh_peer.children.failure import DIED
from rollmesh_protocol.errors import ChildFailed, HostError
from tests.unit.learner.world import Killed, Life, World, hurry

RULES = Rules(steps=8, staleness=2, groups_per_step=2, samples_per_group=2)


class Misfortune:
    """Raises, by chance, what children and machines raise, and kills the learner."""

    def __init__(self, random: Random, *, kills: float, faults: float) -> None:
        self._random = random
        self._kills = kills
        self._faults = faults
        self.passed: dict[str, int] = {}
        self.struck: set[str] = set()

    def __call__(self, point: str) -> None:
        self.passed[point] = self.passed.get(point, 0) + 1
        chance = self._random.random()
        if chance < self._kills:
            self.struck.add(f"kill {point}")
            raise Killed
        if chance < self._kills + self._faults and point.startswith(("trainer.", "publisher.")):
            self.struck.add(f"fault {point}")
            is_full = point in ("trainer.export", "trainer.checkpoint", "publisher.prepare")
            if is_full and self._random.random() < 0.5:
                raise HostError("the disk is full")
            raise ChildFailed("the child was killed", code=self._random.choice((DIED, DIED, DIED, "child.failed")))


@pytest.mark.parametrize("block", range(8))
async def test_nothing_is_lost_or_trained_twice_whatever_happens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    hurry(monkeypatch)
    lives = 0
    struck: set[str] = set()
    for seed in range(block * 5, block * 5 + 5):
        random = Random(seed)
        kills = (0.0, 0.03, 0.08, 0.03, 0.08)[seed % 5]
        fortune = Misfortune(random, kills=kills, faults=random.choice((0.0, 0.05, 0.15)))
        for module in ("steps", "work.leasing", "work.intake"):
            monkeypatch.setattr(f"rollmesh_learner.{module}.fault_point", fortune)
        home = folder / f"{seed}"
        home.mkdir()
        world = World(
            home, random, RULES, hook=fortune, checkpoint_every=random.choice((1, 2, 3)),
            publish_every=random.choice((1, 1, 2, 3)), changes=lambda _, random=random: random.random() < 0.8,
        )  # fmt: skip
        try:
            with trio.fail_after(60):
                lives += await world.run_to_the_end()
            await world.conclude()
        except BaseException as error:
            error.add_note(f"seed {seed}, struck: {sorted(fortune.struck)}")
            raise
        struck |= fortune.struck
    assert lives > 5
    assert struck


# --- one thing at a time ---------------------------------------------------------------------------------------------


async def _run(world: World) -> None:
    with trio.fail_after(30):
        await world.run_to_the_end(most_lives=1)
    await world.conclude()


class Once:
    """Raises an error at the n-th passing of a point, so many times in a row."""

    def __init__(self, point: str, error: Exception, *, at: int = 1, times: int = 1) -> None:
        self._point = point
        self._error = error
        self._strikes = range(at, at + times)
        self.passed = 0

    def __call__(self, point: str) -> None:
        self.passed += point == self._point
        if point == self._point and self.passed in self._strikes:
            raise self._error


@pytest.fixture
def world(folder: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    hurry(monkeypatch)
    return World(folder, Random(1), RULES)


@pytest.mark.parametrize("point", ["trainer.checkpoint", "trainer.export", "publisher.prepare"])
async def test_a_full_disk_is_told_and_waited_for(world: World, caplog: pytest.LogCaptureFixture, point: str) -> None:
    world.hook = once = Once(point, HostError("the disk is full"), at=2, times=5)
    await _run(world)
    assert once.passed > 7
    told = [record.getMessage() for record in caplog.records if "the disk is full" in record.getMessage()]
    assert len(told) == 1, "one trouble is told once"
    assert "waits: the disk is full; trying again every" in told[0]
    assert world.rewinds == 1, "the trainer was not blamed for it"


async def test_what_waits_is_in_the_trouble_and_a_stop_ends_the_waiting(world: World) -> None:
    world.hook = Once("trainer.checkpoint", HostError("the disk is full"), times=10**9)
    ended: list[str] = []

    async def run(life: Life) -> None:
        try:
            await life.run()
        except* HostError as group:
            ended.extend(str(error) for error in group.exceptions[0].exceptions)  # type: ignore[attr-defined]

    async with world.life() as life:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run, life)
                while not life.stepper.trouble:
                    await trio.sleep(0.001)
                assert life.stepper.trouble == "the checkpoint of step 2 waits: the disk is full"
                assert life.stepper.state == "saving a checkpoint of step 2"
                life.stepper.stop()
    assert ended == ["the disk is full"]
    await world.check()
    world.hook = lambda _: None
    await _run(world)


async def test_steps_go_on_while_a_publication_waits_and_its_number_is_not_used_again(world: World) -> None:
    world.hook = Once("publisher.prepare", ChildFailed("the weights worker was killed"), times=3)
    await _run(world)
    async with world.life() as life:
        rows = await life.ledger.fetch("SELECT version, state FROM versions ORDER BY version")
        assert rows[:5] == [(1, "published"), *((number, "reserved") for number in (2, 3, 4)), (5, "published")]


async def test_a_trainer_that_lives_and_refuses_is_replaced(world: World) -> None:
    """Nobody can say what it holds: it must not go on from a step that the book has left."""
    world.hook = once = Once("trainer.train", ChildFailed("a rollout cannot be read"), at=5)
    await _run(world)
    assert once.passed > 8
    assert world.rewinds == 2


async def test_a_trainer_replaced_behind_the_steppers_back_never_saves_under_a_wrong_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died after its answer and came back before the next question: FakeTrainer knows which step it is asked for."""
    lives: list[Life] = []
    deaths = iter((3, 4, 9))
    next_death = next(deaths)
    passed = 0

    def die_quietly(point: str) -> None:
        nonlocal passed, next_death
        passed += point == "step.trained"
        if point == "step.trained" and passed == next_death:
            next_death = next(deaths, 0)
            lives[-1].trainer.open()

    monkeypatch.setattr("rollmesh_learner.steps.fault_point", die_quietly)
    async with world.life() as life:
        lives.append(life)
        with trio.fail_after(30):
            assert await life.run()
    await world.conclude()
    assert world.rewinds == 4


async def test_a_version_that_was_lost_and_equals_the_checkpoint_is_taken_up_again(world: World) -> None:
    """Published at step 3, with the weights of step 2: going back to 2 must not name the base as their root."""
    world.publish_every = 3
    world.changes = lambda step: step != 2
    async with world.life() as life:
        node = world.nodes[0]
        node.join(life)
        await life.stepper.settle()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(life.stepper.run)
            while life.versions.head.version < 2:
                life.put_prompts()
                node.hear(life.versions.head)
                await node.work_off(life, groups=1)
                await life.score_all()
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        assert life.versions.head.step == 3
        published = life.versions.head
    async with world.life() as life:
        await life.stepper.settle()
        assert life.trainer.opened_at_step == 2
        assert (life.versions.head.version, life.versions.head.root) == (published.version, published.root)
        assert life.versions.head.step == 2
    await _run(world)


async def test_a_stop_saves_what_there_is(world: World) -> None:
    world.checkpoint_every = 100
    async with world.life() as life:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(life.run)
            with trio.fail_after(20):
                while life.book.next_step < 3:
                    await trio.sleep(0.001)
                life.stepper.stop()
        assert max(world.saved) == life.book.next_step >= 3
    await world.check()
    await _run(world)
