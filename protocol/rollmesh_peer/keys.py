"""The key file of a peer: 32 secret bytes, mode 0600, locked while a daemon speaks with them.

The invariants: a key file appears whole or not at all, is never overwritten, is readable by its owner only, and serves
one daemon at a time (two daemons with one key would be one peer in two places). What is done with the key is not
decided here; see :class:`rollmesh_protocol.identity.Identity`.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from blake3 import blake3

from rollmesh_peer.folders import private_folder
from rollmesh_peer.logging_setup import event
from rollmesh_protocol.errors import HostError, UsageError
from rollmesh_protocol.identity import SEED_BYTES, Identity

try:
    import fcntl
except ImportError:  # pragma: no cover - native Windows has no flock; it comes with its own issue
    fcntl = None  # type: ignore[assignment]

KEY_MODE: Final = 0o600
EXPORT_PREFIX: Final = "rollmesh-key-1:"
"""Begins an exported key, so that nobody takes it for something harmless."""
CHECK_BYTES: Final = 4
"""Bytes of blake3 behind the seed in an export: a mistyped letter is noticed."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def hold_key(path: Path) -> Iterator[Identity]:
    """The identity in ``path``, made if there is none, locked against a second daemon until the block ends.

    Raises:
        HostError: another daemon uses the key, or the file cannot be made, read or trusted.
    """
    create_key(path)
    with _opened(path) as descriptor:
        _lock(descriptor, path)
        yield _read(descriptor, path)


def load_key(path: Path) -> Identity:
    """The identity in ``path``, whether or not a daemon is using it. Nothing is made.

    Raises:
        HostError: there is no key file, or it cannot be read or trusted.
    """
    with _opened(path) as descriptor:
        return _read(descriptor, path)


def create_key(path: Path) -> bool:
    """Make a key file from the system's randomness; False when there was one already."""
    return _write_new(path, secrets.token_bytes(SEED_BYTES))


def export_key(path: Path) -> str:
    """One line of text that holds the secret key; whoever has it is this peer."""
    seed = load_key(path).seed
    return EXPORT_PREFIX + base64.urlsafe_b64encode(seed + _check(seed)).decode().rstrip("=")


def import_key(path: Path, *, text: str) -> Identity:
    """Write the key of an exported line to ``path``, which must not hold another key.

    Raises:
        UsageError: the text is no exported key, or was mistyped.
        HostError: another key is there already.
    """
    identity = Identity(_parse_export(text))
    if not _write_new(path, identity.seed):
        present = load_key(path)
        if present.peer != identity.peer:
            raise HostError(
                f"{path} already holds the key of {present.peer}: export it if you want to keep it, move the file "
                "away, and import again"
            )
    return identity


def _parse_export(text: str) -> bytes:
    line = text.strip()
    if not line.startswith(EXPORT_PREFIX):
        raise UsageError(f"this is no exported key: it does not begin with {EXPORT_PREFIX!r}")
    body = line.removeprefix(EXPORT_PREFIX)
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError("the exported key holds letters that do not belong there: copy the whole line") from error
    seed, check = raw[:SEED_BYTES], raw[SEED_BYTES:]
    if len(seed) != SEED_BYTES or check != _check(seed):
        raise UsageError("the exported key is incomplete or mistyped: copy the whole line")
    return seed


def _check(seed: bytes) -> bytes:
    return blake3(b"rollmesh/key" + seed).digest(CHECK_BYTES)


def _write_new(path: Path, seed: bytes) -> bool:
    """Put ``seed`` at ``path`` whole and durable, unless there is a file already."""
    private_folder(path.parent)
    draft = path.parent / f".{path.name}.{secrets.token_hex(6)}"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, KEY_MODE)
        try:
            os.write(descriptor, seed)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            os.link(draft, path)  # unlike a rename, never replaces a key that another process made meanwhile
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        _sync_folder(path.parent)
    except OSError as error:
        raise HostError(f"the key file {path} cannot be written: {error.strerror}") from error
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of the key file, once the file is known to be ours alone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError as error:
        raise HostError(f"there is no key file {path} yet: it is made when the daemon first runs") from error
    except OSError as error:
        raise HostError(f"the key file {path} cannot be read: {error.strerror}") from error
    try:
        _demand_private(descriptor, path)
        yield descriptor
    finally:
        os.close(descriptor)


def _demand_private(descriptor: int, path: Path) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise HostError(f"{path} is not a key file")
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        raise HostError(f"the key file {path} belongs to another user, who could speak as this peer: use your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        try:
            os.fchmod(descriptor, KEY_MODE)
        except OSError as error:
            raise HostError(
                f"other users can read the key file {path}, and that cannot be changed: {error.strerror}"
            ) from error
        event(
            _log,
            "others could read the key file; it is private now. If somebody else uses this machine, make a new key",
            level=logging.WARNING,
            path=str(path),
        )


def _lock(descriptor: int, path: Path) -> None:
    if fcntl is None:  # pragma: no cover
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise HostError(f"another rollmesh daemon already uses this key ({path})") from error
    except OSError as error:
        raise HostError(f"the key file {path} cannot be locked: {error.strerror}") from error


def _read(descriptor: int, path: Path) -> Identity:
    seed = os.pread(descriptor, SEED_BYTES + 1, 0)
    if len(seed) != SEED_BYTES:
        raise HostError(
            f"{path} is not a key file: it has {'more than ' * (len(seed) > SEED_BYTES)}"
            f"{min(len(seed), SEED_BYTES)} bytes, not {SEED_BYTES}"
        )
    return Identity(seed)
