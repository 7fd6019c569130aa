"""A trainer child without torch: its weights are a number of steps. ``python -m tests.support.scripted_trainer``."""

from __future__ import annotations

import json
from pathlib import Path

from rollmesh_peer.children.child import run_child, take_pipes
from rollmesh_peer.children.frames import Body

_step = [0]


def _open(body: Body) -> Body:
    checkpoint = body["checkpoint"]
    _step[0] = json.loads((Path(str(checkpoint)) / "state.json").read_text()) if checkpoint else 0
    return {"step": _step[0]}


def _train(body: Body) -> Body:
    assert body["step"] == _step[0]
    _step[0] += 1
    return {"updated": True, "step": _step[0], "metrics": {}, "mismatches": []}


def _export(body: Body) -> Body:
    Path(str(body["path"])).write_text(f"{_step[0]}")
    return {}


def _checkpoint(body: Body) -> Body:
    folder = Path(str(body["folder"]))
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(f"{_step[0]}")
    return {}


if __name__ == "__main__":
    take_pipes()
    run_child({"open": _open, "train": _train, "export": _export, "checkpoint": _checkpoint})
