"""The engine's own output, kept in a file of bounded size in the node's folder.

Invariant: the two files together never exceed twice :data:`MOST_BYTES`; a disk that is full costs lines, never the
node. The last lines are quoted in the error of an engine that ended; this file has what came before them.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

ENGINE_LOG: Final = "engine.log"
"""The file's name in the node's folder; the one before it has ``.1`` behind."""
MOST_BYTES: Final = 1 << 20
"""Of one file: some ten starts of vLLM, which is talkative."""


class EngineLog:
    """Writes lines to ``path``; the file before is kept beside it."""

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self._most = most_bytes
        self._size: int | None = None

    def write(self, line: str) -> None:
        """Append one line, with the time in UTC."""
        entry = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {line}\n".encode()
        with contextlib.suppress(OSError):
            if self._size is None:
                self._size = self.path.stat().st_size if self.path.exists() else 0
            if self._size and self._size + len(entry) > self._most:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
                self._size = 0
            with self.path.open("ab") as file:
                file.write(entry[: self._most])
            self._size += min(len(entry), self._most)
