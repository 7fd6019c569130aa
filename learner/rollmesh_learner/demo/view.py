"""The demo as a person sees it: a picture for a terminal, or one line for each step where there is none. Pure.

Every number is what a process told; peers' words go through :func:`~rollmesh_peer.status.words.clean`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollmesh_learner.demo.curve import curve
from rollmesh_learner.demo.watching import Scene, Step
from rollmesh_peer.status.words import ABSENT, clean, count, duration, rate, size
from rollmesh_protocol.status import NodeStatus, RunStatus

CURVE_LINES: Final = 6
CURVE_COLUMNS: Final = 72
RECENT: Final = 10
"""Steps over which times are averaged."""


def render(scene: Scene, *, notice: str = "") -> RenderableType:
    """The whole picture; ``notice`` is what the demo itself is doing."""
    parts: list[RenderableType] = [
        Text.assemble(("rollmesh demo", "bold"), ("  a learner and two nodes on this machine  ", "dim"),
                      (duration(scene.elapsed_s), "dim")),
        Text(),
    ]  # fmt: skip
    if scene.run is not None:
        parts += [_facts(scene.run, scene.steps), Text(), *_reward(scene.run, scene.steps)]
    parts += [_nodes(scene), Text(), Text(notice, style="dim")]
    return Group(*parts)


def step_line(scene: Scene, step: Step) -> str:
    """One finished step, for a log."""
    run = scene.run
    steps = f" of {count(run.steps)}" if run is not None else ""
    parts = [f"step {step.step + 1}{steps}: reward {step.reward:.3f}"]
    if run is not None:
        parts += [
            f"version {count(run.head.version)}{_patch(run)}",
            f"{count(run.rollouts_accepted)} accepted, {count(run.rollouts_rejected)} rejected",
            f"{count(run.audits_done)} audited, {count(run.audits_failed)} failed",
        ]
    parts.append(f"age {step.age_mean:.1f}")
    parts += [f"{name} {rate(node.tokens_per_s)} tok/s" for name, node in scene.nodes.items() if node is not None]
    return "; ".join(parts)


def wait_line(scene: Scene) -> str:
    """What everybody does, while no step is finished."""
    learner = "starting" if scene.run is None else clean(scene.run.state)
    nodes = [f"{name}: {_doing(node)}" for name, node in scene.nodes.items()]
    return "; ".join([f"learner: {learner}", *nodes])


def _facts(run: RunStatus, steps: tuple[Step, ...]) -> Padding:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False, show_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("learner", Text(clean(run.state)))
    table.add_row("step", Text(f"{count(run.step)} of {count(run.steps)}"))
    table.add_row("head", Text(f"version {count(run.head.version)}{_patch(run)}"))
    table.add_row("rollouts", _outcome(run.rollouts_accepted, "accepted", run.rollouts_rejected, "rejected"))
    table.add_row("audits", _outcome(run.audits_done, "done", run.audits_failed, "failed"))
    if steps:
        recent = steps[-RECENT:]
        trained = _mean(step.trained_s for step in recent)
        waited = _mean(step.waited_s for step in recent if step.step)  # the first step waits for the nodes to start
        table.add_row("staleness", Text(f"{steps[-1].age_mean:.1f} steps on average, {steps[-1].age_max} at most"))
        table.add_row("time", Text(f"{trained:.1f} s training and {waited:.1f} s waiting for rollouts a step"))
    return Padding(table, (0, 0, 0, 2))


def _reward(run: RunStatus, steps: tuple[Step, ...]) -> list[RenderableType]:
    if not steps:
        return []
    now = f"{steps[-1].reward:.3f} in step {steps[-1].step + 1}"
    lines = curve([step.reward for step in steps], height=CURVE_LINES, columns=CURVE_COLUMNS)
    width = min(CURVE_COLUMNS, max(run.steps, len(steps)))
    labels = ["1.0", *[""] * (CURVE_LINES - 2), "0.0"]
    rows = [
        Text.assemble((f"  {label:>3} ", "dim"), ("│", "dim"), (f"{line:<{width}}", "cyan"))
        for label, line in zip(labels, lines, strict=True)
    ]
    floor = Text(f"      └{'─' * width}", style="dim")
    return [Text.assemble(("  mean reward  ", "dim"), (now, "bold cyan")), *rows, floor, Text()]


def _nodes(scene: Scene) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("  node", no_wrap=True)
    for title in ("tok/s", "version", "accepted", "rejected", "chunks from peers"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, node in scene.nodes.items():
        if node is None:
            table.add_row(f"  {name}", *[ABSENT] * 5)
            continue
        chunks = node.chunks_from_peers + node.chunks_from_learner
        table.add_row(
            f"  {name}", rate(node.tokens_per_s), count(node.version_held), count(node.accepted),
            Text(count(node.rejected), style="red" if node.rejected else ""),
            f"{count(node.chunks_from_peers)} of {count(chunks)}",
        )  # fmt: skip
    return Group(table, Text(), *(Text(f"  {name}: {_doing(node)}", style="dim") for name, node in scene.nodes.items()))


def _doing(node: NodeStatus | None) -> str:
    if node is None:
        return "not started yet"
    return f"waits for {clean(node.waiting_for)}" if node.waiting_for else "generating"


def _patch(run: RunStatus) -> str:
    if not 0 < run.head_bytes < run.model_bytes:
        return ""
    percent = 100 * run.head_bytes / run.model_bytes
    return f", a patch of {size(run.head_bytes)} ({percent:.1f} % of {size(run.model_bytes)})"


def _outcome(good: int, good_word: str, bad: int, bad_word: str) -> Text:
    return Text.assemble(f"{count(good)} {good_word}, ", (f"{count(bad)} {bad_word}", "red" if bad else ""))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
