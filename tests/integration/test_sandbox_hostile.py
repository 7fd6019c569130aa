"""Answers that attack the scorer, through the real pipe: each gets nowhere, and the next honest answer is scored right.

The environment below runs the answer it is given, as the worst scorer would. Every attack returns 1.0 where it got
what it wanted, so a reward of 0.0 shows that it did not; the same attacks run without a sandbox show that they work.
All of it runs as the user of this test and, where that is root, once more as nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rollmesh_protocol

SECRET = "the ledger's content"
MARKER = "ROLLMESH_TEST_MARKER"

HOSTILE = r"""
import ctypes, os, signal, socket, sys, threading, time
from rollmesh_protocol.environments.interface import Item

STATE = []

def write_file(key):
    open(key["run"] + "/written", "w").write("here I am"); return 1.0
def write_anywhere(key):
    for folder in ("/tmp", "/dev/shm", "/var/tmp", "/run", ".", "/", os.path.dirname(__file__), "/proc"):
        try: open(folder + "/rollmesh-hostile", "w").write("x"); return 1.0
        except OSError: pass
    raise OSError
def append_to_ledger(key):
    os.write(os.open(key["ledger"], os.O_WRONLY | os.O_APPEND), b"forged"); return 1.0
def truncate_ledger(key):
    os.truncate(key["ledger"], 0); return 1.0
def delete_ledger(key):
    os.unlink(key["ledger"]); return 1.0
def chmod_ledger(key):
    os.chmod(key["ledger"], 0o666); return 1.0
def read_ledger(key):
    return 1.0 if open(key["ledger"]).read() else 0.0
def read_ledger_beside_code(key):
    return 1.0 if open(key["beside"]).read() else 0.0
def list_run_folder(key):
    return 1.0 if os.listdir(key["run"]) else 0.0
def read_passwd(key):
    return 1.0 if open("/etc/passwd").read() else 0.0
def read_proc(key):
    for name in ("/proc/self/environ", "/proc/1/environ", f"/proc/{os.getppid()}/cmdline", "/proc/self/maps"):
        try: open(name, "rb").read(); return 1.0
        except OSError: pass
    raise OSError
def connect(key):
    socket.create_connection(("127.0.0.1", key["port"]), 2).close(); return 1.0
def connect_unix(key):
    s = socket.socket(socket.AF_UNIX); s.connect(key["unix"]); return 1.0
def connect_abstract(key):
    s = socket.socket(socket.AF_UNIX); s.connect("\0" + key["abstract"]); return 1.0
def make_socketpair(key):
    socket.socketpair(); return 1.0
def fork(key):
    if os.fork() == 0: time.sleep(0.01); os._exit(0)
    return 1.0
def thread(key):
    t = threading.Thread(target=lambda: None); t.start(); t.join(); return 1.0
def execute(key):
    os.execv("/bin/true", ["/bin/true"])
def spawn(key):
    import subprocess; subprocess.run(["/bin/true"], check=True); return 1.0
def memfd(key):
    os.memfd_create("x"); return 1.0
def namespaces(key):
    if ctypes.CDLL(None).unshare(0x10000000): raise OSError
    return 1.0
def trace_parent(key):
    if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0): raise OSError
    return 1.0
def raise_limit(key):
    import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, resource.RLIM_INFINITY)); return 1.0
def become_root(key):
    os.setuid(0); return 1.0
def set_owner_signal(key):
    import fcntl; fcntl.fcntl(3, fcntl.F_SETOWN, os.getppid()); return 1.0
def environment(key):
    return 1.0 if any(key["marker"] in name for name in os.environ) else 0.0
def all_variables(key):
    return 1.0 if os.environ else 0.0
def inherited_descriptors(key):
    found = 0
    for number in range(1024):
        if number == 3: continue
        try: os.fstat(number)
        except OSError: continue
        # 0, 1 and 2 are there and lead to /dev/null: writing to them reaches nobody.
        if number > 2: found += 1
        elif os.fstat(number).st_rdev != os.makedev(1, 3): found += 1
        else: os.write(number, b"\xff" * 4096)
    return 1.0 if found else 0.0
def kill_parent(key):
    os.kill(os.getppid(), signal.SIGKILL); return 1.0
def kill_scorer(key):
    os.kill(key["scorer"], signal.SIGKILL); return 1.0
def kill_daemon(key):
    os.kill(key["daemon"], signal.SIGKILL); return 1.0
def kill_all(key):
    os.kill(-1, signal.SIGTERM); return 1.0
def kill_group(key):
    os.killpg(key["scorer"], signal.SIGKILL); return 1.0

def loop(key):
    while True: pass
def loop_ignoring_signals(key):
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    while True: pass
def wait_for_ever(key):
    lock = threading.Lock(); lock.acquire(); lock.acquire()
