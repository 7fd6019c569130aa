"""Takes everything away from a process, layer by layer: what the scorer's processes do to themselves.

The layers do not rely on each other; each is reported as active or missing with the reason, because machines differ:
root or not, container or not, old kernel or not.

    namespaces   no network, no other process to see or signal, own mounts
    empty root   a file system that holds Python's folders, read-only, and nothing else
    landlock     the same rule again by another part of the kernel; works in containers
    other user   uid 65534 where we are root, and no capability anywhere
    seccomp      a list of allowed system calls (``seccomp``)
    limits       CPU seconds, memory, no file growth, no process, few descriptors

``confine_zygote`` is called once, after the environments are imported; ``confine_answer`` in every forked child.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

if os.name == "posix":
    import resource  # here, because a confined process may not be able to read Python's folders any more

from rollmesh_peer.children import landlock, linux, seccomp
from rollmesh_protocol.errors import UsageError

NOBODY: Final = 65534
"""The user and group that own nothing, by convention."""
NEW_ROOT: Final = "/proc"
"""Where the empty root is put together: a folder that every Linux has and that nothing below needs."""
NEW_ROOT_OPTIONS: Final = "size=1m,nr_inodes=4k,mode=755"
"""Room for the folders that lead to what is mounted, and no more."""
SYSTEM_PATHS: Final = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo",
)  # fmt: skip
"""Shared libraries and time zones: public on every machine."""
MAX_DESCRIPTORS: Final = 64
"""Enough to import a module and to read a word list."""
OOM_SCORE: Final = "1000"
"""When memory runs out, Linux takes the answer first."""


@dataclass
class Protections:
    """Which layers are active, and why the others are not."""

    active: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def attempt(self, name: str, action: Callable[[], object]) -> bool:
        """Run one layer's set-up and note how it went."""
        try:
            action()
        except (AttributeError, OSError, ValueError) as error:  # elsewhere than on Linux, some calls do not exist
            self.missing[name] = str(error)
            return False
        self.active.append(name)
        return True


@dataclass(frozen=True, kw_only=True)
class AnswerLimits:
    """What one answer may use."""

    cpu_s: int = 2
    """CPU seconds; the kernel counts whole ones."""
    wall_s: float = 6.0
    """Seconds on the clock, with room for a busy machine: only an answer that waits reaches it before ``cpu_s``."""
    memory_bytes: int = 512 * 1024 * 1024
    """Address space on top of what the imported environment has."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, object]) -> AnswerLimits:
        """From a map with these three names. Raises ``UsageError`` when one is missing or not above zero."""
        cpu_s, wall_s, memory_bytes = (plain.get(name) for name in ("cpu_s", "wall_s", "memory_bytes"))
        if not isinstance(cpu_s, int) or not isinstance(wall_s, (int, float)) or not isinstance(memory_bytes, int):
            raise UsageError("the limits of an answer are cpu_s, wall_s and memory_bytes")
        if min(cpu_s, wall_s, memory_bytes) <= 0:
            raise UsageError("the limits of an answer must be above zero")
        return cls(cpu_s=cpu_s, wall_s=float(wall_s), memory_bytes=memory_bytes)


def enter_namespaces() -> Protections:
    """Leave the host's namespaces; from the next fork on also its processes. The caller must have one thread only."""
    done = Protections()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    done.attempt("namespaces", _unshare)
    return done


def confine_zygote(done: Protections, hidden: Iterable[str]) -> None:
    """Take files, users and capabilities from this process and its children; adds to ``done``.

    ``hidden`` are folders that must stay unreadable: a folder of the import path that holds one is left out.
    """
    readable = readable_paths(hidden)
    if "namespaces" in done.active:
        done.attempt("empty root", lambda: _build_root(readable))
    else:
        done.missing["empty root"] = "needs namespaces"
    with contextlib.suppress(OSError):
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    done.attempt("landlock", lambda: landlock.restrict(readable))
    if os.name == "posix" and os.geteuid() == 0:
        done.attempt("other user", _become_nobody)
    else:
        done.missing["other user"] = "needs root"
    with contextlib.suppress(OSError):
        linux.drop_capabilities()
        linux.prctl(linux.PR_SET_DUMPABLE, 0)


