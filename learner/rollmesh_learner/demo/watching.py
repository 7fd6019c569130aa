"""Looks at a demo from outside: the status of each process over its control socket, and the learner's file of steps.

Invariant: what is shown was told by the process that it is about; one that does not answer keeps its last word. Nothing
is drawn or judged here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import trio

from rollmesh_learner.demo.plan import LEARNER, Plan
from rollmesh_peer.control import ask_control
from rollmesh_peer.folders import control_socket
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.status import NodeStatus, RunStatus, StatusAnswer, StatusRequest


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line of the learner's metrics."""

    step: int
    reward: float
    """Mean over all accepted rollouts of the batch."""
    age_mean: float
    """In steps."""
    age_max: int
    waited_s: float
    """The trainer without an admissible batch."""
    trained_s: float


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is known at one moment. ``nodes`` has an entry for every node, None before its first word."""

    elapsed_s: float
    run: RunStatus | None
    nodes: dict[str, NodeStatus | None]
    steps: tuple[Step, ...]


class Watcher:
    """Keeps the last word of everybody. Daemons answer anew once a second."""

    def __init__(self, plan: Plan) -> None:
        environ = {"ROLLMESH_HOME": str(plan.home)}
        self._learner = control_socket("learner", plan.folder(LEARNER), environ=environ)
        self._nodes = {name: control_socket("node", plan.folder(name), environ=environ) for name in plan.nodes}
        self._metrics = MetricsFile(plan.metrics)
        self._started = trio.current_time()
        self._run: RunStatus | None = None
        self._told: dict[str, NodeStatus | None] = dict.fromkeys(plan.nodes)

    async def look(self) -> Scene:
        """Ask everybody at once."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_at_learner)
            for name, path in self._nodes.items():
                nursery.start_soon(self._look_at_node, name, path)
        return self.scene()

    def scene(self) -> Scene:
        """What is known without asking again."""
        return Scene(
            elapsed_s=trio.current_time() - self._started,
            run=self._run,
            nodes=dict(self._told),
            steps=self._metrics.read(),
        )

    async def _look_at_learner(self) -> None:
        answer = await _ask(self._learner)
        if answer is not None and answer.run is not None:
            self._run = answer.run

    async def _look_at_node(self, name: str, path: Path) -> None:
        answer = await _ask(path)
        if answer is not None and answer.node is not None:
            self._told[name] = answer.node


class MetricsFile:
    """Reads a growing file of JSON lines, each line once. A line that is still being written is left for later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_to = 0
        self._steps: dict[int, Step] = {}

    def read(self) -> tuple[Step, ...]:
        """All steps so far, in order; one that was done again after a crash counts as it was last."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_to)
                fresh = file.read()
        except OSError:
            return self._in_order()
        whole = fresh.rfind(b"\n") + 1
        self._read_to += whole
        for line in fresh[:whole].splitlines():
            found = json.loads(line)
            step = Step(**{name: found[name] for name in Step.__dataclass_fields__})
            self._steps[step.step] = step
        return self._in_order()

    def _in_order(self) -> tuple[Step, ...]:
        return tuple(self._steps[step] for step in sorted(self._steps))


async def _ask(path: Path) -> StatusAnswer | None:
    try:
        return await ask_control(path, StatusRequest(page=0))
    except (LinkLost, Refused):
        return None
