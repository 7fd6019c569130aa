"""Moments of a demo, for the tests of what is shown."""

from __future__ import annotations

from rollmesh_learner.demo.watching import Scene, Step
from tests.unit.status.samples import node_status, peer, run_status


def step(number: int, **fields: float) -> Step:
    values = {"reward": 0.02 * number, "age_mean": 1.5, "age_max": 2, "waited_s": 1.0, "trained_s": 8.0}
    return Step(step=number, **(values | fields))


def beginning() -> Scene:
    return Scene(elapsed_s=3.0, run=None, nodes={"node-a": None, "node-b": None}, steps=())


def middle(*, steps: int = 12, elapsed_s: float = 185.0, **fields: object) -> Scene:
    return Scene(
        elapsed_s=elapsed_s,
        run=run_status(peer(1), **fields),
        nodes={"node-a": node_status(), "node-b": node_status(waiting_for="leases", tokens_per_s=99.0)},
        steps=tuple(step(number) for number in range(steps)),
    )
