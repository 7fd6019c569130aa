"""The end of a demo: writes its summary, metrics and picture, tries the trained model, and tells what was shown."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import trio
from rich.console import Console
from rich.text import Text

from rollmesh_learner.demo.account import Finding, findings, read_account, summary_of
from rollmesh_learner.demo.plan import Plan
from rollmesh_learner.demo.show import Ending
from rollmesh_peer.children.launch import kept_environment, python_argv
from rollmesh_peer.status.words import clean, duration
from rollmesh_peer.weights.durable import write_file
from rollmesh_protocol.environments.addition import make
from rollmesh_protocol.errors import ChildFailed

SUMS: Final = 20
"""Asked of the trained model, greedily: a look at it, no measurement."""
CHILD_S: Final = 180.0
"""Importing torch and all answers take ten seconds on a quiet machine."""


async def conclude(plan: Plan, ending: Ending, *, console: Console) -> bool:
    """Write the results and tell them. True when everything was shown that depends on the program alone.

    Raises:
        ChildFailed: the picture cannot be drawn, or the checkpoint does not load.
    """
    learner = read_account(plan.learner_summary.read_text(encoding="utf-8"))
    summary = summary_of(learner, nodes=ending.scene.nodes, wall_s=ending.wall_s)
    write_file(plan.out / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
    steps = ending.scene.run.steps if ending.scene.run is not None else learner.steps
    shown = findings(learner, nodes=ending.scene.nodes, steps=steps, wall_s=ending.wall_s)
    console.print(f"\n{learner.steps} steps in {duration(ending.wall_s)}.\n", markup=False)
    for finding in shown:
        console.print(_line(finding))
    if plan.metrics.exists():
        shutil.copyfile(plan.metrics, plan.out / "metrics.jsonl")
        await _child("rollmesh_learner.training.plot", str(plan.metrics), str(plan.out / "reward.png"))
    if learner.checkpoint is not None:
        console.print(await _try_out(learner.checkpoint), markup=False)
    _list_files(plan, learner.checkpoint, console=console)
    return all(finding.is_kept for finding in shown if finding.is_hard)


async def _try_out(checkpoint: str) -> str:
    """Load the trained model with transformers, ask it some sums, and say in words what it answers."""
    sums = make({}, seed=SUMS)
    items = [sums.item(index) for index in range(SUMS)]
    questions = [item.question for item in items]
    told = json.loads(await _child("rollmesh_learner.training.try_out", checkpoint, *questions))
    right = sum(sums.reward(item, answer) for item, answer in zip(items, told["answers"], strict=True))
    return (
        f"\nThe checkpoint loads with transformers. Of {SUMS} sums it gets {right:.0f} right; "
        f"for “{questions[0]}” it says: {clean(told['answers'][0])}\n"
    )


async def _child(module: str, *arguments: str) -> str:
    """The output of a program of ours that loads what this process must not."""
    with trio.move_on_after(CHILD_S):
        done = await trio.run_process(
            python_argv(module, *arguments), capture_stdout=True, capture_stderr=True, check=False,
            stdin=subprocess.DEVNULL, env=kept_environment(os.environ),
        )  # fmt: skip
        if done.returncode == 0:
            return done.stdout.decode()
        words = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise ChildFailed(f"{module} failed: {' '.join(words)}")
    raise ChildFailed(f"{module} was not done within {CHILD_S:g} s")


def _line(finding: Finding) -> Text:
    mark, style = ("shown ", "green") if finding.is_kept else ("MISSED", "bold red")
    return Text.assemble("  ", (mark, style), f"  {finding.promise}: ", clean(finding.shown))


def _list_files(plan: Plan, checkpoint: str | None, *, console: Console) -> None:
    files = [(plan.out / "summary.json", "the figures"), (plan.out / "metrics.jsonl", "one line a step"),
             (plan.out / "reward.png", "the curve")]  # fmt: skip
    if checkpoint is not None:
        files.append((Path(checkpoint), "the trained model"))
    files.append((plan.log("*"), "what each process said"))
    width = max(len(plan.shown(path)) for path, _ in files)
    for path, what in files:
        console.print(f"  {plan.shown(path):<{width}}  {what}", markup=False)
