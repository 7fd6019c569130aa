"""One payload on disk, whole or in part, chunk by chunk against its manifest.

While chunks are missing they lie at their places in a sparse ``.part`` file; with the last one the file is flushed and
renamed to ``.payload``. A chunk counts as held only after its digest was checked by this process: at the write, or
when a ``.part`` file of an earlier process is opened. Chunks are checked again whenever they are read, so a disk that
rots costs a new download and never a wrong byte. Not here: which payloads there are, and when they go.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from threading import Lock
from typing import Final

from blake3 import blake3

from rollmesh_peer.faults import fault_point
from rollmesh_peer.weights import durable
from rollmesh_protocol.errors import HostError, Refused
from rollmesh_protocol.manifest import Manifest

log = logging.getLogger("rollmesh.weights")

PART: Final = ".part"
WHOLE: Final = ".payload"


class Payload:
    """The payload of ``manifest`` under ``stem`` (a path without suffix). Safe to use from several threads.

    ``held``, ``is_complete``, ``path`` and ``part`` do not touch the disk and never wait for those that do.
    """

    def __init__(self, stem: Path, manifest: Manifest) -> None:
        self.manifest: Final = manifest
        self.part: Final = stem.with_name(stem.name + PART)
        """Where the chunks lie while some are missing."""
        self._whole = stem.with_name(stem.name + WHOLE)
        self._writing = Lock()
        """Held while the files change."""
        self._held: frozenset[int] = frozenset()
        self._is_complete = False
        self._open()

    @property
    def is_complete(self) -> bool:
        """True when every chunk is there and the file has its final name."""
        return self._is_complete

    @property
    def path(self) -> Path:
        """The whole file; Refused ``request.unknown`` while there is none."""
        if not self._is_complete:
            raise Refused("request.unknown", "the payload is not complete")
        return self._whole

    def held(self) -> frozenset[int]:
        """The indices of the chunks that can be read."""
        return self._held

    def write(self, index: int, chunk: bytes) -> None:
        """Keep one chunk. Refused: ``request.unknown`` for no such index, ``chunk.digest``. HostError: the disk."""
        if not 0 <= index < self.manifest.chunk_count:
            raise Refused("request.unknown", f"there is no chunk {index}")
        if len(chunk) != self.manifest.chunk_length(index) or not self._is_good(index, chunk):
            raise Refused("chunk.digest")
        with self._writing, durable.disk_errors("a chunk of the weights cannot be written"):
            if index in self._held:
                return
            descriptor = os.open(self.part, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
            try:
                os.ftruncate(descriptor, self.manifest.payload_bytes)
                _write_at(descriptor, chunk, index * self.manifest.chunk_bytes)
                fault_point("store.chunk_written")
                is_last = len(self._held) == self.manifest.chunk_count - 1
                if is_last:
                    os.fsync(descriptor)  # a disk may fail here too; then the last chunk is not held
            finally:
                os.close(descriptor)
            if is_last:
                fault_point("store.payload_flushed")
                durable.settle(self.part, self._whole)
            self._held |= {index}
            self._is_complete = is_last

    def read(self, index: int) -> bytes:
        """One chunk. Refused ``request.unknown`` when it is not held, or not what it was any more."""
        if index not in self._held:
            raise Refused("request.unknown", f"chunk {index} is not held")
        chunk = self._read(index)
        if not self._is_good(index, chunk):
            log.warning("chunk %d of %s has changed on the disk; it is fetched again", index, self._whole.stem)
            self._forget(index)
            raise Refused("request.unknown", f"chunk {index} is not held any more")
        return chunk

    def _read(self, index: int) -> bytes:
        """What lies at a chunk's place, in either file: the name changes when the payload becomes complete."""
        for path in (self._whole, self.part, self._whole):
            try:
                with path.open("rb") as file:
                    file.seek(index * self.manifest.chunk_bytes)
                    return file.read(self.manifest.chunk_length(index))
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("chunk %d of %s cannot be read: %s", index, path.stem, error)
                break
        return b""

    def adopt(self, source: Path) -> None:
        """``source``, a complete and good payload that nobody writes into any more, becomes this one's file."""
        with self._writing, durable.disk_errors(f"{source} cannot be taken over"):
            size = source.stat().st_size
            if size != self.manifest.payload_bytes:
                raise HostError(f"{source} has {size} bytes where its manifest says {self.manifest.payload_bytes}")
            durable.take_file(source, self._whole)
            self.part.unlink(missing_ok=True)
            self._held = frozenset(range(self.manifest.chunk_count))
            self._is_complete = True

    def delete(self) -> None:
        """Remove the file, whole or in part."""
        with self._writing:
            self._held = frozenset()
            self._is_complete = False
            self._whole.unlink(missing_ok=True)
            self.part.unlink(missing_ok=True)

    def _open(self) -> None:
        size = self._whole.stat().st_size if self._whole.exists() else None
        if size == self.manifest.payload_bytes:
            self._held = frozenset(range(self.manifest.chunk_count))
            self._is_complete = True
            self.part.unlink(missing_ok=True)
            return
        if size is not None:
            log.warning("%s has %d bytes instead of %d; discarded", self._whole.name, size, self.manifest.payload_bytes)
            self._whole.unlink()
        if self.part.exists():
            self._held = self._verified_part()
            log.info("%d of %d chunks of an earlier download are good", len(self._held), self.manifest.chunk_count)
            if len(self._held) == self.manifest.chunk_count:
                durable.sync_file(self.part)
                durable.settle(self.part, self._whole)
                self._is_complete = True

    def _verified_part(self) -> frozenset[int]:
        good = set()
        with self.part.open("rb") as file:
            for index in range(self.manifest.chunk_count):
                start = index * self.manifest.chunk_bytes
                if _is_hole(file.fileno(), start, start + self.manifest.chunk_length(index)):
                    continue
                file.seek(start)
                if self._is_good(index, file.read(self.manifest.chunk_length(index))):
                    good.add(index)
        return frozenset(good)

    def _forget(self, index: int) -> None:
        """A chunk went bad: a whole payload becomes a partial one."""
        with self._writing:
            self._held -= {index}
            if self._is_complete:
                self._is_complete = False
                # Where a snapshot is another name of this file, the chunk's new download mends both.
                with contextlib.suppress(OSError):
                    self._whole.replace(self.part)

    def _is_good(self, index: int, chunk: bytes) -> bool:
        return blake3(chunk).digest() == self.manifest.chunk_digest(index)


def _write_at(descriptor: int, chunk: bytes, offset: int) -> None:
    os.lseek(descriptor, offset, os.SEEK_SET)
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _is_hole(descriptor: int, start: int, end: int) -> bool:
    """True when nothing was ever written between ``start`` and ``end``, as far as the file system can tell."""
    if not hasattr(os, "SEEK_DATA"):
        return False
    try:
        return os.lseek(descriptor, start, os.SEEK_DATA) >= end
    except OSError:
        return True  # no data up to the end of the file
