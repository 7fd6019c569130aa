"""``metrics.jsonl``: one JSON line for each step that counts, for people and their tools.

The ledger is the record, and this file a copy of it. A file that lacks something (the disk was full, a kill cut a line
off, steps were lost) is written anew from the ledger; a disk without room delays nothing but the file.
"""

from __future__ import annotations

import logging
from pathlib import Path

import trio

from rollmesh_learner.records.ledger import Ledger
from rollmesh_peer.weights.durable import disk_errors, write_file
from rollmesh_protocol.errors import HostError

_log = logging.getLogger("rollmesh.learner.steps")


class MetricsFile:
    """The file at ``path``. Call :meth:`rewrite` once before the first :meth:`add`."""

    def __init__(self, path: Path, *, ledger: Ledger) -> None:
        self._path = path
        self._ledger = ledger
        self._is_whole = False

    async def add(self, line: str) -> None:
        """``line`` is in the ledger, as the metrics of the newest step."""
        if not self._is_whole:
            await self.rewrite()
            return
        try:
            await trio.to_thread.run_sync(_append, self._path, line)
        except HostError as error:
            self._is_whole = False
            _log.warning("%s; the metrics are in the ledger alone until it can", error.detail)

    async def rewrite(self) -> None:
        """Bring the file to what the ledger says: steps may have been lost."""
        found = await self._ledger.fetch(
            "SELECT metrics FROM steps WHERE state IN ('trained', 'final') AND metrics IS NOT NULL ORDER BY step"
        )
        text = "".join(f"{line!s}\n" for (line,) in found)
        try:
            await trio.to_thread.run_sync(write_file, self._path, text.encode())
        except HostError as error:
            _log.debug("%s", error.detail)
            self._is_whole = False
        else:
            self._is_whole = True


def _append(path: Path, line: str) -> None:
    with disk_errors(f"{path.name} cannot be written"), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
