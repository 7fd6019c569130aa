"""What the demo knows was told by the processes, and stays when they fall silent."""

from __future__ import annotations

import json

import trio

from rollmesh_learner.demo.plan import LEARNER, Plan
from rollmesh_learner.demo.watching import MetricsFile, Watcher
from rollmesh_peer.control import serve_control
from rollmesh_peer.folders import control_socket
from rollmesh_protocol.status import StatusAnswer
from tests.unit.status.samples import node_status, run_status


def line(step: int, reward: float = 0.5) -> str:
    fields = {"step": step, "reward": reward, "age_mean": 1.0, "age_max": 2, "waited_s": 0.1, "trained_s": 5.0}
    return json.dumps(fields | {"loss": 0.1, "gradient_norm": 2.0}) + "\n"


def test_a_growing_file_is_read_line_by_line(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    assert metrics.read() == ()
    path.write_text(line(0) + line(1)[:20])
    assert [step.step for step in metrics.read()] == [0]
    path.write_text(line(0) + line(1) + line(2))
    assert [step.step for step in metrics.read()] == [0, 1, 2]
    assert [step.step for step in metrics.read()] == [0, 1, 2]


def test_a_step_that_was_done_again_counts_as_it_was_last(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(0) + line(1, 0.25) + line(2) + line(1, 0.75))
    assert [step.reward for step in MetricsFile(path).read()] == [0.5, 0.75, 0.5]


async def test_the_last_word_of_everybody_is_kept(tmp_path) -> None:
    plan = Plan(program=("rollmesh",), out=tmp_path)
    environ = {"ROLLMESH_HOME": str(plan.home)}
    watcher = Watcher(plan)
    scene = await watcher.look()
    assert scene.run is None and scene.nodes == {"node-a": None, "node-b": None}

    async with trio.open_nursery() as nursery:
        learner = control_socket("learner", plan.folder(LEARNER), environ=environ)
        node = control_socket("node", plan.folder("node-b"), environ=environ)
        told = run_status(step=7)
        await nursery.start(serve_control, learner, lambda _: StatusAnswer(run=told, node=None))
        await nursery.start(serve_control, node, lambda _: StatusAnswer(run=None, node=node_status(accepted=5)))
        scene = await watcher.look()
        nursery.cancel_scope.cancel()
    assert scene.run == told
    assert scene.nodes["node-a"] is None and scene.nodes["node-b"].accepted == 5

    assert (await watcher.look()).run == told
    assert watcher.scene().nodes["node-b"].accepted == 5
