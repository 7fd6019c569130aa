"""Each layer of the confinement alone: on a machine that lacks the others it must hold what it promises.

Every check runs in a forked process of a fresh interpreter, because a layer cannot be taken off again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh_peer.children import landlock

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="these are layers of Linux")

PROGRAM = """
import json, os, socket, sys, resource, signal
from pathlib import Path
from rollmesh_peer.children import confinement, landlock, linux, seccomp
from rollmesh_peer.children.confinement import AnswerLimits

def tried(**attempts):
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = True
        except (OSError, ValueError, MemoryError):
            found[name] = False
    return found

"localhost".encode("idna")  # what connecting imports, before it cannot be read any more

def fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()

folder = Path(sys.argv[1])
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
abstract = socket.socket(socket.AF_UNIX)
abstract.bind("\\0rollmesh-test-%d" % os.getpid())
abstract.listen()
name = abstract.getsockname()

def connect_abstract():
    socket.socket(socket.AF_UNIX).connect(name)

attempts = dict(
    write=lambda: (folder / "new").write_text("x"),
    read=lambda: (folder / "secret").read_text(),
    library=lambda: Path(os.__file__).read_bytes(),
    connect=lambda: socket.create_connection(("127.0.0.1", port), 1).close(),
    connect_abstract=connect_abstract,
    socketpair=lambda: socket.socketpair(),
    fork=fork,
    signal_parent=lambda: os.kill(os.getppid(), 0),
    raise_limit=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)),
    allocate=lambda: bytearray(256 << 20),
    grow_file=lambda: os.write(os.open(folder / "existing", os.O_WRONLY | os.O_APPEND), b"x" * 10),
    see_host=lambda: os.kill(int(sys.argv[2]), 0),
)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
"""


def tried(layer: str, folder: Path) -> dict[str, bool]:
    """Which attempts worked after the statements of ``layer`` were run."""
    (folder / "secret").write_text("secret")
    (folder / "existing").write_text("")
    code = f"{PROGRAM}\n{layer}\nprint(json.dumps(tried(**attempts)))\n"
    argv = [sys.executable, "-c", code, str(folder), str(os.getpid())]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    outcome: dict[str, bool] = json.loads(done.stdout.strip().splitlines()[-1])
    return outcome


SKIP = """
def only_where_allowed(action):
    try:
        return action()
    except OSError as error:
        print(f"this machine has no such layer: {error}", file=sys.stderr)
        sys.exit(77)
"""


def test_without_any_layer_everything_works(tmp_path: Path) -> None:
    outcome = tried("", tmp_path)
    assert all(outcome.values()), outcome


def test_landlock_alone(tmp_path: Path) -> None:
    layer = f"""{SKIP}
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
only_where_allowed(lambda: landlock.restrict(confinement.readable_paths(())))
"""
    outcome = tried(layer, tmp_path)
    assert outcome["library"]
    assert not any(outcome[name] for name in ("write", "read", "grow_file"))
    if landlock.abi() >= 4:
        assert not outcome["connect"]
    if landlock.abi() >= 6:
        assert not outcome["signal_parent"]


def test_second_landlock_layer_separates_a_child_from_its_parent(tmp_path: Path) -> None:
    layer = f"""{SKIP}
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
only_where_allowed(landlock.abi)
if os.fork() == 0:
    landlock.separate()
    print(json.dumps(tried(**attempts)), flush=True)
    os._exit(0)
os.wait()
os._exit(0)
"""
    outcome = tried(layer, tmp_path)
    assert outcome["library"] and outcome["read"]
    assert not outcome["write"]
    if landlock.abi() >= 6:
        assert not outcome["signal_parent"] and not outcome["connect_abstract"]


def test_seccomp_alone(tmp_path: Path) -> None:
    outcome = tried(f"{SKIP}\nonly_where_allowed(seccomp.install)", tmp_path)
    assert outcome["library"] and outcome["read"]  # reading is not what it is for
    refused = ("write", "grow_file", "connect", "connect_abstract", "socketpair", "fork", "signal_parent")
    assert not any(outcome[name] for name in refused), outcome
    assert not outcome["raise_limit"]


def test_namespaces_and_empty_root_alone(tmp_path: Path) -> None:
    layer = f"""{SKIP}
only_where_allowed(confinement._unshare)
if os.fork():
    os.wait()
    os._exit(0)
confinement._build_root(confinement.readable_paths(()))
assert sorted(os.listdir("/")) and "root" not in os.listdir("/") or not os.path.exists("/root/.bashrc")
linux.drop_capabilities()
print(json.dumps(tried(**attempts)), flush=True)
os._exit(0)
"""
    outcome = tried(layer, tmp_path)
    assert outcome["library"]
    refused = ("write", "read", "grow_file", "connect", "connect_abstract", "see_host")
    assert not any(outcome[name] for name in refused), outcome


def test_limits_alone(tmp_path: Path) -> None:
    layer = "confinement._limit(AnswerLimits(memory_bytes=64 << 20), confinement.memory_in_use_bytes())"
    outcome = tried(layer, tmp_path)
    assert outcome["read"] and outcome["library"]
    assert not any(outcome[name] for name in ("allocate", "grow_file")), outcome
    if os.geteuid() != 0:  # root is not held to a number of processes
        assert not outcome["fork"]


def test_limits_never_raise_what_was_lower(tmp_path: Path) -> None:
    layer = """
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
confinement._limit(AnswerLimits(), confinement.memory_in_use_bytes())
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (20, 20)
assert resource.getrlimit(resource.RLIMIT_CPU) == (2, 2)
"""
    tried(layer, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_other_user_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    # This test's Python may lie in a private home, which is what the layer refuses: point it at a public folder.
    layer = "confinement.sysconfig.get_path = lambda name: '/usr/lib'\nconfinement._become_nobody()"
    outcome = tried(layer, tmp_path)
    assert not any(outcome[name] for name in ("write", "read", "grow_file", "see_host"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_other_user_is_refused_where_it_could_not_import(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    layer = f"""
confinement.sysconfig.get_path = lambda name: {str(tmp_path)!r}
try:
    confinement._become_nobody()
except OSError as error:
    assert "closed to others" in str(error)
else:
    raise AssertionError
assert os.getresuid() == (0, 0, 0)
"""
    tried(layer, tmp_path)


def test_probe_finds_what_is_open_and_nothing_when_all_is_closed(tmp_path: Path) -> None:
    layer = f"""{SKIP}
open_holes = confinement.probe(3)
assert "open a socket" in open_holes and "write a file" in open_holes and "see variables" in open_holes, open_holes
done = confinement.enter_namespaces()
if os.fork():
    _, status = os.wait()
    os._exit(os.waitstatus_to_exitcode(status))
in_use = confinement.memory_in_use_bytes()
confinement.confine_zygote(done, [])
os.environ.clear()
linux.close_from(3)
last = confinement.confine_answer(AnswerLimits(), in_use, with_landlock="landlock" in done.active)
print(json.dumps({{name: False for name in confinement.probe(3)}}), flush=True)
os._exit(0)
"""
    assert tried(layer, tmp_path) == {}
