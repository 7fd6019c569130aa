"""Huge, nested and odd answers through every environment that a config may name without a further word.

One scoring child holds all of them, as a learner's does. Whatever the text, there is one outcome within the limits: a
reward in [0, 1], or none and the reason in a line; and the right answer afterwards is scored as if nothing had been.
"""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
import trio

from rollmesh_peer.children.confinement import AnswerLimits
from rollmesh_peer.children.process import open_child
from rollmesh_peer.children.score import ERROR_CHARS
from rollmesh_peer.children.scoring import (
    ENVIRONMENT_VARIABLES,
    SLACK_S,
    EnvironmentChoice,
    deadline_s,
    open_scorer,
    score,
    scorer_spec,
)
from rollmesh_protocol.environments.addition import make
from rollmesh_protocol.environments.interface import Item
from tests.support.odd_answers import ODD_ANSWERS

LIMITS = AnswerLimits(cpu_s=1, wall_s=20.0)
"""Seconds on the clock with room for a busy machine; the seconds of computing are what bounds."""

DATA_SETS_PER_ANSWER = 8
"""Each answer goes to every so-manieth data set, another eighth of them to each; ROLLMESH_TEST_ODD_EVERY=1 for all."""

ITEMS = """
import json
from reasoning_gym.factory import DATASETS
from rollmesh_protocol.environments.reasoning_gym import TEXT_EVALUATING, make
found = {}
for dataset in sorted(set(DATASETS) - set(TEXT_EVALUATING)):
    environment = make({"dataset": dataset}, seed=3)
    item, right = environment.item(5), str(environment._entry(5)["answer"])
    found[dataset] = [item.to_plain(), right, environment.reward(item, right)]
print()
print(json.dumps(found))
"""


async def test_odd_answers_to_additions() -> None:
    item = make({}, seed=1).item(0)
    async with open_child(scorer_spec()) as child:
        await open_scorer(child, [EnvironmentChoice(name="addition")], seed=1)
        scores = await score(child, 0, item, [*ODD_ANSWERS.values(), str(item.key["answer"])])
        rewards = [one.reward for one in scores]
        assert [one.error for one in scores] == [None] * len(scores)
        assert rewards == [0.0] * len(ODD_ANSWERS) + [1.0]


async def test_half_a_surrogate_pair_is_an_answer_like_others() -> None:
    """No tokenizer gives one, but a pipe of UTF-8 would refuse the whole call for it."""
    item = make({}, seed=1).item(0)
    async with open_child(scorer_spec()) as child:
        await open_scorer(child, [EnvironmentChoice(name="addition")], seed=1)
        scores = await score(child, 0, item, ["\ud800", f"\udfff {item.key['answer']}"])
        assert [(one.reward, one.error) for one in scores] == [(0.0, None), (1.0, None)]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_odd_answers_to_every_data_set() -> None:
    pytest.importorskip("reasoning_gym")
    variables = {**ENVIRONMENT_VARIABLES, "PATH": os.defpath}
    run = await trio.run_process([sys.executable, "-c", ITEMS], capture_stdout=True, env=variables)
    items = json.loads(run.stdout.decode().splitlines()[-1])
    assert len(items) > 90
    choices = [EnvironmentChoice(name="reasoning_gym", parameters={"dataset": dataset}) for dataset in items]
    answers = [*ODD_ANSWERS.values(), *(f"<answer>{text}</answer>" for text in ODD_ANSWERS.values())]
    every = int(os.environ.get("ROLLMESH_TEST_ODD_EVERY", DATA_SETS_PER_ANSWER))
    async with open_child(scorer_spec()) as child:
        await open_scorer(child, choices, seed=3, limits=LIMITS)
        for number, (dataset, (plain, right, reward)) in enumerate(items.items()):
            item = Item.from_plain(plain)
            start = time.monotonic()
            some = answers[number % every :: every]
            scores = await score(child, number, item, some, limits=LIMITS)
            took = time.monotonic() - start
            errors = [one.error for one in scores if one.error]
            told = sorted({error.split(":")[0] for error in errors})
            print(f"{dataset:30} {took:6.2f} s, {len(errors):2} errors {told}")
            assert len(scores) == len(some)
            assert all(0.0 <= one.reward <= 1.0 for one in scores)
            assert all(len(error) <= ERROR_CHARS + 20 and error.isprintable() for error in errors), dataset
            (after,) = await score(child, number, item, [right], limits=LIMITS)
            assert (after.reward, after.error) == (reward, None), dataset


def test_the_deadline_of_a_call_covers_the_worst_answers() -> None:
    """Every batch runs into the clock together, and then each of its answers alone."""
    for wall_s in (0.5, 6.0, 600.0):
        limits = AnswerLimits(wall_s=wall_s)
        for count, turns in ((1, 2), (2, 3), (16, 17), (17, 19), (64, 68), (256, 272)):
            assert deadline_s(count, limits) >= turns * wall_s + SLACK_S
