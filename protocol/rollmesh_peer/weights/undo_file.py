"""The undo log of a working copy on a disk: what its words were, durable before any of them changes.

A patch is applied in place, block by block. After a kill or a power cut in the middle nobody can tell which blocks are
new: the kernel writes pages back when it likes, and a disk may stop inside a page. So the log does not hold flips
(positions and XOR), which would have to be undone exactly where they had been done, but positions and **old words**. To
write an old word back is right whether it was changed, was not, or is back already; undoing may itself be cut off
anywhere and is then begun again. This is what "the block was logged and perhaps flipped" needs, and all that it needs.

The file, little-endian, is a head (magic, digest of the layout, root before and after, checksum) and then records:

    step, block, form, count: uint32   which edge of the path, which block, how the body is written, elements in it
    checksum: 32 bytes                 BLAKE3 over the checksum before, these four and the body
    body                               SPARSE: positions in the block (uint32), then the words there; WHOLE: all words

A record counts only where every one before it does, so a file ends at its first torn record. That loses nothing: the
elements of a block are touched only after the flush of its record has returned, with all before it.

Bounds: records are gathered up to :data:`BATCH_BYTES` of flips for one flush; a record takes at most its block's own
size, after WHOLE a block needs no further one in the same log, and it comes no later than when the SPARSE ones would be
as large. So a log stays below twice the image, however long the path; usually it is a few per cent of it.

It does not decide: the worker compares roots and digests, and those have the last word. The daemon removes the log once
the new version is written down.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Self

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from rollmesh_peer.faults import fault_point
from rollmesh_peer.weights import durable
from rollmesh_protocol.layout import ITEM_BYTES, Layout

if TYPE_CHECKING:  # at run time the worker hands them over: only it loads the codec
    from rollmesh_protocol.patch.blocks import Block
    from rollmesh_protocol.patch.codec import Flips

BATCH_BYTES: Final = 16 << 20
"""Of flips that wait for one flush, beside the block that comes last: a flush may take as long as writing this much."""
MAGIC: Final = b"RMUNDO01"
SPARSE: Final = 0
WHOLE: Final = 1
_HEAD: Final = struct.Struct("<8s32s32s32s")
_RECORD: Final = struct.Struct("<IIII")
_SUM_BYTES: Final = 32
_POSITION_BYTES: Final = 4


@dataclass(frozen=True)
class _Record:
    """One record as it lies in the file."""

    block: int
    form: int
    count: int
    fields: bytes
    checksum: bytes
    body: bytes

    @property
    def length(self) -> int:
        """Bytes of all of it."""
        return len(self.fields) + len(self.checksum) + len(self.body)


class UndoFile:
    """The log at ``path`` for a change of one image from root ``before`` to root ``after``.

    Nothing is written until something is about to change. ``spare_bytes`` are left free on the disk.
    """

    def __init__(
        self, path: Path, *, layout: Layout, blocks: Sequence[Block], before: bytes, after: bytes, spare_bytes: int = 0
    ) -> None:
        self.before: Final = before
        self.after: Final = after
        self._path = path
        self._blocks = blocks
        self._spare_bytes = spare_bytes
        self._head = _HEAD.pack(MAGIC, layout.digest, before, after)
        self._sum = blake3(self._head).digest()
        self._end = 0
        """Bytes of the file that are durable."""
        self._offsets: list[int] = []
        """Where the durable records begin."""
        self._logged: dict[int, int] = {}
        """Bytes of each block's SPARSE records; -1 once there is a WHOLE one."""
        self._step = 0
        self._is_given_up = False

    @classmethod
    def found(cls, path: Path, *, layout: Layout, blocks: Sequence[Block]) -> Self | None:
        """What a process that is gone has left at ``path``; None where nothing was logged. HostError: the disk."""
        with durable.disk_errors(f"{path} cannot be read"):
            if not path.exists():
                return None
            with path.open("rb") as file:
                head, found_sum = file.read(_HEAD.size), file.read(_SUM_BYTES)
                if len(head) < _HEAD.size or blake3(head).digest() != found_sum:
                    return None
                magic, digest, before, after = _HEAD.unpack(head)
                if magic != MAGIC or digest != layout.digest:
                    return None
                log = cls(path, layout=layout, blocks=blocks, before=before, after=after)
                log._scan(file)
        return log

    def guarded(self, image: memoryview, changes: Iterable[Flips]) -> Iterator[Flips]:
        """The changes of one step, each handed out once it can be undone. HostError: the disk is full, or failed."""
        numbers = {(block.dtype, int(block.starts[0])): number for number, block in enumerate(self._blocks)}
        batch: list[Flips] = []
        records: list[bytes] = []
        size = 0
        for flips in changes:
            number = numbers[flips.block.dtype, int(flips.block.starts[0])]
            records += self._record(image, number, flips)
            batch.append(flips)
            size += flips.positions.nbytes + flips.bits.nbytes
            if size >= BATCH_BYTES:
                self._append(records)
                yield from batch
                fault_point("weights.flipped")
                batch, records, size = [], [], 0
        if batch:
            self._append(records)
            yield from batch
            fault_point("weights.flipped")
        self._step += 1

    def give_up(self) -> None:
        """What happens now cannot be undone from here: an anchor overwrites the image."""
        self._is_given_up = True

    def lead_back(self, image: memoryview) -> bool:
        """Put every old word back, last record first; the image is not flushed. False where that is not all."""
        if self._offsets:
            with durable.disk_errors(f"{self._path} cannot be read"), self._path.open("rb") as file:
                for offset in reversed(self._offsets):
                    record = self._read(file, offset)
                    if record is not None:
                        self._put_back(image, record)
        return not self._is_given_up

    def remove(self) -> None:
        """Nothing is to be undone any more. HostError: the disk."""
        durable.remove_file(self._path)

    # --- writing -----------------------------------------------------------------------------------------------------
    def _record(self, image: memoryview, number: int, flips: Flips) -> list[bytes]:
        """What undoes ``flips``, with the old words as they are in ``image`` now; nothing where that is needless."""
        block, spent = flips.block, self._logged.get(number, 0)
        if spent < 0 or self._is_given_up:
            return []
        words, item = block.words(image), ITEM_BYTES[block.dtype]
        sparse, whole = len(flips.positions) * (_POSITION_BYTES + item), block.elements * item
        if spent + sparse < whole:
            self._logged[number] = spent + sparse
            form, count = SPARSE, len(flips.positions)
            body = [flips.positions.astype("<u4").tobytes(), words[_places(block, flips.positions)].tobytes()]
        else:
            self._logged[number] = -1
            form, count = WHOLE, block.elements
            body = [words[start:end].tobytes() for start, end in zip(block.starts, block.ends, strict=True)]
        fields = _RECORD.pack(self._step, number, form, count)
        self._sum = blake3(b"".join([self._sum, fields, *body])).digest()
        return [b"".join([fields, self._sum, *body])]

    def _append(self, records: Sequence[bytes]) -> None:
        """Make records durable, and the file's name with the first of them."""
        if not records:
            return
        is_new = self._end == 0
        head = self._head + blake3(self._head).digest() if is_new else b""
        with durable.disk_errors("the undo log of the weights cannot be written"):
            if shutil.disk_usage(self._path.parent).free < len(head) + sum(map(len, records)) + self._spare_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if is_new:
                self._path.unlink(missing_ok=True)
            with self._path.open("xb" if is_new else "r+b") as file:
                file.seek(self._end)
                for part in (head, *records):
                    file.write(part)
                file.flush()
                fault_point("weights.undo_written")
                os.fsync(file.fileno())
            if is_new:
                durable.sync_folder(self._path.parent)
        self._end += len(head)
        for record in records:
            self._offsets.append(self._end)
            self._end += len(record)
        fault_point("weights.undo_durable")

    # --- reading -----------------------------------------------------------------------------------------------------
    def _scan(self, file: BinaryIO) -> None:
        """Note where the sound records are."""
        self._end = _HEAD.size + _SUM_BYTES
        while (record := self._read(file, self._end)) is not None:
            if blake3(b"".join([self._sum, record.fields, record.body])).digest() != record.checksum:
                return
            self._sum = record.checksum
            self._offsets.append(self._end)
            self._end += record.length

    def _read(self, file: BinaryIO, offset: int) -> _Record | None:
        """The record at ``offset``, or None where none fits; its checksum is not compared."""
        file.seek(offset)
        fields, checksum = file.read(_RECORD.size), file.read(_SUM_BYTES)
        if len(checksum) < _SUM_BYTES:
            return None
        _, number, form, count = _RECORD.unpack(fields)
        if number >= len(self._blocks):
            return None
        block = self._blocks[number]
        item = ITEM_BYTES[block.dtype]
        if form == SPARSE and count <= block.elements:
            length = count * (_POSITION_BYTES + item)
        elif form == WHOLE and count == block.elements:
            length = count * item
        else:
            return None
        body = file.read(length)
        return _Record(number, form, count, fields, checksum, body) if len(body) == length else None

    def _put_back(self, image: memoryview, record: _Record) -> None:
        block = self._blocks[record.block]
        words = block.words(image)
        if record.form == SPARSE:
            positions = np.frombuffer(record.body, "<u4", record.count)
            if record.count and int(positions.max()) >= block.elements:
                return  # damaged: the digests will say so
            words[_places(block, positions)] = np.frombuffer(
                record.body, words.dtype, record.count, _POSITION_BYTES * record.count
            )
            return
        old, at = np.frombuffer(record.body, words.dtype), 0
        for start, end in zip(block.starts, block.ends, strict=True):
            words[start:end] = old[at : at + end - start]
            at += end - start


def _places(block: Block, positions: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Where the elements at these positions of a block lie in the row of the image's words."""
    ends = np.cumsum(block.ends - block.starts)
    stretch = np.searchsorted(ends, positions, side="right")
    return positions.astype(np.int64) + (block.ends - ends)[stretch]
