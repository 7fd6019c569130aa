"""How a new version reaches everybody, in a network of namespaces: ``make lab-broadcast``.

Prints a table and, as the last line, one JSON object: ``rows``, ``ok``, and ``misses``, one sentence for each target
that was not met. Where there can be no lab it says why, and that is no failure. The links are scaled so that two cores
are not what limits: the table shows what was used of them, and how late the delay line was.

    python -m tests.lab.broadcast                          everything, some twenty minutes
    python -m tests.lab.broadcast --only swarm --nodes 8   one
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import trio

from tests.lab.bounds import least_seconds
from tests.lab.network import PREFIX, LabError, is_abandoned, own_prefix, why_not
from tests.lab.scenario import Outcome, Scenario, run_scenario

SIZES = (4, 8, 16, 32)
PLOT = Path("tests/bench/results/broadcast.png")
MEMORY_FOLDER = Path("/dev/shm")
"""Where the nodes' files lie: 32 nodes that flush every chunk to one disk would measure that disk."""
HARD_FACTOR, HARD_SLACK_S = 2.5, 2.0
"""Twice the target of a quiet swarm, where peers die, lie or cannot be reached."""


def swarm(nodes: int) -> Scenario:
    """Homes of 8 Mb/s down and 1.6 to 8 up, and a learner of 24: some two fifths of real homes, chunks of a half.

    With 32 of them two cores are not 33 machines: there the rates are 0.3 of that.
    """
    scale = 0.3 if nodes > 16 else 1.0
    return Scenario(
        name="swarm", nodes=nodes, megabytes=12.0, down=8.0 * scale, up=(1.6 * scale, 8.0 * scale),
        learner_up=24.0 * scale, chunk_kib=128,
    )  # fmt: skip


def scenarios() -> list[Scenario]:
    """All that ``make lab-broadcast`` runs, in this order."""
    quiet = [swarm(nodes) for nodes in SIZES]
    # A third of the payload: alone, the learner would take minutes for the whole one.
    alone = [
        replace(plan, name="one-to-all", learner_only=True, megabytes=4.0, factor=0.0, slack_s=0.0) for plan in quiet
    ]
    hard = replace(swarm(16), factor=HARD_FACTOR, slack_s=HARD_SLACK_S)
    return [
        *quiet,
        replace(hard, name="killed", killed_share=0.2),
        replace(hard, name="corrupt", corrupters=1),
        replace(hard, name="firewalled", firewalled_share=0.5),
        Scenario(
            name="home", nodes=4, megabytes=70.0, down=100.0, up=(20.0, 20.0), learner_up=300.0, learner_down=300.0,
            factor=0.0, slack_s=0.0, mtu=9000,
        ),
        *alone,
    ]  # fmt: skip