def sleep(key):
    import select; select.select([], [], [], 600)
def allocate(key):
    block = bytearray(8 << 30); block[::4096] = b"x" * len(block[::4096]); return 1.0
def allocate_slowly(key):
    kept = []
    while True: kept.append(bytearray(1 << 20))
def recurse(key):
    return recurse(key)
def print_endlessly(key):
    for _ in range(10**6): print("x" * 1000)
    return 0.0
def raise_error(key):
    raise ValueError("a scorer that does not like\nthis answer \x1b[31m" + "x" * 10**6)
def raise_exit(key):
    sys.exit(0)
def raise_interrupt(key):
    raise KeyboardInterrupt
def leave(key):
    os._exit(0)
def crash(key):
    ctypes.string_at(0)
def abort(key):
    os.abort()
def garbage(key):
    os.write(3, b"\xff" * 7); os._exit(0)
def flood(key):
    while True: os.write(3, b"\xff" * 4096)
def too_much(key):
    return 2.0
def negative(key):
    return -1.0
def nan(key):
    return float("nan")
def infinite(key):
    return float("inf")
def text(key):
    return "1.0 and more"
def poison(key):
    STATE.append("poisoned"); Hostile.reward = lambda self, item, completion: 1.0; return 0.0

class Hostile:
    name = "hostile"
    def item(self, index):
        return Item("attack", {})
    def messages(self, item):
        return ()
    def reward(self, item, completion):
        if completion == "honest": return 0.75
        return 0.0 if completion == "wrong" else globals()[completion](item.key)

def make(parameters, /, *, seed):
    return Hostile()
"""

CONTROL = r"""
import json, os, sys
import hostile
key = json.loads(sys.argv[1])
key["scorer"] = key["daemon"] = os.getppid()
environment = hostile.make({}, seed=0)
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
            child, [EnvironmentChoice(name="hostile:make")], seed=0, hidden=[Path(p) for p in hidden], limits=limits
        )
        outcome["confinement"] = [held.active, dict(held.missing), held.holes]
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

REACHES_NOTHING = [
    "write_file",
    "write_anywhere",
    "append_to_ledger",
    "truncate_ledger",
    "delete_ledger",
    "chmod_ledger",
    "read_ledger",
    "read_ledger_beside_code",
    "list_run_folder",
    "read_passwd",
    "read_proc",
    "connect",
    "connect_unix",
    "connect_abstract",
    "make_socketpair",
    "fork",
    "thread",
    "execute",
    "spawn",
    "memfd",
    "namespaces",
    "trace_parent",
    "raise_limit",
    "become_root",
    "set_owner_signal",
    "environment",
    "all_variables",
    "inherited_descriptors",
    "kill_parent",
    "kill_scorer",
    "kill_daemon",
    "kill_all",
    "kill_group",
]
HANGS_OR_GROWS = [
    "loop",
    "loop_ignoring_signals",
    "wait_for_ever",
    "sleep",
    "allocate",
    "allocate_slowly",
    "recurse",
    "print_endlessly",
]
BREAKS = [
    "raise_error",
    "raise_exit",
    "raise_interrupt",
    "leave",
    "crash",
    "abort",
    "garbage",
    "flood",
    "too_much",
    "negative",
    "nan",
    "infinite",
    "text",
    "poison",
]
ATTACKS = [*REACHES_NOTHING, *HANGS_OR_GROWS, *BREAKS]

WORKS_OUTSIDE = [
    "write_file",
    "append_to_ledger",
    "read_ledger",
    "read_ledger_beside_code",
    "list_run_folder",
    "read_passwd",
    "read_proc",
    "connect",
    "connect_unix",
    "connect_abstract",
    "make_socketpair",
    "fork",
    "thread",
    "spawn",
    "memfd",
    "all_variables",
]
"""What the control run shows to work without a sandbox; the others would hurt this machine or need privileges."""

HAS_NOTHING_TO_REACH = ["environment", "all_variables", "inherited_descriptors"]
"""Attacks that look for something and find nothing, without an error."""

NOBODY = 65534

USERS = ["own", "nobody", "container"]
"""``container`` is root without CAP_SYS_ADMIN, which may not leave its namespaces."""


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


