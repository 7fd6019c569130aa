"""The system calls that an answer's process may make, as a seccomp filter written by hand.

A list of what is allowed: reading files, memory, clocks, its own signals, writing to descriptors it holds, and leaving.
Everything else fails with ``EPERM``: sockets, new processes and threads, exec, ptrace, signals to others, opening
for writing, changing limits, namespaces, io_uring, bpf. So a new system call of a newer kernel is refused too.

:func:`program` is pure (its tests interpret the bytes); :func:`install` cannot be undone and is inherited.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from dataclasses import dataclass
from typing import Final

from rollmesh_peer.children import linux

# struct seccomp_data { int nr; u32 arch; u64 instruction_pointer; u64 args[6]; }, little-endian machines only
_NR: Final = 0
_ARCH: Final = 4
_ARGS: Final = 16

_LD_ABS: Final = 0x20
_JEQ: Final = 0x15
_JGE: Final = 0x35
_JSET: Final = 0x45
_RET: Final = 0x06

ALLOW: Final = 0x7FFF0000
KILL: Final = 0x80000000
REFUSE: Final = 0x00050000 | errno.EPERM

WRITE_FLAGS: Final = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000 | 0o20000000
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND and the bit of O_TMPFILE; the same on both architectures."""
FCNTL_COMMANDS: Final = (1, 2, 3, 1030)
"""F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC. Not F_SETOWN and F_SETSIG: with O_ASYNC they send signals."""
IOCTL_REQUESTS: Final = (0x5401, 0x5450, 0x5451)
"""TCGETS (is it a terminal?), FIONCLEX and FIOCLEX, which Python's ``open`` makes."""
X32_BIT: Final = 0x40000000


@dataclass(frozen=True)
class Architecture:
    """System call numbers of one machine: plain ones are allowed whatever their arguments."""

    audit: int
    plain: tuple[int, ...]
    opens: tuple[tuple[int, int], ...]
    """(system call, index of its flags argument)"""
    fcntl: int
    ioctl: int
    prlimit64: int


X86_64: Final = Architecture(
    audit=0xC000003E,
    plain=(
        0, 1, 19, 20, 17,  # read write readv writev pread64
        3, 5, 262, 4, 6, 332, 8,  # close fstat newfstatat stat lstat statx lseek
        21, 269, 439, 89, 267, 217, 79,  # access faccessat faccessat2 readlink readlinkat getdents64 getcwd
        9, 11, 25, 10, 12, 28,  # mmap munmap mremap mprotect brk madvise
        202, 273, 334, 24, 204,  # futex set_robust_list rseq sched_yield sched_getaffinity
        13, 14, 15, 131,  # rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack
        228, 229, 96, 201, 318,  # clock_gettime clock_getres gettimeofday time getrandom
        39, 110, 186, 102, 107, 104, 108,  # getpid getppid gettid getuid geteuid getgid getegid
        98, 100, 63, 99, 97,  # getrusage times uname sysinfo getrlimit
        60, 231, 219, 7, 271,  # exit exit_group restart_syscall poll ppoll
    ),
    opens=((2, 1), (257, 2)),  # open openat
    fcntl=72,
    ioctl=16,
    prlimit64=302,
)  # fmt: skip

AARCH64: Final = Architecture(
    audit=0xC00000B7,
    plain=(
        63, 64, 65, 66, 67,  # read write readv writev pread64
        57, 80, 79, 291, 62,  # close fstat newfstatat statx lseek
        48, 439, 78, 61, 17,  # faccessat faccessat2 readlinkat getdents64 getcwd
        222, 215, 216, 226, 214, 233,  # mmap munmap mremap mprotect brk madvise
        98, 99, 293, 124, 123,  # futex set_robust_list rseq sched_yield sched_getaffinity
        134, 135, 139, 132,  # rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack
        113, 114, 169, 278,  # clock_gettime clock_getres gettimeofday getrandom
        172, 173, 178, 174, 175, 176, 177,  # getpid getppid gettid getuid geteuid getgid getegid
        165, 153, 160, 179, 163,  # getrusage times uname sysinfo getrlimit
        93, 94, 128, 73,  # exit exit_group restart_syscall ppoll
    ),
    opens=((56, 2),),  # openat
    fcntl=25,
    ioctl=29,
    prlimit64=261,
)  # fmt: skip

MACHINES: Final = {"x86_64": X86_64, "aarch64": AARCH64}


def program(machine: Architecture) -> bytes:
    """The filter as an array of ``struct sock_filter``."""
    code: list[tuple[int, int, int, int]] = [
        (_LD_ABS, 0, 0, _ARCH),
        (_JEQ, 1, 0, machine.audit),
        (_RET, 0, 0, KILL),
        (_LD_ABS, 0, 0, _NR),
    ]
    if machine is X86_64:
        code += [(_JGE, 0, 1, X32_BIT), (_RET, 0, 0, REFUSE)]
    for number, index in machine.opens:
        code += _only(number, [_argument(index), (_JSET, 0, 1, WRITE_FLAGS), (_RET, 0, 0, REFUSE)])
    for number, values in ((machine.fcntl, FCNTL_COMMANDS), (machine.ioctl, IOCTL_REQUESTS)):
        tests = [(_JEQ, len(values) - place, 0, value) for place, value in enumerate(values)]
        code += _only(number, [_argument(1), *tests, (_RET, 0, 0, REFUSE)])
    # prlimit64 may read limits (a null pointer to new ones), never set them: both halves of the pointer are tested.
    null = [_argument(2), (_JEQ, 1, 0, 0), (_RET, 0, 0, REFUSE), _argument(2, high=True), (_JEQ, 1, 0, 0)]
    code += _only(machine.prlimit64, [*null, (_RET, 0, 0, REFUSE)])
    count = len(machine.plain)
    code += [(_JEQ, count - place, 0, number) for place, number in enumerate(machine.plain)]
    code += [(_RET, 0, 0, REFUSE), (_RET, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def install() -> None:
    """Put the filter on this process for ever. Raises ``OSError`` where the kernel or the machine has none."""
    machine = MACHINES.get(platform.machine())
    if machine is None:
        raise OSError(errno.ENOSYS, f"no list of system calls for {platform.machine()}")
    code = program(machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    holder = ctypes.create_string_buffer(header, len(header))
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    zero = ctypes.c_ulong(0)
    mode = ctypes.c_ulong(linux.SECCOMP_MODE_FILTER)
    linux.check(linux.libc().prctl(linux.PR_SET_SECCOMP, mode, holder, zero, zero))


def _argument(index: int, *, high: bool = False) -> tuple[int, int, int, int]:
    return (_LD_ABS, 0, 0, _ARGS + 8 * index + (4 if high else 0))


def _only(number: int, block: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """For system call ``number``: run ``block`` (which refuses, or falls through) and allow. Others pass over it."""
    return [(_JEQ, 0, len(block) + 1, number), *block, (_RET, 0, 0, ALLOW)]
