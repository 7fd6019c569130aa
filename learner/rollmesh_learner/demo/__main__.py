"""``python -m rollmesh_learner.demo``: what ``make demo`` runs.

Exit status: 0 the demo showed what it must; 1 it did not, or a process failed; 2 a flag is wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio
from rich.console import Console

from rollmesh_learner.demo.narrator import Narrator
from rollmesh_learner.demo.place import fresh_folder
from rollmesh_learner.demo.plan import CONFIG, NODES, Plan
from rollmesh_learner.demo.results import conclude
from rollmesh_learner.demo.show import Ending, Show
from rollmesh_protocol.errors import HostError, RollmeshError, UsageError

VLLM_PROGRAM: Final = Path(".venv-vllm/bin/rollmesh")
"""Nodes whose engine is vLLM run wholly in its environment; from the root of the repository."""
EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        plan = _plan(_parser().parse_args(argv))
        with fresh_folder(plan) as lock:
            return trio.run(_run, plan, console, lock)
    except RollmeshError as error:
        console.print(f"demo: {error.detail}", markup=False, style="red")
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make demo",
        description="A learner and two nodes on this machine, from an empty folder to a trained model.",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where everything is written")
    parser.add_argument("--config", type=Path, default=CONFIG, help="another run than the demo's")
    parser.add_argument(
        "--learner-set", action="append", default=[], metavar="KEY=VALUE", help="one setting of the learner"
    )
    parser.add_argument("--node-set", action="append", default=[], metavar="KEY=VALUE", help="one setting of the nodes")
    parser.add_argument(
        "--backend", choices=("transformers", "vllm"), default="transformers", help="the engine of the nodes"
    )
    return parser


def _plan(arguments: argparse.Namespace) -> Plan:
    program = Path(sys.executable).with_name("rollmesh")
    if not program.exists():
        raise HostError(f"there is no rollmesh command beside {sys.executable}: run make setup")
    node_program: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    if arguments.backend == "vllm":
        if not VLLM_PROGRAM.exists():
            raise HostError(f"there is no {VLLM_PROGRAM}: run make setup-vllm")
        node_program, engine = (str(VLLM_PROGRAM.absolute()),), ("engine.backend=vllm",)
    return Plan(
        program=(str(program),),
        out=arguments.out.absolute(),
        config=arguments.config,
        node_program=node_program,
        nodes=NODES,
        learner_settings=tuple(arguments.learner_set),
        node_settings=(*engine, *arguments.node_set),
    )


async def _run(plan: Plan, console: Console, lock: int) -> int:
    """The first Ctrl-C asks everybody to end, the second one insists."""
    hurry = trio.Event()
    ended: list[Ending] = []
    failures: list[RollmeshError] = []
    with Narrator(console) as narrator:
        show = Show(plan, tell=narrator.tell, hurry=hurry, lock=lock)
        async with trio.open_nursery() as nursery:
            interrupted = trio.CancelScope()
            nursery.start_soon(_watch_signals, interrupted, hurry)
            with interrupted:
                try:
                    async with show.open():
                        ended.append(await show.run())
                except RollmeshError as error:  # raised below, outside of the nursery's group
                    failures.append(error)
            nursery.cancel_scope.cancel()
    if failures:
        raise failures[0]
    if not ended:
        console.print(f"interrupted; what there is lies in {plan.shown(plan.out)}", markup=False)
        return EXIT_INTERRUPTED
    return EXIT_OK if await conclude(plan, ended[0], console=console) else EXIT_FAILED


async def _watch_signals(work: trio.CancelScope, hurry: trio.Event) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async for _ in signals:
            if work.cancel_called:
                hurry.set()
            work.cancel()


if __name__ == "__main__":
    sys.exit(main())