def main() -> int:
    arguments = parse()
    reason = why_not()
    if reason:
        print(f"no network lab here: {reason}")
        print(json.dumps({"ok": False, "misses": [], "skipped": reason}))
        return 0
    # Both end as Ctrl-C does in the foreground, which takes everything down; a shell's background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    chosen = choose(scenarios(), arguments)
    outcomes: list[Outcome] = []
    try:
        for scenario in chosen:
            outcomes.append(run_one(scenario, out=arguments.out))
            print(table([outcomes[-1]], heading=False), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted; what was finished:")
    misses = [miss for outcome in outcomes for miss in outcome.misses]
    misses += [] if len(outcomes) == len(chosen) else ["interrupted"]
    print(table(outcomes))
    if {outcome.scenario.nodes for outcome in outcomes if outcome.scenario.name == "swarm"} >= set(SIZES):
        plot(outcomes, PLOT)
        print(f"the plot is {PLOT}")
    print(json.dumps({"rows": [outcome.row() for outcome in outcomes], "ok": not misses, "misses": misses}))
    return 0


def parse() -> argparse.Namespace:
    names = sorted({scenario.name for scenario in scenarios()})
    parser = argparse.ArgumentParser(description="How a new version reaches everybody, in a network of namespaces.")
    parser.add_argument("--only", choices=names, action="append", help="these scenarios; may be given several times")
    parser.add_argument("--nodes", type=int, action="append", help="so many nodes; may be given several times")
    parser.add_argument("--megabytes", type=float, help="another payload")
    parser.add_argument("--scale", type=float, default=1.0, help="all rates times this")
    parser.add_argument("--delay-ms", type=float, help="another one-way delay")
    parser.add_argument("--mtu", type=int, help="packets of another size")
    parser.add_argument("--chunk-kib", type=int, help="chunks of another size")
    parser.add_argument("--out", type=Path, default=Path("runs/lab"), help="where logs and figures go")
    return parser.parse_args()


def choose(plans: list[Scenario], arguments: argparse.Namespace) -> list[Scenario]:
    """What the options leave, or make. A number of nodes that a scenario is not planned for changes its plan."""
    chosen = [plan for plan in plans if not arguments.only or plan.name in arguments.only]
    if arguments.nodes:
        by_name = {plan.name: plan for plan in chosen}
        chosen = [replace(plan, nodes=nodes) for plan in by_name.values() for nodes in arguments.nodes]
    for index, plan in enumerate(chosen):
        scale = arguments.scale
        chosen[index] = replace(
            plan,
            megabytes=arguments.megabytes or plan.megabytes,
            down=plan.down * scale,
            up=(plan.up[0] * scale, plan.up[1] * scale),
            learner_up=plan.learner_up * scale,
            delay_s=plan.delay_s if arguments.delay_ms is None else arguments.delay_ms / 1e3,
            mtu=arguments.mtu or plan.mtu,
            chunk_kib=arguments.chunk_kib or plan.chunk_kib,
        )
    return chosen


def run_one(scenario: Scenario, *, out: Path) -> Outcome:
    """Run it, and keep its logs and figures."""
    parent = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
    kept = out / f"{scenario.name}-{scenario.nodes}"
    for left in parent.glob(f"{PREFIX}-*") if parent else ():
        if is_abandoned(left.name):
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f"{own_prefix()}-", dir=parent) as folder:
        try:
            outcome = trio.run(_run, scenario, Path(folder))
        except LabError as error:
            outcome = Outcome(scenario=scenario, trouble=str(error))
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        for log in Path(folder).glob("*.log"):
            shutil.copy(log, kept / log.name)
    outcome.write(kept / "figures.json")
    return outcome


async def _run(scenario: Scenario, folder: Path) -> Outcome:
    return await run_scenario(scenario, folder=folder, say=lambda words: print(words, file=sys.stderr, flush=True))


def table(outcomes: list[Outcome], *, heading: bool = True) -> str:
    """For people. Times in seconds; "busy" marks rows in which the cores, not the links, were the limit."""
    titles = "scenario    nodes    MB     T*  target    90 %   last   held  x T*  peers  learner   done"
    lines = [f"{titles}  CPU lab/all    GB  late ms"] if heading else []
    for outcome in outcomes:
        row = outcome.row()
        lines.append(
            f"{row['scenario']:<11} {row['nodes']:>5} {row['megabytes']:>5.1f} {row['bound_s']:>6.1f} "
            f"{_cell(row['target_s'], 7)} {_cell(row['s_to_90_percent'], 7)} {_cell(row['s_to_last'], 6)} "
            f"{_cell(row['s_to_last_held'], 6)} {_cell(row['times_bound'], 5, 2)} {100 * row['from_peers']:>4.0f} % "
            f"{row['learner_sent_payloads']:>6.2f}F {row['finished']:>3}/{row['alive']:<3} "
            f"{100 * row['cpu_lab']:>4.0f}/{100 * row['cpu_machine']:<3.0f} % {row['memory_gb']:>7.2f} "
            f"{row['line_late_ms']:>7.1f}{'  busy' * outcome.is_disturbed}"
        )
        lines += [f"            {line}" for miss in outcome.misses for line in miss.splitlines()]
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int = 1) -> str:
    return "-".rjust(width) if value is None else f"{value:>{width}.{digits}f}"


def plot(outcomes: list[Outcome], path: Path) -> None:
    """The time to the last node in units of T* (rates differ between sizes), over the number of nodes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for name, style in (("one-to-all", "s--"), ("swarm", "o-")):
        points = sorted(
            (outcome.scenario.nodes, outcome.last_s / _bound_s(outcome))
            for outcome in outcomes
            if outcome.scenario.name == name and outcome.last_s is not None
        )
        axes.plot(*zip(*points, strict=True), style, label=name) if points else None
    axes.axhline(1.0, color="k", linestyle=":", label="T*, below which nothing is possible")
    axes.set_xlabel("nodes")
    axes.set_ylabel("time to the last node / T*")
    axes.set_ylim(bottom=0)
    axes.set_xticks(SIZES)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _bound_s(outcome: Outcome) -> float:
    """T* of these links for this payload, were everybody to send."""
    scenario = outcome.scenario
    return least_seconds(outcome.payload_bytes, source=scenario.source, links=scenario.links)


if __name__ == "__main__":
    sys.exit(main())
