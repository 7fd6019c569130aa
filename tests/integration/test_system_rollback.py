"""A step goes wrong in a run of real processes: nodes follow back to the old weights, and the run goes on, or stops."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.support.chronicle import Chronicle, fetched, held
from tests.support.system import System, open_system

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 200.0
"""Of one life; a quiet machine needs ten seconds."""
STEPS = 8
SETTINGS = ("tripwires.enabled=true", "training.lr=1e-4", "leases.min_duration_s=2", "leases.max_duration_s=5")
GROUP, SAVED_EVERY = 15, 4
"""Two groups a step, numbered from 0: that group is in the last batch, or, where a node's share or a late answer moved
a group, in an earlier one. The batch of step 4, which begins from the checkpoint, takes none beyond 13."""


def lying(figure: str, value: str, groups: str) -> tuple[str, ...]:
    """A learner whose trainer gives a figure this value whenever a batch holds one of these groups."""
    return (sys.executable, "-m", "tests.support.tripping_learner", figure, value, groups, "--")


async def test_nodes_follow_back_to_the_old_weights_and_the_run_goes_on(tmp_path: Path) -> None:
    settings = (*SETTINGS, f"training.checkpoint_every={SAVED_EVERY}")
    within = lying("gradient_norm", "1e6", str(GROUP))
    with open_system(tmp_path, *settings, steps=STEPS, within=within) as system:
        chronicle = Chronicle(system)
        nodes = [await system.add_node(name) for name in ("north", "south")]
        run = await system.until_run(lambda run: run.rollbacks > 0, timeout_s=PATIENCE_S)
        assert "(gradient norm: gradient_norm 1e+06 is above 1000)" in run.last_rollback
        chronicle.look()
        assert await system.learner.wait(PATIENCE_S) == 0
        chronicle.conclude(steps=STEPS)
        for node in nodes:
            assert await node.wait(60) == 0
        record = _the_only_rollback(system)
        to_step = record["to_step"]
        assert (record["wire"], record["value"], record["bound"]) == ("gradient norm", 1e6, 1000.0)
        assert to_step == SAVED_EVERY < record["from_step"]
        assert f"step {record['from_step']} tripped a wire (gradient norm" in system.learner.log
        assert f"{record['voided']} rollouts are void" in system.learner.log
        voided = system.rows("SELECT count(*) FROM rollouts WHERE state = 'void'")
        assert voided == [(record["voided"],)]
        assert system.rows("SELECT state FROM groups WHERE group_id = ?", GROUP) == [("dropped",)]
        before, undone, after = _versions_of(system, to_step)
        assert before < min(undone) <= max(undone) < after
        for node in nodes:
            versions = held(node.log)
            assert versions == sorted(versions)
            assert after in versions or any(version > after for version in versions), "it follows, and works on"
            assert all(size < system.summary()["full_bytes"] for _, size in fetched(node.log)[1:]), "by patches alone"
        assert any(after in held(node.log) for node in nodes)
        assert "Traceback" not in system.learner.log + "".join(node.log for node in nodes)


DEATHS = ("rollback.tripped", "rollback.recorded", "rollback.discarded", "rollback.done", "version.reserved")
_NEVER = 10**6
"""A group that is not reached."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_learner_that_is_killed_on_its_way_back_ends_where_it_would_have(tmp_path: Path) -> None:
    """One run whose trainer says each time that its gradient is no number, and a learner that dies at every point."""
    steps = 2 * STEPS  # each life may need two or three before it comes to the group that is lied about
    with open_system(tmp_path, *SETTINGS, steps=steps, faults=DEATHS[0], within=lying("loss", "nan", "7")) as system:
        chronicle = Chronicle(system)
        nodes = [await system.add_node(name) for name in ("north", "south")]
        for death in [*DEATHS[1:], ""]:
            assert await system.learner.wait(PATIENCE_S) == -signal.SIGKILL
            chronicle.look()
            _lie_about(system, _next_group(system) + 3 if death else _NEVER)
            system.learner.start(faults=death)
        assert await system.learner.wait(PATIENCE_S) == 0
        chronicle.conclude(steps=steps)
        states = system.rows("SELECT state, tripped_step, to_step FROM rollbacks")
        assert {state for state, *_ in states} == {"done"}
        assert len(states) == len(system.summary()["rollbacks"]) >= 1
        assert all(node.is_alive or node.process.returncode == 0 for node in nodes if node.process)
        assert "Traceback" not in system.learner.log + "".join(node.log for node in nodes)


async def test_a_run_that_goes_wrong_again_and_again_stops_in_words(tmp_path: Path) -> None:
    with open_system(
        tmp_path, *SETTINGS, "tripwires.most_rollbacks=1", steps=STEPS, within=lying("kl_update", "5", "5-9999")
    ) as system:
        await system.add_node("north")
        assert await system.learner.wait(PATIENCE_S) == 1
        sentence = "2 rollbacks within 200 steps are more than tripwires.most_rollbacks = 1"
        assert f"the run is stopped: {sentence}" in system.learner.log
        assert [record["wire"] for record in system.summary()["rollbacks"]] == ["kl", "kl"]
        trained = system.rows("SELECT count(*) FROM steps WHERE state = 'final'")
        system.learner.start()
        assert await system.learner.wait(PATIENCE_S) == 1, "a service manager cannot make a loop of it"
        assert system.rows("SELECT count(*) FROM steps WHERE state = 'final'") == trained
        _lie_about(system, 10**6)
        system.learner.command.extend(("--set", "tripwires.most_rollbacks=2"))
        system.learner.start()
        assert await system.learner.wait(PATIENCE_S) == 0
        assert system.summary()["steps"] == STEPS


def _lie_about(system: System, group: int) -> None:
    place = system.learner.command.index("--") - 1
    system.learner.command[place] = str(group)


def _next_group(system: System) -> int:
    ((newest,),) = system.rows("SELECT max(group_id) FROM groups")
    return int(newest) + 1


def _the_only_rollback(system: System) -> dict:
    (record,) = system.summary()["rollbacks"]
    (line,) = [line for line in system.metrics() if "rollbacks" in line]
    assert line["rollbacks"] == [record]
    assert line["step"] == record["to_step"]
    return json.loads(json.dumps(record))


def _versions_of(system: System, step: int) -> tuple[int, list[int], int]:
    """The version that first had the weights of ``step``, the undone ones, and the one that has them again."""
    rows = system.rows("SELECT version, step, state, root FROM versions WHERE root NOT NULL ORDER BY version")
    undone = [version for version, _, state, _ in rows if state == "orphaned"]
    same = [(version, root) for version, at, _, root in rows if at == step]
    assert len({root for _, root in same}) == 1
    return same[0][0], undone, same[-1][0]
