"""A stage for attacks on the scorer: a run folder with a ledger and a key, listeners to be reached, and a user.

The programs below run as that user, in a folder that it may read: ``daemon.py`` opens a real scoring child and has
every attack scored, each followed by an honest answer; ``control.py`` runs one attack with no sandbox around it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rollmesh_protocol

SECRET = "the ledger's content"
MARKER = "ROLLMESH_TEST_MARKER"
NOBODY = 65534
STRANGER = 23_456
"""The user whose file is open to everybody."""
USERS = ["own", "nobody", "container"]
"""``container`` is root without CAP_SYS_ADMIN, which may not leave its namespaces."""

CONTROL = r"""
import json, os, sys
import hostile_answers
key = json.loads(sys.argv[1])
key["scorer"] = key["daemon"] = os.getppid()
environment = hostile_answers.make({}, seed=0)
print(environment.reward(environment.item(0).__class__("attack", key), sys.argv[2]))
"""

DAEMON = r"""
import json, os, sys, time, trio
from pathlib import Path
from rollmesh_peer.children.confinement import AnswerLimits
from rollmesh_peer.children.process import open_child
from rollmesh_peer.children.scoring import EnvironmentChoice, open_scorer, score, scorer_spec
from rollmesh_protocol.environments.interface import Item

key, attacks, hidden = (json.loads(part) for part in sys.argv[1:])
limits = AnswerLimits(cpu_s=1, wall_s=2.5, memory_bytes=256 << 20)

async def main():
    spec = scorer_spec(python_path=[Path(__file__).parent, *os.environ["PYTHONPATH"].split(os.pathsep)])
    spec.environment[key["marker"]] = "secret"
    outcome = {}
    async with open_child(spec) as child:
        key["scorer"], key["daemon"] = child.pid, os.getpid()
        item = Item("attack", key)
        held = await open_scorer(
            child,
            [EnvironmentChoice(name="hostile_answers:make")],
            seed=0,
            hidden=[Path(p) for p in hidden],
            limits=limits,
        )
        outcome["confinement"] = [held.active, dict(held.missing), held.holes, held.gaps]
        for attack in attacks:
            start = time.monotonic()
            (first,) = await score(child, 0, item, [attack], limits=limits)
            took = time.monotonic() - start
            (after,) = await score(child, 0, item, ["honest"], limits=limits)
            outcome[attack] = [first.reward, first.error, after.reward, after.error, took]
        answers = ["honest", "loop", "wrong", "crash", "honest", "raise_error"]
        mixed = await score(child, 0, item, answers, limits=limits)
        outcome["mixed"] = [[one.reward, one.error] for one in mixed]
        outcome["many"] = [one.reward for one in await score(child, 0, item, ["honest", "wrong"] * 50, limits=limits)]
        outcome["alive"] = child.is_alive
    print(json.dumps(outcome))

trio.run(main)
"""


@dataclass
class Stage:
    """A run folder with a ledger, a code folder with the environment, and listeners to be reached."""

    user: str
    folder: Path
    key: dict[str, object]
    python: str

    def run(self, *argv: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """A Python program of the code folder, as the stage's user."""
        return run_as(self.user, [self.python, str(self.folder / "code" / argv[0]), *argv[1:]], timeout_s=timeout_s)


def run_as(user: str, argv: list[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    path = [sysconfig.get_path("purelib"), str(Path(rollmesh_protocol.__file__).parents[1])]
    if user == "container":
        argv = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", *argv]
    identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if user == "nobody" else {}
    done: subprocess.CompletedProcess[str] = subprocess.run(
        argv,
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd="/",
        env={"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"},
        **identity,  # type: ignore[call-overload]
    )
    return done


def python_for(user: str) -> str | None:
    """A Python of our version that this user may run, or None: a virtual environment may lie in a private home."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, shutil.which(name, path="/usr/local/bin:/usr/bin")):
        if candidate is not None:
            with contextlib.suppress(OSError):
                if run_as(user, [candidate, "-c", "import rollmesh_peer, trio"], timeout_s=60).returncode == 0:
                    return candidate
    return None


@contextlib.contextmanager
def staged(user: str) -> Iterator[Stage]:
    """Everything that attacks look for, until the end of the block; skips where this machine cannot be that user."""
    if user != "own" and os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    if user == "container" and shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    python = python_for(user)
    if python is None:
        pytest.skip("there is no Python that nobody may run")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollmesh-test-")))
        code, run = folder / "code", folder / "run"
        code.mkdir()
        run.mkdir()
        shutil.copytree(Path(__file__).with_name("hostile_answers"), code / "hostile_answers")
        (code / "control.py").write_text(CONTROL)
        (code / "daemon.py").write_text(DAEMON)
        ledger, beside, secret_key = run / "ledger.sqlite", code / "ledger.sqlite", run / "learner.key"
        for path in (ledger, beside, secret_key):
            path.write_text(SECRET)
            path.chmod(0o600)
        other_user = folder / "other-user"
        other_user.write_text(SECRET)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(str(run / "socket"))
        unix.listen()
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{folder.name}")
        abstract.listen()
        (run / "socket").chmod(0o777)
        folder.chmod(0o755)
        if user == "nobody":
            for path in (run, ledger, beside, secret_key):
                os.chown(path, NOBODY, NOBODY)
        if os.geteuid() == 0:
            os.chown(other_user, STRANGER, STRANGER)
        key: dict[str, object] = {
            "run": str(run), "ledger": str(ledger), "beside": str(beside), "port": tcp.getsockname()[1],
            "unix": str(run / "socket"), "abstract": folder.name, "marker": MARKER,
            "secret_key": str(secret_key), "other_user": str(other_user),
        }  # fmt: skip
        yield Stage(user, folder, key, python)
