"""The filter's bytes, run by an interpreter of the BPF instructions that it uses."""

from __future__ import annotations

import struct

import pytest

from rollmesh_peer.children import seccomp
from rollmesh_peer.children.seccomp import AARCH64, ALLOW, KILL, REFUSE, X86_64, Architecture

MACHINES = [X86_64, AARCH64]
REFUSED_ON_X86_64 = {
    "socket": 41, "connect": 42, "sendto": 44, "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "kill": 62,
    "truncate": 76, "rename": 82, "mkdir": 83, "creat": 85, "link": 86, "unlink": 87, "symlink": 88, "chmod": 90,
    "ptrace": 101, "setuid": 105, "prctl": 157, "chroot": 161, "mount": 165, "tkill": 200, "tgkill": 234,
    "unshare": 272,
    "splice": 275, "process_vm_readv": 310, "setns": 308, "memfd_create": 319, "bpf": 321, "execveat": 322,
    "userfaultfd": 323, "pidfd_send_signal": 424, "io_uring_setup": 425, "clone3": 435, "openat2": 437,
    "seccomp": 317, "setrlimit": 160, "shmget": 29, "socketpair": 53, "ftruncate": 77, "setpgid": 109, "nanosleep": 35,
}  # fmt: skip


def run(program: bytes, *, nr: int, arch: int, arguments: tuple[int, ...] = ()) -> int:
    """The verdict on one system call."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<iIQ6Q", nr if nr < 2**31 else nr - 2**32, arch, 0, *padded)
    code = list(struct.iter_unpack("<HBBI", program))
    accumulator, at = 0, 0
    for _ in range(len(code) + 1):
        operation, if_true, if_false, value = code[at]
        at += 1
        if operation == 0x06:
            return int(value)
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
            continue
        holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[operation]
        at += if_true if holds else if_false
    raise AssertionError("the program does not end")


def verdict(machine: Architecture, nr: int, *arguments: int) -> int:
    return run(seccomp.program(machine), nr=nr, arch=machine.audit, arguments=arguments)


@pytest.mark.parametrize("machine", MACHINES)
def test_exactly_the_listed_calls_pass(machine: Architecture) -> None:
    special = {number for number, _ in machine.opens} | {machine.fcntl, machine.ioctl, machine.prlimit64}
    assert not special & set(machine.plain)
    assert len(set(machine.plain)) == len(machine.plain)
    for nr in range(600):
        if nr not in special:
            assert verdict(machine, nr) == (ALLOW if nr in machine.plain else REFUSE), nr


@pytest.mark.parametrize("name", REFUSED_ON_X86_64)
def test_dangerous_calls_are_refused(name: str) -> None:
    assert verdict(X86_64, REFUSED_ON_X86_64[name]) == REFUSE


@pytest.mark.parametrize("machine", MACHINES)
def test_files_open_for_reading_only(machine: Architecture) -> None:
    for number, index in machine.opens:
        before = (0,) * index
        for flags in (0, 0o2000000, 0o200000, 0o100000, 0o4000):  # O_RDONLY and with CLOEXEC, DIRECTORY, LARGEFILE...
            assert verdict(machine, number, *before, flags) == ALLOW
        for flags in (0o1, 0o2, 0o3, 0o100, 0o101, 0o1000, 0o2001, 0o20200000, 0o2000000 | 0o1):
            assert verdict(machine, number, *before, flags) == REFUSE
            assert verdict(machine, number, *before, flags | 1 << 40) == REFUSE


@pytest.mark.parametrize("machine", MACHINES)
def test_fcntl_and_ioctl_are_limited(machine: Architecture) -> None:
    for command in range(1100):
        assert verdict(machine, machine.fcntl, 3, command) == (ALLOW if command in (1, 2, 3, 1030) else REFUSE)
    for request in (0x5401, 0x5450, 0x5451):
        assert verdict(machine, machine.ioctl, 3, request) == ALLOW
    for request in (0x5412, 0x541C, 0x5402, 0, 0x8914):  # TIOCSTI, TIOCLINUX, TCSETS, SIOCSIFFLAGS
        assert verdict(machine, machine.ioctl, 3, request) == REFUSE


@pytest.mark.parametrize("machine", MACHINES)
def test_limits_may_be_read_and_not_set(machine: Architecture) -> None:
    assert verdict(machine, machine.prlimit64, 0, 7, 0, 1234) == ALLOW
    assert verdict(machine, machine.prlimit64, 0, 7, 1234, 0) == REFUSE
    assert verdict(machine, machine.prlimit64, 0, 7, 1 << 32, 0) == REFUSE


def test_other_architectures_die_and_x32_is_refused() -> None:
    program = seccomp.program(X86_64)
    assert run(program, nr=0, arch=0x40000003) == KILL  # i386, where numbers mean other calls
    assert run(program, nr=0, arch=AARCH64.audit) == KILL
    for nr in (*X86_64.plain, *(number for number, _ in X86_64.opens)):
        assert run(program, nr=nr | 0x40000000, arch=X86_64.audit) == REFUSE
    assert run(program, nr=2**32 - 1, arch=X86_64.audit) == REFUSE
