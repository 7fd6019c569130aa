"""An image as a file that is mapped: its bytes, its way to the disk, and the names of what lies beside it.

An image in memory is just a file there. One on a disk has two companions, whose names follow from its own: the undo
log of a change that is under way, and a lock that the worker holds while it writes. Both ends of the worker's pipe use
this module, so it knows nothing of layouts and patches.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rollmesh_peer.weights import durable
from rollmesh_peer.weights.ram import locked
from rollmesh_protocol.errors import HostError

_UNDO: Final = ".undo"
_LOCK: Final = ".lock"


def undo_path(image: Path) -> Path:
    """Where the undo log of ``image`` lies while a change is under way."""
    return image.with_name(image.name + _UNDO)


def unnamed_path(image: Path) -> Path:
    """Where ``image`` is made before it has its name; swept away at a start."""
    return image.with_name(image.name + durable.UNFINISHED)


def kept_names(image: str) -> tuple[str, ...]:
    """What must survive a restart for an image on a disk of this name."""
    return image, image + _UNDO, image + _LOCK


@contextlib.contextmanager
def written_alone(image: Path) -> Iterator[None]:
    """No other process changes ``image`` inside the block.

    A worker whose daemon was killed may hang in a flush while the next daemon's worker starts: that one waits here
    until the other is gone. HostError when the lock cannot be had.
    """
    with contextlib.ExitStack() as stack:
        with durable.disk_errors(f"{image} cannot be locked"):
            stack.enter_context(locked(image.with_name(image.name + _LOCK), wait=True))
        yield


@contextlib.contextmanager
def mapped(path: Path, *, length: int | None = None, writable: bool = False) -> Iterator[memoryview]:
    """A file's bytes, shared with everybody else who maps it. HostError unless it has ``length`` bytes, and some."""
    with durable.disk_errors(f"{path} cannot be read"), path.open("r+b" if writable else "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0 or length not in (None, size):
            raise HostError(f"{path} has {size} bytes where {length} are expected")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    view = memoryview(mapping)
    try:
        yield view
    finally:
        # Arrays in the frames of an exception on its way may still look at it; then the last of them closes it.
        with contextlib.suppress(BufferError):
            view.release()
            mapping.close()


def flush(path: Path, view: memoryview) -> None:
    """Make durable what was written into ``view``, a mapping of ``path``. HostError: the disk."""
    with durable.disk_errors(f"{path} cannot be flushed"):
        assert isinstance(view.obj, mmap.mmap)
        view.obj.flush()
        durable.sync_file(path)


def copy(source: Path, target: Path, *, may_share: bool) -> None:
    """``target`` becomes a new file with the content of ``source``. HostError: the disk.

    With ``may_share`` the file system may let both share their blocks until one is written to. Not for images that
    are changed in place on a disk: a full disk would then end a write through a mapping, which is SIGBUS.
    """
    with durable.disk_errors(f"{source} cannot be copied to {target}"):
        target.unlink(missing_ok=True)  # never truncated: somebody's mapping of it would end in SIGBUS
        durable.copy_bytes(source, target, may_share=may_share)
