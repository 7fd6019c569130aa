"""A whole run in processes of its own: the learner and its children, nodes and their engines, over loopback.

The model is the tiny one, so that a step takes tenths of a second. Everything goes through the ``rollmesh`` command, as
a user would; what a test knows it knows from logs, control sockets, files and the ledger.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from rollmesh_peer.control import ask_control
from rollmesh_peer.folders import control_sockets
from rollmesh_peer.testing.letters import NAME as LETTERS
from rollmesh_peer.testing.tiny_model import prepare_tiny
from rollmesh_protocol.errors import LinkLost
from rollmesh_protocol.status import NodeStatus, RunStatus, StatusAnswer, StatusRequest
from tests.support.ports import free_port

PATIENCE_S = 180.0
"""Deadline of every wait; what is waited for takes seconds on a quiet machine. Longer than pytest gives a test."""
COPIES = 20


@dataclass
class Daemon:
    """One process of ours, with its log. Killed at the end of its block if it still lives."""

    name: str
    home: Path
    command: list[str]
    environ: dict[str, str]
    log_path: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, *, faults: str = "") -> None:
        """Start, or start again. ``faults`` arms fault points, also of children that the daemon passes them to."""
        assert not self.is_alive
        environ = self.environ | ({"ROLLMESH_FAULT": faults} if faults else {})
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environ, start_new_session=True)

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit status."""
        assert self.process is not None
        with trio.move_on_after(timeout_s):
            while (status := self.process.poll()) is None:
                await trio.sleep(0.02)
            return status
        raise AssertionError(f"{self.name} did not end within {timeout_s:g} s:\n{self.tail()}")

    async def until_logged(self, words: str, *, times: int = 1, timeout_s: float = PATIENCE_S) -> None:
        with trio.move_on_after(timeout_s):
            while self.log.count(words) < times:
                await trio.sleep(0.05)
            return
        raise AssertionError(f"{self.name} never said {words!r} {times} times:\n{self.tail()}")

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.splitlines()[-lines:])

    def children(self, module: str) -> list[int]:
        """The pids of its direct children that run ``module``."""
        return [pid for pid in children_of(self.pid) if module in command_of(pid)]

    async def ask(self) -> StatusAnswer | None:
        for path in control_sockets(environ={"ROLLMESH_HOME": str(self.home)}):
            with contextlib.suppress(LinkLost):
                return await ask_control(path, StatusRequest(page=0))
        return None

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


