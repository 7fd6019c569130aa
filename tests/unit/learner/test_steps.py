"""The stepper in a world of failing children, full disks and kills: what it promises holds in every history."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import trio

from rollmesh_learner.book import Rules
from rollmesh_protocol.errors import ChildFailed, HostError
from tests.unit.learner.world import Killed, World, hurry

MEMORY = Path("/dev/shm")
RULES = Rules(steps=8, staleness=2, groups_per_step=2, samples_per_group=2)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is one: thousands of transactions are flushed."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


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
            raise ChildFailed("the child was killed", code="child.died")


@pytest.mark.parametrize("block", range(8))
async def test_nothing_is_lost_or_trained_twice_whatever_happens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    hurry(monkeypatch)
    lives = 0
    struck: set[str] = set()
    for seed in range(block * 5, block * 5 + 5):
        random = Random(seed)
        fortune = Misfortune(random, kills=random.choice((0.0, 0.03, 0.08)), faults=random.choice((0.0, 0.05, 0.15)))
        for module in ("steps", "leasing", "intake"):
            monkeypatch.setattr(f"rollmesh_learner.{module}.fault_point", fortune)
        home = folder / f"{seed}"
        home.mkdir()
        world = World(
            home, random, RULES, hook=fortune, checkpoint_every=random.choice((1, 2, 3)),
            publish_every=random.choice((1, 1, 2, 3)),
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
