"""Finished results on disk, from the moment they are signed until the learner's receipt.

One file for each lease, holding the sealed envelope byte for byte, so that after a lost answer, a new connection or a
kill -9 the very same bytes are sent again and get the same receipt. It knows nothing of the network. Methods block on
the disk: daemons call them in a thread.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from rollmesh_peer.folders import private_folder
from rollmesh_peer.weights.durable import disk_errors, free_bytes, sweep, write_file
from rollmesh_protocol.errors import HostError

SUFFIX: Final = ".result"
MAX_RESULTS: Final = 4096
"""Unsent results that are kept: hours of work without the learner, all of it too old by then."""


class Spool:
    """The unsent results of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = private_folder(folder)
        sweep(self._folder)

    def put(self, lease_id: bytes, sealed: bytes) -> None:
        """Make a result durable.

        Raises:
            HostError: the disk is full or failing, or :data:`MAX_RESULTS` wait already.
        """
        if free_bytes(self._folder) < len(sealed):
            raise HostError(f"a finished result cannot be kept: the disk of {self._folder} is full")
        if len(self.pending()) >= MAX_RESULTS:
            raise HostError(f"{MAX_RESULTS} results wait for the learner already")
        write_file(self._path(lease_id), sealed)

    def get(self, lease_id: bytes) -> bytes | None:
        """The bytes to send, or None once they were dropped."""
        with contextlib.suppress(FileNotFoundError):
            return self._path(lease_id).read_bytes()
        return None

    def drop(self, lease_id: bytes) -> None:
        """Forget a result: its receipt has come. Not flushed: a result that comes back is sent again to no effect."""
        with disk_errors("a sent result cannot be removed"):
            self._path(lease_id).unlink(missing_ok=True)

    def pending(self) -> tuple[bytes, ...]:
        """Lease ids of the unsent results, oldest first."""
        found: list[tuple[float, bytes]] = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(ValueError, OSError):
                found.append((path.stat().st_mtime, bytes.fromhex(path.stem)))
        return tuple(lease_id for _, lease_id in sorted(found))

    def _path(self, lease_id: bytes) -> Path:
        return self._folder / f"{lease_id.hex()}{SUFFIX}"
