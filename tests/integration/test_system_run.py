"""A whole run over real processes: it trains, publishes, audits, ends by itself, and its accounts add up."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio

from tests.support.system import System, open_system

pytestmark = pytest.mark.timeout(400)

STEPS = 24
TRAINER = "rollmesh_learner.training.trainer"


async def test_two_nodes_train_a_model_to_the_end(tmp_path: Path) -> None:
    with open_system(tmp_path, steps=STEPS) as system:
        await _add_nodes_that_begin_together(system, "north", "south")
        assert await system.learner.wait() == 0
        for node in system.nodes.values():
            assert await node.wait(60) == 0, "a node ends by itself when the run does"
        summary = system.summary()
        accused = {node["name"]: system.accused(node["peer"]) for node in summary["nodes"]}
    assert summary["steps"] == STEPS
    assert summary["versions_published"] >= STEPS // 2  # a step without a gradient changes nothing
    assert summary["audits_done"] > 0
    assert summary["audits_failed"] == 0
    assert summary["staleness_max"] <= 2
    assert sorted(node["name"] for node in summary["nodes"]) == ["north", "south"]
    assert all(node["accepted"] > 0 for node in summary["nodes"])
    assert accused == {"north": [], "south": []}
    assert summary["rollouts"]["consumed"] == STEPS * 2 * 4
    assert {"model.safetensors", "config.json", "tokenizer.json", "state.json"} <= {
        path.name for path in Path(summary["checkpoint"]).iterdir()
    }
    assert [line["step"] for line in system.metrics()] == list(range(STEPS))


async def test_a_stopped_learner_goes_on_where_it_was(tmp_path: Path) -> None:
    with open_system(tmp_path, steps=60) as system:
        await system.add_node("north")
        await system.until_run(lambda run: run.step >= 3)
        system.learner.kill(signal.SIGINT)
        assert await system.learner.wait() == 0
        stopped_at = system.summary()["steps"]
        assert 3 <= stopped_at < 60
        system.learner.start()
        assert await system.learner.wait() == 0
        summary = system.summary()
        assert summary["steps"] == 60
        assert f"at step {stopped_at}. Volunteers" in system.learner.log
        assert summary["rollouts"]["consumed"] == 60 * 2 * 4
        versions = [row[0] for row in system.rows("SELECT version FROM versions ORDER BY version")]
        assert versions == sorted(set(versions))


async def test_synchronous_runs_work_too(tmp_path: Path) -> None:
    with open_system(tmp_path, "rollouts.staleness=0", steps=3) as system:
        await system.add_node("north")
        assert await system.learner.wait() == 0
        assert system.summary()["staleness_max"] == 0


async def test_an_environment_that_raises_makes_bad_rollouts_and_no_dead_run(tmp_path: Path) -> None:
    with open_system(tmp_path, steps=3, environment={"raises_every": 3}) as system:
        await system.add_node("north")
        assert await system.learner.wait() == 0
        bad = system.rows("SELECT reward, score_error FROM rollouts WHERE score_error IS NOT NULL")
        assert len(bad) == 2 * 4
        assert all(reward == 0.0 and "breaks on purpose" in error for reward, error in bad)


async def _add_nodes_that_begin_together(system: System, *names: str) -> None:
    """No step is made before all engines are loaded: the first one to be might do the whole run."""
    await system.join_line()
    while not (trainers := system.learner.children(TRAINER)):
        await trio.sleep(0.05)
    os.kill(trainers[0], signal.SIGSTOP)
    for name in names:
        await system.add_node(name)
    for name in names:
        await system.nodes[name].until_logged("the engine holds the weights")
    os.kill(trainers[0], signal.SIGCONT)
