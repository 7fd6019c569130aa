"""The first moments of a run, with children that die in them. Publisher and trainer are made of a few lines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from rollmesh_learner.beginning import begin
from rollmesh_learner.crew import Crew
from rollmesh_learner.publishing.publisher import Publisher
from rollmesh_learner.records.ledger import open_ledger
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.messages import Head, PolicyHeader
from tests.unit.learner.world import header_of

ROOT = bytes(range(32))


class Base:
    """A trainer and a publisher; each named call fails as often as ``failing`` says."""

    def __init__(self, failing: dict[str, int]) -> None:
        self.failing = dict(failing)
        self.head = Head(version=0, step=0, root=bytes(32))
        self.life, self.opened_at_step = 1, 0

    async def restore(self, announced: list[Head]) -> None:
        self._perhaps("restore")
        self.head = announced[-1] if announced else self.head

    async def export(self, path: Path, *, life: int) -> None:
        self._perhaps("export")
        path.write_bytes(ROOT)

    async def publish_base(self, image: Path, *, version: int, step: int) -> PolicyHeader:
        self._perhaps("publish")
        self.head = Head(version=version, step=step, root=image.read_bytes())
        return header_of(self.head, parent=None)

    def _perhaps(self, call: str) -> None:
        self.failing[call] = self.failing.get(call, 0) - 1
        if self.failing[call] >= 0:
            raise ChildFailed(f"it was killed ({call})")


async def _begin(folder: Path, base: Base) -> bytes:
    async with open_ledger(folder / "ledger.sqlite") as ledger:
        hands = cast(Crew, SimpleNamespace(trainer=base))
        return await begin(ledger, cast(Publisher, base), hands, exports=folder)


@pytest.mark.parametrize("failing", [{}, {"restore": 1}, {"export": 2}, {"publish": 2}, {"restore": 1, "publish": 3}])
async def test_a_run_begins_although_children_die(folder: Path, failing: dict[str, int]) -> None:
    base = Base(failing)
    assert await _begin(folder, base) == ROOT
    assert base.head.version == 1 + failing.get("publish", 0), "a number is reserved for each try"
    again = Base({"restore": 2})
    assert await _begin(folder, again) == ROOT
    assert again.head == base.head, "what was published is found, and nothing is published again"


async def test_children_that_always_die_end_it_with_their_words(folder: Path) -> None:
    with pytest.raises(BaseExceptionGroup) as group:
        await _begin(folder, Base({"export": 10**6}))
    assert group.group_contains(ChildFailed, match="it was killed")


async def test_published_weights_that_are_gone_from_the_disk_are_published_anew(folder: Path) -> None:
    await _begin(folder, Base({}))
    gone = Base({})

    async def find_nothing(announced: list[Head]) -> None:
        assert announced

    gone.restore = find_nothing  # type: ignore[method-assign]
    gone.opened_at_step = 4
    assert await _begin(folder, gone) == ROOT
    assert (gone.head.version, gone.head.step) == (2, 4)
