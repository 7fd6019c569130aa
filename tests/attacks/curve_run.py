"""One run of the curve: one arm with one seed, over real processes and the real wire.

The run is the demo's: its configuration, its two node daemons of one thread each and its trainer of two. The learner is
the product's, but in the arm ``unchecked`` it is :mod:`.trusting_learner`; in the arm ``honest`` there are no cheats.
Checkpoints are rarer than the demo's, because they only cost disk here. What is kept of a run is its logs, metrics,
ledger and figures; models and weights are deleted.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from rollmesh_learner.demo.plan import AUDITOR_THREADS, CONFIG, LOOPBACK, NODE_THREADS, NODES, TRAINER_THREADS
from tests.attacks.attack import say
from tests.attacks.cheats import Crowd
from tests.attacks.curve_account import read_account
from tests.attacks.curve_verdict import HONEST, UNCHECKED
from tests.support.system import System, open_system

ROOT: Final = Path(__file__).parents[2]
START_S: Final = 600.0
"""For the first process to offer work, on busy cores."""
STEP_S: Final = 60.0
"""A step may take so long on average; it takes 6 to 12 on two idle cores."""
LOOK_S: Final = 1.0
TELL_S: Final = 30.0
FAREWELL_S: Final = 60.0
CHECKPOINT_EVERY: Final = 20
KEPT: Final = ("learner.log", *(f"{name}.log" for name in NODES), "run/ledger.sqlite", "run/metrics.jsonl")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be run, and with which model: its folder, and the image of its weights."""

    arm: str
    seed: int
    steps: int
    model: Path
    cache: Path
    """Where the learner finds the converted model."""
    base: Path

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"

    @property
    def deadline_s(self) -> float:
        return START_S + self.steps * STEP_S


def play(job: Job, *, out: Path) -> dict[str, object]:
    """Run ``job`` and return its figures; what is kept of it lies in ``out`` / its name.

    Raises:
        RuntimeError: it was not done in time, or a process failed; the message says which and what it waited for.
    """
    folder = out / job.name
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "work"
    crowd_folder = work / "crowd"
    crowd_folder.mkdir(parents=True)
    started = time.monotonic()
    with _learner(job, work) as system:
        crowd = Crowd(system, folder=crowd_folder, model=job.model, base=job.base)
        try:
            trio.run(_run, job, system, crowd)
        finally:
            _keep(work, folder)
    seconds = time.monotonic() - started
    shutil.rmtree(work)
    kinds = {peer: seat.kind for seat in crowd.seats for peer in seat.peers}
    account = read_account(folder / "ledger.sqlite", model=job.model, steps=job.steps, seed=job.seed, kinds=kinds)
    return {"arm": job.arm, "seed": job.seed, "seconds": round(seconds), **account, "offered": _offered(crowd)}


@contextmanager
def _learner(job: Job, work: Path) -> Iterator[System]:
    settings = {
        "run.folder": f'"{work / "run"}"',
        "run.seed": job.seed,
        "run.steps": job.steps,
        "network.listen": str(LOOPBACK).replace("'", '"'),
        "model.cache": f'"{job.cache}"',
        "training.threads": TRAINER_THREADS,
        "training.checkpoint_every": CHECKPOINT_EVERY,
        "audit.threads": AUDITOR_THREADS,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    within = (sys.executable, "-m", "tests.attacks.trusting_learner", "--") if job.arm == UNCHECKED else ()
    with open_system(work, *words, text=(ROOT / CONFIG).read_text(), within=within) as system:
        yield system


async def _run(job: Job, system: System, crowd: Crowd) -> None:
    """Until the learner has ended by itself."""
    with trio.move_on_after(job.deadline_s) as deadline:
        await system.learner.until_logged("rollmesh node run --join ", timeout_s=START_S)
        for name in NODES:
            await system.add_node(name, f"weights.base={job.model}", "log.level=info", f"engine.threads={NODE_THREADS}")
        async with trio.open_nursery() as nursery:
            if job.arm != HONEST:
                nursery.start_soon(crowd.run)
            await _watch(job, system, crowd)
            nursery.cancel_scope.cancel()
    if deadline.cancelled_caught:
        raise RuntimeError(f"{job.name} was not done within {job.deadline_s:.0f} s:\n{system.learner.tail(20)}")
    status = await system.learner.wait(FAREWELL_S)
    if status:
        raise RuntimeError(f"{job.name}: the learner ended with status {status}:\n{system.learner.tail(40)}")


async def _watch(job: Job, system: System, crowd: Crowd) -> None:
    """Tell the crowd what is accepted, and whoever watches what goes on, until the last step is done."""
    told = trio.current_time() - TELL_S
    while system.learner.is_alive:
        answer = await system.learner.ask()
        run = answer.run if answer is not None else None
        if run is not None:
            crowd.accepted_of_all = run.rollouts_accepted
            if run.step >= job.steps:
                return
            if trio.current_time() >= told + TELL_S:
                told = trio.current_time()
                offered = sum(seat.offered for seat in crowd.seats)
                say(
                    f"  {job.name}: step {run.step} of {job.steps}, {crowd.honest} honest rollouts, {offered} of "
                    f"cheats; {run.audits_failed} of {run.audits_done} audits failed; {run.state}"
                )
        await trio.sleep(LOOK_S)


def _keep(work: Path, folder: Path) -> None:
    for name in KEPT:
        source = work / name
        if source.exists():
            shutil.copyfile(source, folder / source.name)


def _offered(crowd: Crowd) -> dict[str, object]:
    """What the cheats themselves saw, together and by their ways."""
    codes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for seat in crowd.seats:
        codes += seat.codes
        kinds[seat.kind] += seat.offered
    offered = sum(kinds.values())
    share = offered / (offered + crowd.honest) if offered else 0.0
    return {"rollouts": offered, "share": round(share, 3), "by_kind": dict(kinds), "codes": dict(codes)}
