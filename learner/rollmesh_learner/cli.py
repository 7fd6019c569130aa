"""Run and look after a training run: `rollmesh learner run | calibrate | invite CONFIG`."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from rollmesh_learner.config import LearnerConfig, load_config
from rollmesh_peer.config import render_toml
from rollmesh_peer.folders import private_folder, run_folder
from rollmesh_peer.keys import load_key
from rollmesh_peer.logging_setup import set_up_logging
from rollmesh_peer.mesh.address import parse_peer_address
from rollmesh_peer.mesh.join import JoinLine
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.errors import HostError
from rollmesh_protocol.messages import Invite

if TYPE_CHECKING:
    from rollmesh_learner.coordinator import Outcome, Ready
    from rollmesh_peer.command import SubParsers

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
TOKEN_BYTES: Final = 16
HARD_S: Final = 8.0
"""After the second Ctrl-C: closing children takes a second, and a write to a full disk would take for ever."""


def add_parser(subparsers: SubParsers) -> None:
    """Add ``rollmesh learner``."""
    parser = subparsers.add_parser("learner", help="run and look after a training run", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="run | calibrate | invite")
    run = verbs.add_parser("run", help="run a learner until its last step; Ctrl-C stops it after the step under way")
    run.add_argument("config", type=Path, help="the run's TOML file, such as deploy/examples/smollm2-arithmetic.toml")
    run.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="override one value, for example --set training.lr=1e-5",
    )  # fmt: skip
    run.add_argument("--check-config", action="store_true", help="print the resolved configuration and end")
    calibrate = verbs.add_parser(
        "calibrate", help="measure honest work on this machine and derive the audit's thresholds from it"
    )
    calibrate.add_argument("config", type=Path, help="the run's TOML file")
    calibrate.add_argument(
        "--rollouts", type=int, default=0, help="rollouts to generate; more tighten the thresholds (default: minutes)"
    )
    invite = verbs.add_parser("invite", help="print a join line with a single-use invitation")
    invite.add_argument("config", type=Path, help="the run's TOML file")
    invite.add_argument("address", nargs="+", help="the learner's addresses, as `rollmesh learner run` printed them")


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked."""
    config = load_config(arguments.config, overrides=getattr(arguments, "overrides", []), environ=os.environ)
    if arguments.verb == "invite":
        return _invite(config, arguments.address)
    if arguments.verb == "calibrate":
        return trio.run(_calibrate, config, arguments.rollouts)
    if arguments.check_config:
        print(render_toml(config), end="")
        return EXIT_OK
    set_up_logging(form=config.log.format, level=config.log.level)
    return trio.run(_run, config)


async def _run(config: LearnerConfig) -> int:
    from rollmesh_learner.coordinator import run_learner

    stop = trio.Event()
    ended: list[Outcome] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch_signals, stop, nursery.cancel_scope)
        software = f"rollmesh/{metadata.version('rollmesh')}"
        ended.append(await run_learner(config, software=software, on_ready=_announce, stop=stop))
        nursery.cancel_scope.cancel()
    if not ended:
        return EXIT_INTERRUPTED
    (outcome,) = ended
    how = "complete" if outcome.is_complete else "stopped; the same command goes on from here"
    if outcome.given_up:
        how = f"stopped: {outcome.given_up}"
    summary = outcome.summary
    print(f"the run is {how}: {summary.steps} steps, checkpoint {summary.checkpoint or 'none'}", flush=True)
    return EXIT_FAILED if outcome.given_up else EXIT_OK


def _announce(ready: Ready) -> None:
    line = JoinLine(addresses=tuple(parse_peer_address(address) for address in ready.addresses))
    print(
        f"run {ready.run}, at step {ready.step}. Volunteers join with:\n\n"
        f"    rollmesh node run --join {line}\n\n"
        f"Keep a copy of {ready.folder / 'learner.key'}: whoever has it is the learner of this run, and without it "
        "the run cannot go on.",
        flush=True,
    )


async def _watch_signals(stop: trio.Event, everything: trio.CancelScope) -> None:
    """The first Ctrl-C asks for an orderly end, the second one ends at once: a learner may be killed at any instant."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if stop.is_set():
                watchdog = threading.Timer(HARD_S, os._exit, (EXIT_INTERRUPTED,))
                watchdog.daemon = True
                watchdog.start()
                everything.cancel()
                return
            print("stopping after the step under way; once more to stop at once", file=sys.stderr, flush=True)
            stop.set()


async def _calibrate(config: LearnerConfig, rollouts: int) -> int:
    from rollmesh_learner.audit.calibrate import DEFAULT_ROLLOUTS, calibrate
    from rollmesh_learner.audit.calibration import write_calibration

    folder = private_folder(config.run.folder) if config.run.folder else run_folder(config.run.name)
    found = await calibrate(
        config, folder=folder, rollouts=rollouts or DEFAULT_ROLLOUTS, tell=lambda line: print(line, flush=True)
    )
    path = write_calibration(found, folder=folder)
    total = sum(cell.rollouts for cell in found.cells)
    print(
        f"{total} honest rollouts: thresholds {found.low_margin:.2f} (soft), {found.high_margin:.2f} and "
        f"{found.any_margin:.2f} nats, delta {found.delta:.2f}"
    )
    if not found.drift_exponent:
        print("they are too few for the test of slow drifts, which stays off: calibrate with more --rollouts")
    print(f"written to {path}; the learner goes by it from its next start")
    return EXIT_OK


def _invite(config: LearnerConfig, addresses: list[str]) -> int:
    folder = config.run.folder or run_folder(config.run.name)
    identity = load_key(folder / "learner.key")
    try:
        run_id = (folder / "run.id").read_text(encoding="utf-8")
    except OSError as error:
        raise HostError(f"{folder} holds no run yet: start it once with `rollmesh learner run`") from error
    invite = Invite(token=secrets.token_bytes(TOKEN_BYTES))
    sealed = seal(invite.encode(), run=run_id, kind="invite", identity=identity).encode()
    line = JoinLine(addresses=tuple(parse_peer_address(address) for address in addresses), invite=sealed)
    print(line)
    return EXIT_OK
