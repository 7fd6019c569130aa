"""The lab's processes: started in a host's namespace, watched through their logs, counted, and killed at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")
"""Before a command: a lab that is killed takes its processes along."""
_KINDS = {
    "nodes": b"rollmesh_peer.command",
    "workers": b"rollmesh_peer.weights.worker",
    "learner": b"tests.lab.learner",
    "line": b"tests.lab.delay_line",
}
"""What a command line tells of a process; everything else is the lab's own."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class LabProcess:
    """One process of ours in one namespace. What it says goes to a file of its own."""

    name: str
    host: int
    process: subprocess.Popen[bytes]
    log_path: Path
    is_killed: bool = False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL, to it and to its children, as when the power goes."""
        self.is_killed = True
        for pid in (*descendants(self.process.pid), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def tail(self, lines: int = 20) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])


def start(
    name: str,
    command: Sequence[str],
    *,
    namespace: str,
    host: int,
    log_path: Path,
    environ: Mapping[str, str],
    is_spoken_to: bool = False,
) -> LabProcess:
    """Start ``command`` inside a namespace. Its stdin and stdout are pipes if it is spoken to."""
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [*DIES_WITH_PARENT, "ip", "netns", "exec", namespace, *command],
            stdin=subprocess.PIPE if is_spoken_to else subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_spoken_to else log,
            stderr=log,
            env={**os.environ, **environ},
            start_new_session=True,
        )
    return LabProcess(name, host, process, log_path)


def node_command(join: str, settings: Sequence[str]) -> list[str]:
    """The product's own command line, as a volunteer would type it."""
    command = [sys.executable, "-m", "rollmesh_peer.command", "node", "run", "--join", join]
    return command + [word for setting in settings for word in ("--set", setting)]


@dataclass
class NodeLog:
    """What a node's log says about versions, read as it grows. Times are seconds since 1970."""

    path: Path
    joined: float | None = None
    heard: dict[int, float] = field(default_factory=dict)
    """When the announcement of a version came."""
    fetched: dict[int, float] = field(default_factory=dict)
    """When its payload was complete."""
    held: dict[int, float] = field(default_factory=dict)
    """When it was verified and in place."""
    remarks: list[dict[str, object]] = field(default_factory=list)
    """Warnings, and what the swarm reported of its neighbours."""
    _offset: int = 0

    def read(self) -> None:
        """Take in what is new."""
        with self.path.open("rb") as log:
            log.seek(self._offset)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                self._note(json.loads(line))

    def _note(self, said: dict[str, object]) -> None:
        event, at = str(said.get("event", "")), float(str(said.get("time", 0)))
        words = event.split()
        if event == "joined":
            self.joined = at
        elif event == "holds new weights":
            self.held.setdefault(int(str(said["version"])), at)
        elif event.startswith("heard of version "):
            self.heard.setdefault(int(words[3]), at)
        elif event.startswith("fetched version "):
            self.fetched.setdefault(int(words[2].rstrip(":")), at)
        elif said.get("level") in ("warning", "error") or (said.get("part") == "swarm" and said["level"] == "info"):
            self.remarks.append(said)


# --- what they use ---------------------------------------------------------------------------------------------------
def descendants(pid: int) -> list[int]:
    """All processes below ``pid``."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, below = [], [pid]
    while below:
        below = [child for parent in below for child in children.get(parent, [])]
        found += below
    return found


def cpu_seconds(pid: int) -> float:
    """What a process has used, with those of its children that have ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS
    return 0.0


def lab_cpu_seconds() -> dict[str, float]:
    """What this process and everything below it has used, by what they are."""
    used = dict.fromkeys(("nodes", "workers", "learner", "line", "lab"), 0.0)
    for pid in (os.getpid(), *descendants(os.getpid())):
        used[_kind(pid)] += cpu_seconds(pid)
    return used


def _kind(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        for kind, words in _KINDS.items():
            if words in command:
                return kind
    return "lab"


def sent_segments(pid: int) -> tuple[int, int]:
    """TCP segments that the namespace of a process has sent, and those of them that it had sent before."""
    with contextlib.suppress(OSError):
        names, values = (
            line.split() for line in Path(f"/proc/{pid}/net/snmp").read_text().splitlines() if "Tcp:" in line
        )
        found = dict(zip(names[1:], map(int, values[1:]), strict=True))
        return found["OutSegs"] + found["RetransSegs"], found["RetransSegs"]
    return 0, 0


def machine_cpu_seconds() -> float:
    """What all processes of the machine have used, the kernel's own work included."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / _TICKS


def lab_memory_bytes() -> int:
    """The memory of everything below this process; what is shared counts once."""
    total = 0
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
    return total