@pytest.fixture(scope="module", params=USERS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    user = str(request.param)
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
        (code / "hostile.py").write_text(HOSTILE)
        (code / "control.py").write_text(CONTROL)
        (code / "daemon.py").write_text(textwrap.dedent(DAEMON))
        ledger, beside = run / "ledger.sqlite", code / "ledger.sqlite"
        for path in (ledger, beside):
            path.write_text(SECRET)
            path.chmod(0o600)
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
            for path in (run, ledger, beside):
                os.chown(path, 65534, 65534)
        key: dict[str, object] = {
            "run": str(run), "ledger": str(ledger), "beside": str(beside), "port": tcp.getsockname()[1],
            "unix": str(run / "socket"), "abstract": folder.name, "marker": MARKER,
        }  # fmt: skip
        yield Stage(user, folder, key, python)


@pytest.fixture(scope="module")
def outcome(stage: Stage) -> dict[str, list[object]]:
    """Every attack and an honest answer after it, by a daemon of its own; also proof that the daemon survives."""
    # Code and ledger in one folder, as in a careless set-up: "hidden" must keep the folder from being readable.
    hidden = [str(stage.key["run"]), str(stage.key["beside"])]
    done = stage.run("daemon.py", *(json.dumps(part) for part in (stage.key, ATTACKS, hidden)), timeout_s=170)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[object]] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(180)
def test_confinement_is_complete_on_this_kernel(outcome: dict[str, list[object]], stage: Stage) -> None:
    active, missing, holes = outcome["confinement"]
    assert isinstance(active, list) and isinstance(missing, dict)
    print(f"\nas {stage.user}: {active}, missing {missing}")
    assert holes == []
    assert {"limits", "seccomp"} <= set(active) or os.uname().machine not in ("x86_64", "aarch64")
    if stage.user == "own" and os.geteuid() == 0:
        assert "other user" in active
    if stage.user == "container":
        assert "namespaces" not in active


@pytest.mark.timeout(180)
@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_gets_nowhere(outcome: dict[str, list[object]], attack: str) -> None:
    reward, error, after, after_error, took = outcome[attack]
    assert reward == 0.0, error
    assert (after, after_error) == (0.75, None)
    if attack in REACHES_NOTHING and attack not in HAS_NOTHING_TO_REACH:
        # Refused by the kernel, and told so: a process that merely ended would show nothing.
        assert str(error).startswith(
            (
                "PermissionError",
                "FileNotFoundError",
                "ProcessLookupError",
                "OSError",
                "RuntimeError",
                "ValueError: not allowed to raise",
            )
        )
    assert isinstance(took, float) and took < 6.0
    if attack in HANGS_OR_GROWS and attack != "print_endlessly":
        assert error


@pytest.mark.timeout(180)
def test_nothing_was_left_behind(outcome: dict[str, list[object]], stage: Stage) -> None:
    assert outcome["alive"]
    for name in ("ledger", "beside"):
        path = Path(str(stage.key[name]))
        assert path.read_text() == SECRET
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not (Path(str(stage.key["run"])) / "written").exists()
    for folder in ("/tmp", "/dev/shm", "/var/tmp", "/run", "/", str(stage.folder / "code")):
        assert not (Path(folder) / "rollmesh-hostile").exists()


@pytest.mark.timeout(180)
def test_errors_are_short_printable_words(outcome: dict[str, list[object]]) -> None:
    errors = [str(entry[1]) for name, entry in outcome.items() if name in ATTACKS]
    assert all(len(error) <= 220 and error.isprintable() for error in errors)
    assert str(outcome["raise_error"][1]).startswith("ValueError: a scorer that does not like this answer")
    assert "0.0" not in str(outcome["nan"][1]) and "not a number" in str(outcome["nan"][1])
    assert "not in [0, 1]" in str(outcome["too_much"][1])
    assert "CPU" in str(outcome["loop"][1]) or "no reward within" in str(outcome["loop"][1])  # on a busy machine
    assert "no reward within" in str(outcome["wait_for_ever"][1])
    assert "MemoryError" in str(outcome["allocate"][1])


@pytest.mark.timeout(180)
def test_honest_answers_are_not_harmed_by_neighbours_of_one_batch(outcome: dict[str, list[object]]) -> None:
    mixed = outcome["mixed"]
    assert [entry[0] for entry in mixed] == [0.75, 0.0, 0.0, 0.0, 0.75, 0.0]  # type: ignore[index]
    assert [entry[1] is None for entry in mixed] == [True, False, True, False, True, False]  # type: ignore[index]
    assert outcome["many"] == [0.75, 0.0] * 50


@pytest.mark.parametrize("attack", WORKS_OUTSIDE)
def test_attack_works_without_a_sandbox(stage: Stage, attack: str) -> None:
    """The control: an attack that fails for a reason of its own would show nothing above."""
    done = stage.run("control.py", json.dumps(stage.key), attack, timeout_s=60)
    assert done.stdout.strip() == "1.0", done.stderr
    for name in ("ledger", "beside"):
        Path(str(stage.key[name])).write_text(SECRET)
    (Path(str(stage.key["run"])) / "written").unlink(missing_ok=True)