@dataclass
class System:
    """A run: one learner, and as many nodes as a test starts."""

    folder: Path
    learner: Daemon
    nodes: dict[str, Daemon] = field(default_factory=dict)

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    async def join_line(self) -> str:
        await self.learner.until_logged("rollmesh node run --join ")
        return self.learner.log.rpartition("rollmesh node run --join ")[2].split()[0]

    async def add_node(self, name: str, *settings: str, start: bool = True, faults: str = "") -> Daemon:
        """A node with an engine on the tiny model."""
        home = self.folder / name
        home.mkdir(parents=True, exist_ok=True)
        given = (
            f"node.name={name}",
            "log.level=debug",
            "engine.threads=1",
            'network.listen=["/ip4/127.0.0.1/tcp/0"]',
            *settings,
        )
        command = [sys.executable, "-m", "rollmesh_peer.command", "node", "run", "--join", await self.join_line()]
        daemon = Daemon(name, home, command + _flags(given), _environ(home), self.folder / f"{name}.log")
        self.nodes[name] = daemon
        if start:
            daemon.start(faults=faults)
        return daemon

    async def until_run(self, condition: Callable[[RunStatus], bool], *, timeout_s: float = PATIENCE_S) -> RunStatus:
        """The learner's first status for which ``condition`` holds."""
        last: RunStatus | None = None
        with trio.move_on_after(timeout_s):
            while True:
                answer = await self.learner.ask()
                if answer is not None and answer.run is not None:
                    last = answer.run
                    if condition(last):
                        return last
                await trio.sleep(0.1)
        raise AssertionError(f"never so: {last}\n--- learner\n{self.learner.tail()}\n{self.node_logs()}")

    async def until_node(self, name: str, condition: Callable[[NodeStatus], bool]) -> NodeStatus:
        """The node's first status for which ``condition`` holds."""
        last: NodeStatus | None = None
        with trio.move_on_after(PATIENCE_S):
            while True:
                answer = await self.nodes[name].ask()
                if answer is not None and answer.node is not None:
                    last = answer.node
                    if condition(last):
                        return last
                await trio.sleep(0.1)
        raise AssertionError(f"never so: {last}\n{self.nodes[name].tail()}")

    def node_logs(self) -> str:
        return "\n".join(f"--- {node.name}\n{node.tail(30)}" for node in self.nodes.values())

    def rows(self, sql: str, *parameters: object) -> list[tuple]:
        """Rows of a copy of the ledger; the learner holds the original, and folds its log into it now and then."""
        copy = self.folder / "ledger-copy.sqlite"
        for tries_left in reversed(range(COPIES)):
            if not self._copy_ledger(copy) and tries_left:
                continue
            try:
                with contextlib.closing(sqlite3.connect(copy)) as connection:
                    return connection.execute(sql, parameters).fetchall()
            except sqlite3.DatabaseError:
                if not tries_left:
                    raise
        raise AssertionError

    def _copy_ledger(self, copy: Path) -> bool:
        """False when something was committed meanwhile: what was folded in of it would be there in part."""
        ledger, log = self.run_folder / "ledger.sqlite", self.run_folder / "ledger.sqlite-wal"
        logged = _bytes_of(log)
        copy.write_bytes(_bytes_of(ledger))
        Path(f"{copy}-wal").write_bytes(logged)
        return _bytes_of(log) == logged

    def accused(self, peer: str) -> list[tuple[str, str]]:
        """Code and detail of a node's offences, but for those of honest work that came late on a busy machine."""
        return self.rows(
            "SELECT code, detail FROM offences WHERE peer = ? AND code NOT IN ('lease.expired', 'result.stale')", peer
        )

    def summary(self) -> dict:
        return json.loads((self.run_folder / "summary.json").read_text())

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.run_folder / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def open_system(
    folder: Path,
    *settings: str,
    steps: int = 6,
    environment: Mapping[str, object] | None = None,
    faults: str = "",
    within: Sequence[str] = (),
    text: str = "",
) -> Iterator[System]:
    """A started learner on a fresh run. ``settings`` are overrides such as ``rollouts.staleness=1``.

    ``within`` is a command that runs the learner's, such as one that makes a mount namespace for it. ``text`` is a
    whole configuration, whose run lies in the folder ``run``, instead of the one of the tiny model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not text:
        model = prepare_tiny(folder / "model")
        text = _config(folder, model, steps=steps, environment=environment or {}, port=free_port())
    config = folder / "run.toml"
    config.write_text(text)
    home = folder / "learner"
    home.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "rollmesh_peer.command", "learner", "run", str(config), *_flags(settings)]
    command = [*within, *command]
    system = System(folder, Daemon("learner", home, command, _environ(home), folder / "learner.log"))
    try:
        system.learner.start(faults=faults)
        yield system
    except BaseException as error:
        error.add_note(f"--- learner\n{system.learner.tail()}\n{system.node_logs()}")
        raise
    finally:
        for daemon in (*system.nodes.values(), system.learner):
            daemon.end()


def _config(folder: Path, model: Path, *, steps: int, environment: Mapping[str, object], port: int) -> str:
    parameters = ", ".join(f"{name} = {json.dumps(value)}" for name, value in environment.items())
    return f"""
[run]
name = "tiny"
folder = "{folder / "run"}"
steps = {steps}
[network]
listen = ["/ip4/127.0.0.1/tcp/{port}"]
[model]
source = "{model}"
[[environments]]
name = "{LETTERS}"
parameters = {{ {parameters} }}
[rollouts]
groups_per_step = 2
samples_per_group = 4
max_prompt_tokens = 128
max_new_tokens = 12
staleness = 2
[leases]
min_duration_s = 5
max_duration_s = 20
[training]
lr = 1e-3
threads = 1
checkpoint_every = 2
[audit]
threads = 1
[tripwires]
enabled = false  # at this pace of learning an honest run of so small a model trips one now and then
"""


def _bytes_of(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def children_of(pid: int) -> list[int]:
    """Processes whose parent is ``pid``."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def _environ(home: Path) -> dict[str, str]:
    return {**os.environ, "ROLLMESH_HOME": str(home), "PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def _flags(settings: tuple[str, ...]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]
