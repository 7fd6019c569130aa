"""The scorer around its children: a book that goes back to a checkpoint under it loses and holds up nothing."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import trio

from rollmesh_learner.work.book import Rules
from rollmesh_learner.work.scoring import Scorer
from rollmesh_peer.children.confinement import AnswerLimits
from rollmesh_peer.children.score import Score
from rollmesh_peer.children.supervisor import Supervisor
from tests.unit.learner.world import Life, settled_life

RULES = Rules(steps=20, staleness=2, groups_per_step=2, samples_per_group=2)


class Reader:
    """A prompter that reads every completion as the same word."""

    @asynccontextmanager
    async def use(self):
        yield self

    async def call(self, verb: str, body: dict, *, deadline_s: float) -> dict:
        assert verb == "decode"
        await trio.lowlevel.checkpoint()
        return {"texts": ["word"] * len(body["completions"])}


class Judge(Scorer):
    """Gives everything one point; the first time, the book goes back to the checkpoint while it thinks."""

    life: Life
    rewinds = 1

    async def _scores(self, environment, item, answers):
        if self.rewinds:
            self.rewinds -= 1
            await self.life.rewind(0)
        return tuple(Score(1.0, "") for _ in answers)


async def test_what_is_scored_while_the_book_goes_back_is_drawn_for_all_the_same(folder: Path) -> None:
    async with settled_life(folder, RULES) as (life, (node, _)):
        for prompt in filter(None, life.book.prompts):
            object.__setattr__(prompt, "item", '{"question": "", "key": {}}')
        await node.work_off(life, groups=1)
        judge = Judge(
            book=life.book, ledger=life.ledger, prompter=cast(Supervisor, Reader()),
            sandbox=cast(Supervisor, Reader()), limits=AnswerLimits(), drawer=life.drawer,
            is_known=lambda _node: True,
        )  # fmt: skip
        judge.life = life
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(judge.run, lambda: None)
                while [*life.book.pending("scoring")]:
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()
        assert life.world.rewinds >= 1
        rollouts = [s.rollout for group in life.book.groups.values() for s in group.samples if s.rollout]
        assert len(rollouts) == 2 and {rollout.reward for rollout in rollouts} == {1.0}
        assert {rollout.state for rollout in rollouts} <= {"ready", "auditing"}
