"""Floods of every stream against a real learner: ``make lab-flood``.

A learner process whose trainer never has to train, so that its daemon is what is measured; honest nodes that hand in
results at a steady rate; and 50 identities that flood one stream after the other for a bounded time. Everything is on
loopback, where bounds by address do not hold by design: those by identity, and over all, must do it. The learner's
daemon and the honest nodes come first on this machine's cores: the attackers stand for other machines. Prints a table
and, as the last line, one JSON object: ``rows``, ``ok``, and ``misses``, one sentence for each target that was missed.

    python -m tests.lab.flood                              all, some eleven minutes
    python -m tests.lab.flood --only lease --only submit   those whose names begin so
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import trio

from rollmesh_peer.control import ask_control
from rollmesh_peer.folders import control_sockets
from rollmesh_protocol.errors import LinkLost
from rollmesh_protocol.status import StatusRequest
from tests.lab.flood_kinds import KINDS
from tests.lab.processes import DIES_WITH_PARENT, cpu_seconds
from tests.support.attacker import Weight
from tests.support.system import Daemon, System, open_system

IDENTITIES, PROCESSES = 50, 5
HONEST, RATE = 3, 3.0
"""Honest nodes, and results that each hands in every second."""
SETTLE_S = 3.0
START_S = 300.0
"""On a machine that is busy with other things."""
TARGET_P99_S = 1.0
MEMORY_MIB = 512.0
"""What the learner's daemon may hold at its worst: it starts with some 130, and its buffers are bounded by 256."""
NO_FLOOD = "nothing"
SETTINGS = (
    "rollouts.groups_per_step=20000",
    "audit.enabled=false",
    "leases.min_duration_s=60",
    "leases.max_duration_s=120",
)
"""A step that never comes about, so that no torch works beside the daemon."""


@dataclass
class Child:
    """A process of the lab that takes one order a line and gives one answer."""

    process: subprocess.Popen[bytes]

    async def ask(self, **order: object) -> dict:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        return await self.hear()

    async def hear(self) -> dict:
        assert self.process.stdout is not None
        return json.loads(await trio.to_thread.run_sync(self.process.stdout.readline, abandon_on_cancel=True))


