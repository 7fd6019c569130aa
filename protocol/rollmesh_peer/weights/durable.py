"""Files that are whole or not there: write, flush to the disk, rename, flush the folder.

A name appears only once everything under it has reached the disk, so a reader after a power cut finds the old file or
the new one and never half of one. A full or failing disk is a :class:`HostError` with one sentence; leftovers of a
write that was cut off end in :data:`UNFINISHED` and are removed by :func:`sweep`. Everything here blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError

UNFINISHED: Final = ".new"
COPY_BYTES: Final = 8 * limits.MIB
"""One read of a copy; large enough for full disk speed, small beside a model."""


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn the disk's refusals inside the block into a :class:`HostError` that says what could not be done."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HostError(f"{what}: the disk is full") from error
        if error.errno == errno.EFBIG:
            raise HostError(f"{what}: the file would be larger than this system allows") from error
        raise HostError(f"{what}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable; Windows has no such call and journals renames by itself."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Flush one file's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """``path`` holds exactly ``content``, or what it held before."""
    unfinished = path.with_name(path.name + UNFINISHED)
    with disk_errors(f"{path.name} cannot be written"):
        try:
            with unfinished.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            settle(unfinished, path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise


def settle(unfinished: Path, path: Path) -> None:
    """Give a file, whose content is already flushed, its name. Raises ``OSError``."""
    unfinished.replace(path)
    sync_folder(path.parent)


def take_file(source: Path, path: Path) -> None:
    """``path`` becomes another name of ``source`` where both are on one disk, else a copy; durable either way.

    Nobody may write into ``source`` afterwards.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    with disk_errors(f"{path.name} cannot be written"):
        unfinished.unlink(missing_ok=True)
        try:
            try:
                os.link(source, unfinished)
            except OSError:  # another disk, or one without links
                copy_bytes(source, unfinished)
            sync_file(unfinished)
            settle(unfinished, path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise


def remove_file(path: Path) -> bool:
    """``path`` is gone for good; False when it was not there."""
    with disk_errors(f"{path.name} cannot be removed"):
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        sync_folder(path.parent)
    return True


def copy_bytes(source: Path, target: Path, *, may_share: bool = True) -> None:
    """Copy a file's content into a new file, in the kernel where it can. Not flushed. Raises ``OSError``.

    Where ``may_share`` is True the two files may lie in the same blocks of the disk until one of them is changed.
    """
    with source.open("rb") as reading, target.open("wb") as writing:
        remaining = os.fstat(reading.fileno()).st_size
        while remaining and may_share:
            moved = _in_kernel(reading.fileno(), writing.fileno(), min(remaining, COPY_BYTES))
            if not moved:
                break
            remaining -= moved
        if remaining:
            reading.seek(0)
            writing.seek(0)
            shutil.copyfileobj(reading, writing, COPY_BYTES)


def _in_kernel(source: int, target: int, count: int) -> int:
    """Bytes moved without passing through this process; 0 where the kernel does not do that between these files."""
    if not hasattr(os, "copy_file_range"):
        return 0
    try:
        return os.copy_file_range(source, target, count)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM):
            return 0
        raise


def sweep(folder: Path) -> None:
    """Remove what writes that were cut off have left in ``folder``."""
    for leftover in folder.glob("*" + UNFINISHED):
        leftover.unlink(missing_ok=True)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write on the disk of ``folder``, beyond what is always left free."""
    with disk_errors(f"the disk of {folder} cannot be read"):
        return max(0, shutil.disk_usage(folder).free - limits.FREE_DISK_BYTES)
