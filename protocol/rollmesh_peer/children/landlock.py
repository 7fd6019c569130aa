"""Landlock: from a call on, this process and its children read some folders, and write, connect and signal nothing.

The kernel's own file permissions stay in force; Landlock only takes away, cannot be undone, and works without
privileges and inside containers (Linux 5.13 and later; TCP since 6.7, signals and abstract sockets since 6.12).
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable
from typing import Final

from rollmesh_peer.children import linux

READ_FILE: Final = 1 << 2
READ_DIR: Final = 1 << 3
RIGHTS_BY_ABI: Final = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All file-system rights known since an ABI version; 4 and later than 5 added none."""
NET_RIGHTS: Final = 0b11
"""Binding and connecting TCP (ABI 4)."""
SCOPES: Final = 0b11
"""Abstract unix sockets and signals of processes outside (ABI 6)."""
CREATE_RULESET_VERSION: Final = 1
RULE_PATH_BENEATH: Final = 1


def abi() -> int:
    """The kernel's version of Landlock. Raises ``OSError`` where there is none."""
    return linux.syscall(linux.SYS_LANDLOCK_CREATE_RULESET, None, 0, CREATE_RULESET_VERSION)


def restrict(readable: Iterable[str]) -> int:
    """Allow reading below ``readable`` (files and folders that exist) and nothing else; returns the ABI version.

    Needs ``PR_SET_NO_NEW_PRIVS``. Raises ``OSError`` where there is no Landlock.
    """
    version = abi()
    _enforce(_rights(version), version, readable)
    return version


def separate() -> None:
    """One more layer over :func:`restrict`: no signals to, and no tracing of, the process that called that one."""
    version = abi()
    _enforce(_rights(version) & ~(READ_FILE | READ_DIR), version, ())


def _rights(version: int) -> int:
    return RIGHTS_BY_ABI[max(known for known in RIGHTS_BY_ABI if known <= version)]


def _enforce(rights: int, version: int, readable: Iterable[str]) -> None:
    """Put a ruleset on this thread that refuses ``rights``, except reading below ``readable``."""
    fields = 1 + (version >= 4) + (version >= 6)
    attributes = struct.pack(f"<{fields}Q", *(rights, NET_RIGHTS, SCOPES)[:fields])
    ruleset = linux.syscall(linux.SYS_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path in readable:
            _allow(ruleset, path)
        linux.syscall(linux.SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        rule = struct.pack("<Qi", READ_FILE | READ_DIR if is_folder else READ_FILE, descriptor)
        linux.syscall(linux.SYS_LANDLOCK_ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