@contextlib.contextmanager
def open_child(*command: str, log: Path) -> Iterator[Child]:
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [*DIES_WITH_PARENT, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    try:
        yield Child(process)
    finally:
        process.kill()
        process.wait(10)


def quantile(values: list[float], share: float) -> float:
    """The smallest value that so many are not above; infinite of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


def favour(pid: int) -> None:
    """Run the threads of a process before whatever else this machine does, where that is allowed."""
    first = os.SCHED_RR | os.SCHED_RESET_ON_FORK
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(thread.name), first, os.sched_param(1))


class Lab:
    """One learner, its honest nodes and its attackers."""

    def __init__(self, system: System, honest: Child, attackers: list[Child]) -> None:
        self.learner: Daemon = system.learner
        self.honest = honest
        self.attackers = attackers

    async def measure(self, name: str, *, seconds: float) -> dict[str, object]:
        """One flood, and what became of everybody meanwhile."""
        weight, cpu = Weight(self.learner.pid), cpu_seconds(self.learner.pid)
        seen: dict = {}
        said: Counter[str] = Counter()

        async def watch() -> None:
            seen.update(await self.honest.ask(seconds=seconds))

        async def flood(child: Child) -> None:
            said.update(await child.ask(kind=name, seconds=seconds))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            if name != NO_FLOOD:
                for child in self.attackers:
                    nursery.start_soon(flood, child)
        submits, leases, joins = seen["submits"], seen["leases"], seen["joins"]
        return {
            "flood": name, "rate": KINDS[name].rate if name in KINDS else 0, "seconds": seconds,
            "submits": len(submits), "starved": seen["starved"],
            "submit_p50_s": round(quantile(submits, 0.5), 4), "submit_p99_s": round(quantile(submits, 0.99), 4),
            "submit_max_s": round(max(submits, default=0.0), 4), "lease_p99_s": round(quantile(leases, 0.99), 4),
            "join_max_s": round(max(joins, default=float("inf")), 2) if joins else None,
            "lost_links": seen["lost_links"], "failures": seen["failures"],
            "memory_mib": round(weight.peak_mib, 1), "growth_mib": round(weight.growth_mib, 1),
            "cpu_share": round((cpu_seconds(self.learner.pid) - cpu) / seconds, 2), "attackers": dict(said),
        }  # fmt: skip

    async def quiet(self) -> None:
        """Let what the last flood left behind run out; the learner must still answer."""
        await trio.sleep(SETTLE_S)
        for path in control_sockets(environ={"ROLLMESH_HOME": str(self.learner.home)}):
            with contextlib.suppress(LinkLost):
                await ask_control(path, StatusRequest(page=0))
        assert self.learner.is_alive, self.learner.tail()


def misses_of(row: dict) -> list[str]:
    """One sentence for each target that a flood made us miss."""
    name, misses = row["flood"], []
    if not row["submit_p99_s"] < TARGET_P99_S:
        misses.append(f"{name}: honest submits took {row['submit_p99_s']} s at p99, not < {TARGET_P99_S:g} s")
    if row["memory_mib"] > MEMORY_MIB:
        misses.append(f"{name}: the learner held {row['memory_mib']} MiB, more than {MEMORY_MIB:g}")
    if row["lost_links"]:
        misses.append(f"{name}: honest nodes lost {row['lost_links']} connections")
    misses += [f"{name}: honest {what} ({count})" for what, count in row["failures"].items() if "join" not in what]
    expected = HONEST * RATE * row["seconds"]
    if row["submits"] < 0.9 * expected:
        misses.append(f"{name}: {row['submits']} honest results of {expected:.0f} were handed in")
    return misses


HEADINGS = ("flood", "p50", "p99", "max", "lease", "join", "MiB", "cpu", "lost", "what the attackers were told")


def line_of(row: dict) -> str:
    told = ", ".join(f"{what} {count:,}" for what, count in list(row["attackers"].items())[:6])
    join = "-" if row["join_max_s"] is None else f"{row['join_max_s']:.2f}"
    return (
        f"{row['flood']:27} {row['submit_p50_s']:7.3f} {row['submit_p99_s']:7.3f} {row['submit_max_s']:7.3f} "
        f"{row['lease_p99_s']:7.3f} {join:>6} {row['memory_mib']:6.0f} {row['cpu_share']:5.2f} "
        f"{row['lost_links']:4}  {told}"
    )


async def run_floods(folder: Path, names: list[str], *, seconds: float, identities: int) -> list[dict]:
    rows = []
    heading = "{:27} {:>7} {:>7} {:>7} {:>7} {:>6} {:>6} {:>5} {:>4}  {}".format(*HEADINGS)
    with contextlib.ExitStack() as stack:
        system = stack.enter_context(open_system(folder, *SETTINGS, steps=1_000_000))
        await system.learner.until_logged("--join", timeout_s=START_S)
        favour(system.learner.pid)
        join = await system.join_line()
        address = join.partition("?")[0]
        log = folder / "lab.log"
        python = (sys.executable, "-m")
        command = (*python, "tests.lab.flood_honest", join, str(HONEST), str(RATE))
        honest = stack.enter_context(open_child(*command, log=log))
        favour(honest.process.pid)
        command = (*python, "tests.lab.flood_attackers", address, str(identities // PROCESSES))
        attackers = [stack.enter_context(open_child(*command, log=log)) for _ in range(PROCESSES)]
        for child in (honest, *attackers):
            await child.hear()
        lab = Lab(system, honest, attackers)
        await trio.sleep(2 * SETTLE_S)
        print(heading, flush=True)
        for name in names:
            rows.append(await lab.measure(name, seconds=seconds))
            print(line_of(rows[-1]), flush=True)
            await lab.quiet()
        assert "Traceback" not in system.learner.log, system.learner.tail(80)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="floods whose names begin so")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--identities", type=int, default=IDENTITIES)
    parser.add_argument("--out", type=Path, help="a file for the results")
    given = parser.parse_args()
    names = [NO_FLOOD, *KINDS]
    if given.only:
        names = [name for name in names if name.startswith(tuple(given.only))]
    with tempfile.TemporaryDirectory(prefix="rollmesh-flood-") as folder:
        rows = trio.run(lambda: run_floods(Path(folder), names, seconds=given.seconds, identities=given.identities))
    misses = [miss for row in rows for miss in misses_of(row)]
    found = {"identities": given.identities, "rows": rows, "ok": not misses, "misses": misses}
    for miss in misses:
        print(f"missed: {miss}")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 0 if not misses else 1


if __name__ == "__main__":
    sys.exit(main())