def confine_answer(limits: AnswerLimits, address_space_bytes: int, *, with_landlock: bool) -> Protections:
    """The last layers, for a process that is about to read an answer and then to end."""
    done = Protections()
    done.attempt("limits", lambda: _limit(limits, address_space_bytes))
    if with_landlock:
        with contextlib.suppress(OSError):
            landlock.separate()
    done.attempt("seccomp", seccomp.install)
    return done


def readable_paths(hidden: Iterable[str]) -> tuple[str, ...]:
    """What an environment may need to read: Python's folders, the import path and shared libraries; none in another."""
    candidates = [*SYSTEM_PATHS, str(Path(sys.base_prefix) / "lib")]
    candidates += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    candidates += [entry for entry in sys.path if entry]
    for name, module in list(sys.modules.items()):
        if "." not in name:
            candidates += [str(entry) for entry in getattr(module, "__path__", ())]
    secrets = [Path(path).resolve() for path in hidden]
    chosen: list[Path] = []
    for path in sorted({form for text in candidates for form in (Path(text).absolute(), Path(text).resolve())}):
        holds_secret = any(secret.is_relative_to(path.resolve()) for secret in secrets)
        if path.exists() and not holds_secret and not any(path.is_relative_to(other) for other in chosen):
            chosen.append(path)
    return tuple(str(path) for path in chosen)


def memory_in_use_bytes() -> int:
    """Address space of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def probe(result_descriptor: int) -> list[str]:
    """Try to get out of a sandbox, in harmless ways; returns the names of the attempts that worked."""

    def start_a_process() -> None:
        if os.fork() == 0:
            os._exit(0)

    def see_variables() -> None:
        if not os.environ:
            raise OSError

    def hold_a_descriptor() -> None:
        if not any(_is_open(number) for number in range(3, MAX_DESCRIPTORS) if number != result_descriptor):
            raise OSError

    attempts: dict[str, Callable[[], object]] = {
        "write a file": lambda: (Path(tempfile.gettempdir()) / "rollmesh-probe").write_text(""),
        "read /etc/passwd": lambda: Path("/etc/passwd").read_bytes(),
        "open a socket": lambda: socket.socket().close(),
        "start a process": start_a_process,
        "signal its parent": lambda: os.kill(os.getppid(), 0),
        "raise a limit": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS - 1, MAX_DESCRIPTORS)),
        "see variables": see_variables,
        "hold a descriptor": hold_a_descriptor,
    }
    return [name for name, attempt in attempts.items() if Protections().attempt(name, attempt)]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _unshare() -> None:
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWPID | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    if os.geteuid() == 0:
        linux.unshare(flags)
        return
    user, group = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER | flags)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _build_root(readable: Iterable[str]) -> None:
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", NEW_ROOT, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, NEW_ROOT_OPTIONS)
    try:
        for path in readable:
            target = NEW_ROOT + path
            if Path(path).is_dir():
                Path(target).mkdir(parents=True, exist_ok=True)
            else:
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                Path(target).touch()
            linux.mount(path, target, None, linux.MS_BIND | linux.MS_REC)
        linux.make_read_only(NEW_ROOT, recursive=True)
        os.chroot(NEW_ROOT)
    except OSError:
        linux.unmount(NEW_ROOT)
        raise
    os.chdir("/")


def _become_nobody() -> None:
    for folder in (sysconfig.get_path(name) for name in ("stdlib", "purelib")):
        for path in (Path(folder), *Path(folder).parents):
            if not path.stat().st_mode & stat.S_IXOTH:
                raise OSError(errno.EACCES, f"{path} is closed to others, and environments import from below it")
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _limit(limits: AnswerLimits, address_space_bytes: int) -> None:
    wanted = {
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: MAX_DESCRIPTORS,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    if address_space_bytes:
        wanted[resource.RLIMIT_AS] = address_space_bytes + limits.memory_bytes
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, least))
