"""The place in memory for images: private, reclaimed when its owner was killed, and refused when it would not fit.

Working copies change almost every page with every version, which would wear a disk out; so they lie in a folder of a
RAM-backed file system, ``<ram folder>/rollmesh-<user>/<digest of the data folder>``, mode 0700. A place belongs to the
process that holds its lock; places whose lock nobody holds are what killed processes left, and go at the next start.
Where memory does not suffice, a folder beside the data is used instead, and said so. There, and only there, files that
the owner names survive a restart, so that they need not be written again; nothing that must survive one lies here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from rollmesh_peer.folders import private_folder
from rollmesh_peer.free_memory import free_bytes
from rollmesh_peer.weights import durable
from rollmesh_protocol.errors import HostError
from rollmesh_protocol.limits import GIB, MIB

log = logging.getLogger("rollmesh.weights")

SPARE_BYTES: Final = 256 * MIB
"""Memory that is left to the rest of the machine beside the images."""
DISK_FOLDER: Final = "working"
_LOCK: Final = "lock"


@dataclass(frozen=True)
class Place:
    """A private folder for images. ``is_memory`` is False where it is on a disk after all."""

    folder: Path
    is_memory: bool


@contextlib.contextmanager
def open_place(
    data_folder: Path, *, ram_folder: Path | None, needed_bytes: int, kept: Collection[str] = ()
) -> Iterator[Place]:
    """An empty place for images of ``needed_bytes`` together; it and all in it is gone when the block is left.

    On a disk, files whose names are in ``kept`` are the exception: they are found again by the next owner, until one
    has memory. ``ram_folder`` None asks for the disk. Blocks for moments (long only where a killed process left much).

    Raises:
        HostError: neither memory nor disk has the room, with the numbers; or another process uses the place.
    """
    with contextlib.ExitStack() as stack:
        reasons = []
        folder = data_folder / DISK_FOLDER
        if ram_folder is not None:
            found = _open_in_memory(stack, data_folder, ram_folder=ram_folder, needed_bytes=needed_bytes)
            if isinstance(found, Place):
                _discard(folder)
                yield found
                return
            reasons.append(found)
            log.warning("the weights are kept on disk instead of in memory: %s", found)
        stack.enter_context(_owned(private_folder(folder), kept=kept))
        free = durable.free_bytes(folder) + sum(file.stat().st_size for file in folder.iterdir())
        if free < needed_bytes:
            reasons.append(f"{folder} has {_gib(free)} free")
            raise HostError(f"there is no room for weights of {_gib(needed_bytes)}: {'; '.join(reasons)}")
        yield Place(folder, is_memory=False)


def place_in_memory(data_folder: Path, *, ram_folder: Path) -> Path:
    """Where the place of ``data_folder`` lies, if it is in memory. Nothing is made."""
    return _home(ram_folder) / blake3(os.fsencode(data_folder.resolve())).hexdigest(16)


def memory_left(ram_folder: Path) -> int:
    """Bytes that may still be put into ``ram_folder``: by the file system, the machine and the container."""
    room = shutil.disk_usage(ram_folder).free
    free = free_bytes()
    return max(0, (room if free is None else min(room, free)) - SPARE_BYTES)


def _home(ram_folder: Path) -> Path:
    return ram_folder / f"rollmesh-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


def _open_in_memory(
    stack: contextlib.ExitStack, data_folder: Path, *, ram_folder: Path, needed_bytes: int
) -> Place | str:
    """The place, or the reason why there is none in memory."""
    if not ram_folder.is_dir():
        return f"there is no folder {ram_folder}"
    try:
        home = private_folder(_home(ram_folder))
    except HostError as error:  # somebody else made it: memory is a convenience, not worth a dispute
        return error.detail
    try:
        with locked(home / _LOCK, wait=True):
            _reclaim(home)
            left = memory_left(ram_folder)
            if left < needed_bytes:
                return f"{_gib(needed_bytes)} are needed in {ram_folder} and {_gib(left)} are free"
            folder = private_folder(place_in_memory(data_folder, ram_folder=ram_folder))
            stack.enter_context(_owned(folder))
    except OSError as error:
        return f"{ram_folder} cannot be used: {error.strerror}"
    return Place(folder, is_memory=True)


def _reclaim(home: Path) -> None:
    for place in home.iterdir():
        if place.is_dir() and not place.is_symlink() and _discard(place):
            log.info("reclaimed the memory of a process that is gone: %s", place)


def _discard(place: Path) -> bool:
    """Remove a place that nobody owns; False where there is none."""
    with contextlib.suppress(HostError, FileNotFoundError), locked(place / _LOCK, wait=False):
        shutil.rmtree(place, ignore_errors=True)
        return True
    return False


@contextlib.contextmanager
def _owned(folder: Path, *, kept: Collection[str] = ()) -> Iterator[None]:
    """Hold the folder's lock, find it empty but for ``kept``, and remove it in the end, or all but ``kept``."""
    with locked(folder / _LOCK, wait=False):
        _empty(folder, kept={_LOCK, *kept})
        try:
            yield
        finally:
            if any((folder / name).exists() for name in kept):
                _empty(folder, kept={_LOCK, *kept})
            else:
                shutil.rmtree(folder, ignore_errors=True)


def _empty(folder: Path, *, kept: Collection[str]) -> None:
    for leftover in folder.iterdir():
        if leftover.name not in kept:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold a lock that ends with this process, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows: the key's lock already keeps a second daemon away
        yield
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise HostError(f"another process uses {path.parent}") from error
        yield
    finally:
        os.close(descriptor)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
