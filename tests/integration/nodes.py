"""A learner in this process and nodes in processes of their own, for the tests of the node daemon."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import trio

from rollmesh_peer.control import ask_control
from rollmesh_peer.folders import control_sockets
from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_peer.testing.fake_learner import FakeLearner
from rollmesh_protocol.errors import LinkLost
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.messages import RunCard
from rollmesh_protocol.status import NodeStatus, StatusRequest
from tests.unit.node.cards import LAYOUT, LEARNER, make_card

PATIENCE_S = 100.0
"""Deadline of every wait in these tests; what is waited for takes a second or two on a quiet machine."""


def image_of(version: int, layout: Layout = LAYOUT) -> bytes:
    """Other weights for each version, long enough for a few chunks or not."""
    return bytes((version + index) % 251 for index in range(layout.image_bytes))


@contextlib.asynccontextmanager
async def open_learner(
    folder: Path,
    *,
    card: RunCard | None = None,
    identity: Identity = LEARNER,
    port: int = 0,
    image: bytes | None = None,
) -> AsyncIterator[FakeLearner]:
    """A fake learner that has published version 1."""
    folder.mkdir(parents=True, exist_ok=True)
    options = HostOptions(key_seed=identity.seed, listen=(f"/ip4/127.0.0.1/tcp/{port}",))
    async with open_mesh(options) as mesh, trio.open_nursery() as nursery:
        learner = FakeLearner(mesh, identity=identity, card=card or make_card(), folder=folder)
        nursery.start_soon(learner.run)
        await learner.publish(image if image is not None else image_of(1, learner.card.layout))
        yield learner
        nursery.cancel_scope.cancel()


async def wait_for(learner: FakeLearner, condition) -> None:
    """Until ``condition(learner)`` holds."""
    with trio.fail_after(PATIENCE_S):
        await learner.until(condition)


@dataclass
class NodeProcess:
    """A node in a process of its own. Its log is kept as text."""

    home: Path
    process: subprocess.Popen[bytes]
    log_path: Path
    options: tuple[str, ...] = field(default=())

    @property
    def folder(self) -> Path:
        return self.home / "node"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit status."""
        with trio.fail_after(timeout_s):
            while (status := self.process.poll()) is None:
                await trio.sleep(0.02)
        return status

    async def status(self) -> NodeStatus:
        """The node's own word over its control socket."""
        with trio.fail_after(PATIENCE_S):
            while True:
                for path in control_sockets(environ={"ROLLMESH_HOME": str(self.home)}):
                    with contextlib.suppress(LinkLost):
                        answer = await ask_control(path, StatusRequest(page=0))
                        assert answer.node is not None
                        return answer.node
                assert self.process.poll() is None, self.log
                await trio.sleep(0.05)

    async def until(self, condition) -> NodeStatus:
        """The first status for which ``condition`` holds."""
        last = None
        with trio.move_on_after(PATIENCE_S):
            while True:
                last = await self.status()
                if condition(last):
                    return last
                await trio.sleep(0.1)
        raise AssertionError(f"never so: {last}\n{self.log}")

    async def until_logged(self, words: str, *, times: int = 1) -> None:
        with trio.move_on_after(PATIENCE_S):
            while self.log.count(words) < times:
                await trio.sleep(0.05)
            return
        raise AssertionError(f"never said {words!r}:\n{self.log}")

    def engine_pids(self) -> list[int]:
        """Children of the daemon that are engines."""
        return [pid for pid in children_of(self.process.pid) if "engine.host" in command_of(pid)]


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


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextlib.contextmanager
def start_node(home: Path, join: str, *, script: dict | None = None, settings: tuple[str, ...] = (), fault: str = ""):
    """A node that is killed at the end of the block if it still lives."""
    home.mkdir(parents=True, exist_ok=True)
    log_path = home / f"log-{len(list(home.glob('log-*')))}"
    given = (
        "engine.backend=scripted",
        'network.listen=["/ip4/127.0.0.1/tcp/0"]',
        'weights.ram_folder=""',
        *settings,
    )
    command = [sys.executable, "-m", "rollmesh_peer.command", "node", "run", "--join", join]
    for setting in given:
        command += ["--set", setting]
    environ = {
        **os.environ,
        "ROLLMESH_HOME": str(home),
        "ROLLMESH_SCRIPTED_ENGINE": json.dumps(script or {}),
        "ROLLMESH_FAULT": fault,
    }
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True)
    node = NodeProcess(home=home, process=process, log_path=log_path)
    try:
        yield node
    except BaseException as error:
        error.add_note("the node's log:\n" + "\n".join(node.log.splitlines()[-60:]))
        raise
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait(10)
