"""The scorer around its children: a node whose answers are dear holds up itself, and its answers are odd."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import trio

from rollmesh_learner.audit import drawing
from rollmesh_learner.work.book import Rules
from rollmesh_learner.work.scoring import Scorer
from rollmesh_peer.children.confinement import AnswerLimits
from rollmesh_peer.children.score import TOO_SLOW, Score
from rollmesh_peer.children.supervisor import Supervisor
from rollmesh_protocol.errors import ChildFailed
from tests.unit.learner.test_scoring_rewound import Reader
from tests.unit.learner.world import FakeNode, Life, settled_life

RULES = Rules(steps=20, staleness=2, groups_per_step=4, samples_per_group=4)
ANSWER_S = 2.0


class Judge(Scorer):
    """Every answer of one node runs into its limit; others cost nothing."""

    slow = ""
    node = ""
    failures = 0

    async def _score(self, members):
        self.node = members[0][0].node if members else ""
        await super()._score(members)

    async def _scores(self, environment, item, answers):
        if self.node != self.slow:
            return tuple(Score(1.0) for _ in answers)
        if self.failures:
            self.failures -= 1
            raise ChildFailed("the sandbox is gone")
        await trio.sleep(ANSWER_S * len(answers))
        return tuple(Score(0.0, f"score failed: {TOO_SLOW} {ANSWER_S:g} s") for _ in answers)


def judge_of(life: Life, *, slow: FakeNode) -> Judge:
    judge = Judge(
        book=life.book, ledger=life.ledger, prompter=cast(Supervisor, Reader()), sandbox=cast(Supervisor, Reader()),
        limits=AnswerLimits(), drawer=life.drawer, is_known=lambda _node: True,
    )  # fmt: skip
    judge.slow = slow.identity.peer
    return judge


async def hand_in(life: Life, node: FakeNode, *, groups: int) -> None:
    for prompt in filter(None, life.book.prompts):
        object.__setattr__(prompt, "item", '{"question": "", "key": {}}')
    for _ in range(groups):
        await node.work_off(life, groups=1)
        life.put_prompts()
        for prompt in filter(None, life.book.prompts):
            object.__setattr__(prompt, "item", '{"question": "", "key": {}}')


async def until_scored(life: Life, judge: Judge, node: FakeNode) -> None:
    """Nothing here waits by the clock: it would run on while the ledger's thread works."""
    async with trio.open_nursery() as nursery:

        def look() -> None:
            if all(rollout.node != node.identity.peer for rollout in life.book.unscored()):
                nursery.cancel_scope.cancel()

        await judge.run(look)


async def test_a_node_whose_answers_are_dear_does_not_hold_up_the_others(folder: Path, autojump_clock: object) -> None:
    async with settled_life(folder, RULES) as (life, (north, south)):
        await hand_in(life, north, groups=3)
        await hand_in(life, south, groups=3)
        assert next(iter(life.book.unscored())).node == north.identity.peer
        started = trio.current_time()
        await until_scored(life, judge_of(life, slow=north), south)
        assert trio.current_time() - started < 3 * ANSWER_S
        assert sum(1 for rollout in life.book.unscored() if rollout.node == north.identity.peer) >= 10


async def test_a_sandbox_that_dies_of_one_nodes_answers_serves_the_others_first(
    folder: Path, autojump_clock: object
) -> None:
    async with settled_life(folder, RULES) as (life, (north, south)):
        await hand_in(life, north, groups=1)
        await hand_in(life, south, groups=2)
        judge = judge_of(life, slow=north)
        judge.failures = 1_000_000
        await until_scored(life, judge, south)


async def test_answers_that_ran_into_their_limits_are_marked(folder: Path, autojump_clock, monkeypatch) -> None:
    marks: dict[str, int] = {}
    weigh = drawing.early_rate

    def seen(evidence, *, base_rate):
        marks["slow" if evidence.reward == 0 else "other"] = evidence.marks
        return weigh(evidence, base_rate=base_rate)

    monkeypatch.setattr(drawing, "early_rate", seen)
    async with settled_life(folder, RULES) as (life, (north, south)):
        await hand_in(life, north, groups=1)
        await hand_in(life, south, groups=1)
        await until_scored(life, judge_of(life, slow=north), north)
    assert marks == {"slow": 1, "other": 0}
