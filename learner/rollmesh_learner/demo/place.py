"""The demo's folder: empty at the beginning, and in use by one demo at a time.

Invariants: only what a demo made is ever removed (the lock file tells such a folder from any other), and nothing is
removed while a process of an earlier demo lives. For that the lock is handed on to every process: the system frees it
when the last of them is gone, also when the demo itself was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rollmesh_learner.demo.plan import Plan
from rollmesh_peer.folders import private_folder
from rollmesh_protocol.errors import HostError, UsageError

LOCK: Final = ".demo.lock"
NEEDED_BYTES: Final = 8 * 10**9
"""At its height the demo has three checkpoints (two kept and the one being written) of 1.9 GB, and five images of the
weights of 0.27 GB."""


@contextlib.contextmanager
def fresh_folder(plan: Plan, *, needed_bytes: int = NEEDED_BYTES) -> Iterator[int]:
    """An empty ``plan.out`` for the length of the block; gives the descriptor that holds its lock.

    Of an earlier demo only the converted base model is kept.

    Raises:
        UsageError: the folder holds what no demo made.
        HostError: a demo is at work in it, the disk is too full, or the folder cannot be used.
    """
    out = plan.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        strangers = sorted(entry.name for entry in out.iterdir())
        if strangers and LOCK not in strangers:
            raise UsageError(f"{out} holds {strangers[0]}, which no demo made: choose another folder with --out")
        lock = os.open(out / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HostError(f"the folder {out} cannot be used: {error.strerror}") from error
    try:
        _take(lock, out)
        _clear(plan)
        _check_room(out, needed_bytes=needed_bytes)
        private_folder(plan.home)
        yield lock
    finally:
        os.close(lock)


def _take(lock: int, out: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise HostError(
            f"a demo is at work in {out}, or its processes are still ending: wait for it, or choose another folder "
            "with --out"
        ) from error


def _clear(plan: Plan) -> None:
    for path in plan.products:
        if path == plan.home:
            for inner in path.iterdir() if path.is_dir() and not path.is_symlink() else ():
                if inner != plan.models:
                    _remove(inner)
        else:
            _remove(path)


def _remove(path: Path) -> None:
    """Whatever ``path`` is; of a link only the link."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise HostError(f"{path} of an earlier demo cannot be removed: {error.strerror}") from error


def _check_room(out: Path, *, needed_bytes: int) -> None:
    free = shutil.disk_usage(out).free
    if free < needed_bytes:
        raise HostError(
            f"the disk under {out} has {free / 1e9:.1f} GB free and the demo needs {needed_bytes / 1e9:.0f} GB: "
            "choose another folder with --out"
        )
