"""The few Linux calls that Python's standard library lacks, through ctypes; each raises ``OSError`` when refused.

Not for daemons: they confine the scorer's processes only. System call numbers here are the ones above 423, which are
the same on every architecture. Elsewhere than on Linux every call raises ``OSError`` (``ENOSYS``).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from typing import Final

IS_LINUX: Final = sys.platform.startswith("linux")

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_RDONLY: Final = 0x1
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
MNT_DETACH: Final = 2

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_SECCOMP: Final = 22
PR_SET_NO_NEW_PRIVS: Final = 38
SECCOMP_MODE_FILTER: Final = 2

SYS_CLOSE_RANGE: Final = 436
SYS_MOUNT_SETATTR: Final = 442
SYS_LANDLOCK_CREATE_RULESET: Final = 444
SYS_LANDLOCK_ADD_RULE: Final = 445
SYS_LANDLOCK_RESTRICT_SELF: Final = 446

AT_FDCWD: Final = -100
AT_RECURSIVE: Final = 0x8000
MOUNT_ATTR_RDONLY: Final = 0x1
MOUNT_ATTR_NOSUID: Final = 0x2
MOUNT_ATTR_NODEV: Final = 0x4

CAPABILITY_VERSION_3: Final = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True) if IS_LINUX else None


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def libc() -> ctypes.CDLL:
    """The C library. Raises ``OSError`` elsewhere than on Linux."""
    if _libc is None:
        raise OSError(errno.ENOSYS, "only Linux has this call")
    return _libc


def check(result: int) -> int:
    """``result`` of a call, or ``OSError`` with its ``errno``."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def syscall(number: int, *arguments: int | bytes | None) -> int:
    """A raw system call; integers are passed as longs."""
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return check(libc().syscall(ctypes.c_long(number), *wide))


def prctl(option: int, argument: int) -> None:
    """``prctl(2)`` with one number."""
    check(libc().prctl(option, ctypes.c_ulong(argument), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def unshare(flags: int) -> None:
    """``unshare(2)``: new namespaces for this process (and, for ``CLONE_NEWPID``, for its future children)."""
    check(libc().unshare(flags))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """``mount(2)``."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    check(libc().mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]))


def unmount(target: str) -> None:
    """``umount2(2)``, detached."""
    check(libc().umount2(os.fsencode(target), MNT_DETACH))


def make_read_only(target: str, *, recursive: bool) -> None:
    """Make a mount read-only, without set-uid programs and devices; with ``recursive``, all mounts below it too."""
    attributes = bytes(_MountAttr(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0))
    flags = AT_RECURSIVE if recursive else 0
    syscall(SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), flags, attributes, len(attributes))


def drop_capabilities() -> None:
    """Give up every capability of this thread; a set-uid to another user than root has done so already."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    check(libc().capset(header, (ctypes.c_uint32 * 6)()))


def close_from(lowest: int) -> None:
    """Close every descriptor from ``lowest`` on."""
    try:
        syscall(SYS_CLOSE_RANGE, lowest, 0x7FFFFFFF, 0)
    except OSError:
        os.closerange(lowest, os.sysconf("SC_OPEN_MAX"))
