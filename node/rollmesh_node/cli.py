"""Takes part in a run: generates rollouts for a learner.

The command line of a node: ``rollmesh node run | pause | resume | selfcheck | id | key``. It parses, resolves and
does the rest and is imported only when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollmesh_protocol.errors import RollmeshError, UsageError

if TYPE_CHECKING:
    from rollmesh_node.config import NodeConfig
    from rollmesh_peer.command import SubParsers

JOIN_ENV: Final = "ROLLMESH_JOIN"
"""Environment variable with a join line, for services; ``--join`` comes first."""

RUN_TEXT = """\
Joins the run of a learner and generates rollouts for it until stopped. What is downloaded is shown before it is; the
node obeys its own limits whatever the learner asks for, and runs no code that a learner names. Other volunteers of the
run see this machine's network address, as in any swarm; --set network.learner_only=true avoids that.

Ctrl-C stops politely: work that is nearly done is finished and sent, the rest goes back. A second one stops at once.
"""

PAUSE_TEXT = """\
Ends the engine of the node that runs on this machine and frees its memory within seconds. The node gives its work
back and stays in the run; weights are still fetched and passed on. The pause lasts until `rollmesh node resume`, also
over a restart.
"""

SELFCHECK_TEXT = """\
Recomputes this node's last results, and fresh ones of its engine, as the learner does, and says in words what is wrong
and what to do. It may be run while the node works, and changes nothing.

Exit status: 0 all is fine, 1 something is wrong, 2 nothing could be checked.
"""


def add_parser(subparsers: SubParsers) -> object:
    """Add ``node`` and its own sub-commands."""
    parser = subparsers.add_parser("node", help="take part in a run", description="Take part in a run with this PC.")
    commands = parser.add_subparsers(dest="node_command", required=True, metavar="run | pause | ...")
    run_parser = commands.add_parser(
        "run", help="join a run and work", description=RUN_TEXT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    run_parser.add_argument("--join", metavar="LINE", help=f"the join line of the run (or {JOIN_ENV})")
    _add_place(run_parser)
    run_parser.add_argument("--check-config", action="store_true", help="print the resolved configuration and end")
    pause = commands.add_parser("pause", help="free the engine's memory until resume", description=PAUSE_TEXT)
    _add_place(pause)
    resume = commands.add_parser("resume", help="go on after a pause", description="Let a paused node go on.")
    _add_place(resume)
    _add_selfcheck(commands)
    identity = commands.add_parser("id", help="print this node's peer id", description="Print this node's peer id.")
    _add_place(identity)
    key = commands.add_parser("key", help="move this node's key to another machine")
    actions = key.add_subparsers(dest="key_command", required=True, metavar="export | import")
    export = actions.add_parser("export", help="print the secret key as one line; whoever has it is this node")
    _add_place(export)
    importing = actions.add_parser("import", help="read an exported key from standard input")
    _add_place(importing)
    return parser


def _add_selfcheck(commands: SubParsers) -> None:
    parser = commands.add_parser(
        "selfcheck",
        help="run the learner's checks on this node's own work",
        description=SELFCHECK_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tokens", type=int, default=1000, help="generate so many tokens afresh; 0 for none (1000)")
    parser.add_argument(
        "--recompute-on", choices=["auto", "cpu", "cuda"], default="", metavar="DEVICE",
        help="recompute on another device than the engine's: cpu tells a faulty GPU",
    )  # fmt: skip
    _add_place(parser)


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file; every setting has a default")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one setting, e.g. engine.threads=4"
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the node's key and weights lie")


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked."""
    from rollmesh_node.config import load_config

    config = load_config(arguments.config, overrides=arguments.set, environ=os.environ)
    match arguments.node_command:
        case "run":
            return _run(arguments, config)
        case "pause" | "resume":
            return _order(arguments, config)
        case "selfcheck":
            return _selfcheck(arguments, config)
        case "id":
            return _id(arguments, config)
        case _:
            return _key(arguments, config)


def _run(arguments: argparse.Namespace, config: NodeConfig) -> int:
    if arguments.check_config:
        from rollmesh_peer.config import render_toml

        print(render_toml(config), end="")
        return 0
    from rollmesh_peer.mesh.join import JoinLine

    line = arguments.join or os.environ.get(JOIN_ENV, "")
    if not line:
        raise UsageError("give the join line that the learner prints: rollmesh node run --join <line>")
    join = JoinLine.parse(line)

    import trio

    from rollmesh_node.daemon import run_node
    from rollmesh_node.places import folder_of
    from rollmesh_peer.logging_setup import set_up_logging

    set_up_logging(form=config.log.format, level=config.log.level)
    folder = folder_of(config, arguments.folder)
    trio.run(lambda: run_node(config, join=join, folder=folder, environ=os.environ))
    return 0


def _order(arguments: argparse.Namespace, config: NodeConfig) -> int:
    import trio

    from rollmesh_node.owner import give_order
    from rollmesh_node.places import folder_of

    is_named = arguments.folder is not None or config.node.folder is not None
    folder = folder_of(config, arguments.folder) if is_named else None
    for sentence in trio.run(lambda: give_order(arguments.node_command, folder=folder)):
        print(sentence)
    return 0


def _selfcheck(arguments: argparse.Namespace, config: NodeConfig) -> int:
    import trio

    from rollmesh_node.engine_setting import choose_engine
    from rollmesh_node.places import folder_of
    from rollmesh_node.selfcheck.check import Order, selfcheck
    from rollmesh_node.selfcheck.report import STATUS, Report, as_json, as_text

    ram_folder = config.weights.ram_folder
    try:
        order = Order(
            folder=folder_of(config, arguments.folder),
            engine=choose_engine(config.engine, environ=os.environ),
            ram_folder=Path(ram_folder) if ram_folder else None,
            fresh_tokens=max(0, arguments.tokens),
            recheck_device=arguments.recompute_on,
        )
        report = trio.run(selfcheck, order)
    except RollmeshError as error:
        report = Report(notes=[error.detail])
    print(as_json(report) if arguments.json else as_text(report))
    return STATUS[report.verdict]


def _id(arguments: argparse.Namespace, config: NodeConfig) -> int:
    from rollmesh_peer.keys import create_key, load_key

    path = _key_path(arguments, config)
    create_key(path)
    print(load_key(path).peer)
    return 0


def _key(arguments: argparse.Namespace, config: NodeConfig) -> int:
    from rollmesh_peer.keys import export_key, import_key

    path = _key_path(arguments, config)
    if arguments.key_command == "export":
        print(export_key(path))
        return 0
    if sys.stdin.isatty():
        print("paste the exported key and press Enter:", file=sys.stderr)
    print(import_key(path, text=sys.stdin.readline()).peer)
    return 0


def _key_path(arguments: argparse.Namespace, config: NodeConfig) -> Path:
    from rollmesh_node.places import KEY, folder_of

    return folder_of(config, arguments.folder) / KEY
