"""Attacks that reach for something: files, keys, other processes, the network. Each returns 1.0 where it got there."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import threading
import time
from pathlib import Path

from .registry import reaches

LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: inside, nothing may be loadable


@reaches(works_outside=True)
def write_file(key):
    open(key["run"] + "/written", "w").write("here I am")
    return 1.0


@reaches(works_outside=False)
def write_anywhere(key):
    for folder in ("/tmp", "/dev/shm", "/var/tmp", "/run", ".", "/", os.path.dirname(__file__), "/proc"):
        try:
            open(folder + "/rollmesh-hostile", "w").write("x")
            return 1.0
        except OSError:
            pass
    raise OSError


@reaches(works_outside=True)
def append_to_ledger(key):
    os.write(os.open(key["ledger"], os.O_WRONLY | os.O_APPEND), b"forged")
    return 1.0


@reaches(works_outside=False)
def truncate_ledger(key):
    os.truncate(key["ledger"], 0)
    return 1.0


@reaches(works_outside=False)
def delete_ledger(key):
    os.unlink(key["ledger"])
    return 1.0


@reaches(works_outside=False)
def chmod_ledger(key):
    os.chmod(key["ledger"], 0o666)
    return 1.0


@reaches(works_outside=True)
def read_ledger(key):
    return 1.0 if open(key["ledger"]).read() else 0.0


@reaches(works_outside=True)
def read_ledger_beside_code(key):
    return 1.0 if open(key["beside"]).read() else 0.0


@reaches(works_outside=True)
def list_run_folder(key):
    return 1.0 if os.listdir(key["run"]) else 0.0


@reaches(works_outside=True)
def read_passwd(key):
    return 1.0 if open("/etc/passwd").read() else 0.0


@reaches(works_outside=True)
def read_proc(key):
    for name in ("/proc/self/environ", "/proc/1/environ", f"/proc/{os.getppid()}/cmdline", "/proc/self/maps"):
        try:
            open(name, "rb").read()
            return 1.0
        except OSError:
            pass
    raise OSError


@reaches(works_outside=True)
def connect(key):
    socket.create_connection(("127.0.0.1", key["port"]), 2).close()
    return 1.0


@reaches(works_outside=True)
def connect_unix(key):
    s = socket.socket(socket.AF_UNIX)
    s.connect(key["unix"])
    return 1.0


@reaches(works_outside=True)
def connect_abstract(key):
    s = socket.socket(socket.AF_UNIX)
    s.connect("\0" + key["abstract"])
    return 1.0


@reaches(works_outside=True)
def make_socketpair(key):
    socket.socketpair()
    return 1.0


@reaches(works_outside=True)
def fork(key):
    if os.fork() == 0:
        time.sleep(0.01)
        os._exit(0)
    return 1.0


@reaches(works_outside=True)
def thread(key):
    t = threading.Thread(target=lambda: None)
    t.start()
    t.join()
    return 1.0


@reaches(works_outside=False)
def execute(key):
    os.execv("/bin/true", ["/bin/true"])


@reaches(works_outside=True)
def spawn(key):
    import subprocess

    subprocess.run(["/bin/true"], check=True)
    return 1.0


@reaches(works_outside=True)
def memfd(key):
    os.memfd_create("x")
    return 1.0


@reaches(works_outside=False)
def namespaces(key):
    if ctypes.CDLL(None).unshare(0x10000000):
        raise OSError
    return 1.0


@reaches(works_outside=False)
def trace_parent(key):
    if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0):
        raise OSError
    return 1.0


@reaches(works_outside=False)
def raise_limit(key):
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (1, resource.RLIM_INFINITY))
    return 1.0


@reaches(works_outside=False)
def become_root(key):
    os.setuid(0)
    return 1.0


@reaches(works_outside=False)
def set_owner_signal(key):
    import fcntl

    fcntl.fcntl(3, fcntl.F_SETOWN, os.getppid())
    return 1.0


@reaches(works_outside=False, is_told=False)
def environment(key):
    return 1.0 if any(key["marker"] in name for name in os.environ) else 0.0


@reaches(works_outside=True, is_told=False)
def all_variables(key):
    return 1.0 if os.environ else 0.0


@reaches(works_outside=False, is_told=False)
def inherited_descriptors(key):
    found = 0
    for number in range(1024):
        if number == 3:
            continue
        try:
            os.fstat(number)
        except OSError:
            continue
        # 0, 1 and 2 are there and lead to /dev/null: writing to them reaches nobody.
        if number > 2 or os.fstat(number).st_rdev != os.makedev(1, 3):
            found += 1
        else:
            os.write(number, b"\xff" * 4096)
    return 1.0 if found else 0.0


@reaches(works_outside=False)
def kill_parent(key):
    os.kill(os.getppid(), signal.SIGKILL)
    return 1.0


@reaches(works_outside=False)
def kill_scorer(key):
    os.kill(key["scorer"], signal.SIGKILL)
    return 1.0


@reaches(works_outside=False)
def kill_daemon(key):
    os.kill(key["daemon"], signal.SIGKILL)
    return 1.0


@reaches(works_outside=False)
def kill_all(key):
    os.kill(-1, signal.SIGTERM)
    return 1.0


@reaches(works_outside=False)
def kill_group(key):
    os.killpg(key["scorer"], signal.SIGKILL)
    return 1.0


@reaches(works_outside=True)
def read_key(key):
    return 1.0 if open(key["secret_key"], "rb").read() else 0.0


@reaches(works_outside=True)
def read_file_of_another_user(key):
    """Open to everybody, by its mode."""
    return 1.0 if open(key["other_user"]).read() else 0.0


@reaches(works_outside=True)
def list_homes(key):
    return 1.0 if any(first_that_works(os.listdir, ("/home", "/root", "/etc", "/var", "/tmp"))) else 0.0


@reaches(works_outside=True)
def read_proc_of_any_process(key):
    pids = ["self", "thread-self", "1", "2", str(os.getppid()), str(key["scorer"]), str(key["daemon"])]
    names = ["environ", "cmdline", "maps", "mem", "stat", "status", "root", "cwd", "fd", "fd/0", "fd/3", "task"]
    return 1.0 if first_that_works(open_a_stranger, [f"/proc/{p}/{n}" for p in pids for n in names]) else 0.0


@reaches(works_outside=True)
def open_descriptors_by_name(key):
    names = [*(f"/dev/fd/{n}" for n in range(4)), "/proc/self/fd/3", "/dev/stdin", "/dev/tty", "/dev/null", "/sys"]
    return 1.0 if first_that_works(open_a_stranger, names) else 0.0


@reaches(works_outside=False)
def write_to_memory_of_parent(key):
    os.write(os.open(f"/proc/{os.getppid()}/mem", os.O_RDWR), b"x")
    return 1.0


@reaches(works_outside=False)
def read_memory_of_parent(key):
    """The zygote is this process's copy, so what lies at an address here lies at the same one there."""
    text = ctypes.create_string_buffer(16)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(text), 16)
    if LIBC.process_vm_readv(os.getppid(), vector, 1, vector, 1, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return 1.0


@reaches(works_outside=False)
def overwrite_memory_of_parent(key):
    text = ctypes.create_string_buffer(16)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(text), 16)
    if LIBC.process_vm_writev(os.getppid(), vector, 1, vector, 1, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return 1.0


@reaches(works_outside=True)
def send_udp(key):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", key["port"]))
    return 1.0


@reaches(works_outside=True)
def any_socket(key):
    """Every family and type: TCP, UDP, raw, unix, netlink, packets, crypto, virtual machines."""
    kinds = [(family, kind) for family in range(1, 46) for kind in (1, 2, 3, 5)]
    return 1.0 if first_that_works(lambda pair: socket.socket(*pair), kinds) else 0.0


@reaches(works_outside=True)
def resolve_a_name(key):
    socket.getaddrinfo("127.0.0.1", key["port"])
    socket.create_connection(("localhost", key["port"]), 2)
    return 1.0


@reaches(works_outside=True)
def leave_a_daemon(key):
    """Twice forked, in a session of its own: what would outlive a kill of the process group."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(0.1)
        os._exit(0)
    return 1.0


@reaches(works_outside=True)
def leave_a_thread(key):
    threading.Thread(target=time.sleep, args=(0.1,), daemon=True).start()
    return 1.0


@reaches(works_outside=True)
def fork_by_multiprocessing(key):
    import multiprocessing

    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    return 1.0


@reaches(works_outside=True)
def execute_from_memory(key):
    number = os.memfd_create("program")
    os.write(number, open("/bin/true", "rb").read())
    if os.fork() == 0:
        os.execve(number, ["true"], {})
    return 1.0 if os.wait()[1] == 0 else 0.0


@reaches(works_outside=True)
def share_memory_with_another_process(key):
    from multiprocessing import shared_memory

    block = shared_memory.SharedMemory(create=True, size=4096)
    block.close()
    block.unlink()
    return 1.0


@reaches(works_outside=False)
def kill_siblings(key):
    me, found = os.getpid(), 0
    for pid in [*range(1, 300), *range(-300, -1)]:
        if abs(pid) != me:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                found += 1
    if not found:
        raise PermissionError("none")
    return 1.0


@reaches(works_outside=False)
def signal_by_timer_or_owner(key):
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    return 1.0


@reaches(works_outside=True)
def leave_the_process_group(key):
    os.setsid()
    return 1.0


@reaches(works_outside=True)
def lower_its_oom_score(key):
    Path("/proc/self/oom_score_adj").write_text("0")
    return 1.0


@reaches(works_outside=True)
def write_through_a_mapped_file(key):
    """A shared mapping writes without ``write``."""
    with open(key["beside"], "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:1] = mapped[:1]
    return 1.0


@reaches(works_outside=False)
def make_code_writable(key):
    """The files that the zygote imports lazily, for the next answer."""
    os.chmod(os.__file__, 0o666)
    return 1.0


@reaches(works_outside=False)
def replace_a_module_on_disk(key):
    import sys

    folder = first_that_works(lambda path: open(path + "/rollmesh-hostile", "w") and [path], [p for p in sys.path if p])
    return 1.0 if folder else 0.0


def open_a_stranger(path):
    """Open what is not the answer's own result pipe, which it holds anyway, and which Landlock lets it open again."""
    number = os.open(path, os.O_RDONLY)
    try:
        is_own = os.path.samestat(os.fstat(number), os.fstat(3))
    except OSError:
        is_own = False
    if is_own:
        raise PermissionError("its own pipe")
    return path


def first_that_works(attempt, choices):
    """What the first attempt that raises nothing returns; the last refusal where every one is refused."""
    last = OSError("nothing to try")
    for choice in choices:
        try:
            return [attempt(choice)]
        except OSError as error:
            last = error
    raise last
