"""Where a user's keys, runs, models and control sockets lie.

Everything of ours is under one private folder: ``$ROLLMESH_HOME``, else ``$XDG_DATA_HOME/rollmesh``, else
``~/.local/share/rollmesh``. Folders are made with mode 0700, and one that somebody else owns or may write into is
refused: keys lie in them, and a control socket obeys whoever can open it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from rollmesh_protocol.errors import HostError

Role = Literal["node", "learner"]

PRIVATE: Final = 0o700
MAX_CONTROL_FOLDER_BYTES: Final = 70
"""macOS takes 103 bytes for the path of a Unix socket, Linux 107, and our file names there have up to 26."""


def private_folder(path: Path) -> Path:
    """Make ``path`` (and its parents) as a folder that only this user can enter, and return it.

    A folder that is there already keeps its mode.

    Raises:
        HostError: it cannot be made, belongs to another user, or others may write into it.
    """
    try:
        path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise HostError(f"the folder {path} cannot be used: {error.strerror}") from error
    if hasattr(os, "getuid"):
        if found.st_uid != os.getuid():
            raise HostError(f"the folder {path} belongs to another user: choose another one with ROLLMESH_HOME")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise HostError(f"others may write into the folder {path}: run chmod go-w {path}")
    return path


def data_folder(environ: Mapping[str, str] | None = None) -> Path:
    """This user's private folder of everything that must outlive a reboot: keys, ledgers, weights."""
    return private_folder(_home(os.environ if environ is None else environ))


def run_folder(name: str, *, environ: Mapping[str, str] | None = None) -> Path:
    """The learner's state of the run called ``name``: key, ledger, checkpoints, published chunks."""
    return private_folder(data_folder(environ) / "runs" / name)


def node_folder(*, environ: Mapping[str, str] | None = None) -> Path:
    """A node's state where its config names no other place: key, known peers, base models, chunks."""
    return private_folder(data_folder(environ) / "node")


def models_folder(*, environ: Mapping[str, str] | None = None) -> Path:
    """Base models in the form in which children load them; made once, shared by the user's runs."""
    return private_folder(data_folder(environ) / "models")


def control_socket(role: Role, folder: Path, *, environ: Mapping[str, str] | None = None) -> Path:
    """Where the daemon that keeps its state in ``folder`` listens for its owner; the folder around it is made."""
    data_folder(environ)
    around = _control_folder(environ)
    private_folder(around.parent)
    return private_folder(around) / f"{role}-{_digest(folder.resolve())}.sock"


def control_sockets(*, environ: Mapping[str, str] | None = None) -> list[Path]:
    """The control sockets of this user's daemons, newest first. Some may be left over from daemons that died.

    Nothing is made and nothing is owned here, so root may look into the folder of a service.
    """
    found = [path for path in _control_folder(environ).glob("*.sock") if path.is_socket()]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _home(environ: Mapping[str, str]) -> Path:
    chosen = environ.get("ROLLMESH_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    shared = environ.get("XDG_DATA_HOME")
    base = Path(shared) if shared and Path(shared).is_absolute() else Path.home() / ".local" / "share"
    return base / "rollmesh"


def _control_folder(environ: Mapping[str, str] | None) -> Path:
    """Inside the data folder, so that ``rollmesh status`` finds it; elsewhere if that path is too long for a socket."""
    folder = _home(os.environ if environ is None else environ) / "control"
    if len(os.fsencode(folder)) > MAX_CONTROL_FOLDER_BYTES:
        user = os.getuid() if hasattr(os, "getuid") else "user"
        return Path(tempfile.gettempdir()) / f"rollmesh-{user}" / _digest(folder)
    return folder


def _digest(path: Path) -> str:
    return hashlib.blake2b(os.fsencode(path), digest_size=6).hexdigest()
