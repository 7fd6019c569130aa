"""A trainer that lies about some steps: ``python -m tests.support.tripping_trainer FIGURE VALUE GROUPS``.

``GROUPS`` is ``7`` or ``7-99``: when a batch holds one of these groups, FIGURE of its step is said to be VALUE.
"""

from __future__ import annotations

import sys
from typing import Any, cast

from rollmesh_learner.training.trainer import Trainer
from rollmesh_peer.children.child import run_child, take_pipes
from rollmesh_peer.children.frames import Body


def main(figure: str, value: str, groups: str) -> None:
    first, _, last = groups.partition("-")
    trainer = Trainer()

    def train(body: Body) -> Body:
        answer = trainer.train(body)
        there = {int(record["group"]) for record in cast("list[dict[str, Any]]", body["rollouts"])}
        if any(int(first) <= group <= int(last or first) for group in there):
            answer["metrics"] = {**cast("dict[str, float]", answer["metrics"]), figure: float(value)}
        return answer

    run_child({"open": trainer.open, "train": train, "export": trainer.export, "checkpoint": trainer.checkpoint})


if __name__ == "__main__":
    take_pipes()
    main(*sys.argv[1:])
