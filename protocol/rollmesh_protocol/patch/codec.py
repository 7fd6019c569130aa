"""Codec ``context-1``: whole patches, block by block.

A payload is

- the magic ``RMP2`` and the length of the head, uint32;
- the **head**, one zstandard frame: for each dtype of the layout its :class:`~rollmesh_protocol.patch.tables.Tables`
  (bf16, f16, f32, in this order), and for all blocks together four columns: the kind of each (uint8), how many of its
  elements change (uint32), and the lengths in bytes of its two streams (uint32), every uint32 column in four byte
  planes;
- the two streams of each block, in the order of :func:`~rollmesh_protocol.patch.blocks.blocks_of`.

A block is one of: unchanged (no streams); context-coded (rANS words, uint16; raw bits in uint32 words: see
:mod:`~rollmesh_protocol.patch.kernels`); or dense, where that is smaller: the number of every element's step plus one,
0 where it does not change, as byte planes, low planes first, in one zstandard frame.

Given the head, a block needs only its own streams, so blocks decode while the rest is still on its way. Decoding reads
the old image and changes nothing; what it gives is a list of flips (position, XOR), which is its own inverse. The
digests of the manifest, not the codec, guard against flipping twice.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Generator, MutableMapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple, TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray

from rollmesh_protocol.errors import Refused
from rollmesh_protocol.layout import ITEM_BYTES, Dtype, Layout
from rollmesh_protocol.patch import kernels
from rollmesh_protocol.patch.blocks import BLOCK_ELEMENTS, DTYPES, Block, Bytes, Words, blocks_of
from rollmesh_protocol.patch.tables import MOST_PACKED_BYTES, Histograms, Tables

MAGIC: Final = b"RMP2"
_START: Final = struct.Struct("<4sI")
START_BYTES: Final = _START.size
"""Of a payload that say how long its head is."""
UNCHANGED: Final = 0
CONTEXT: Final = 1
DENSE: Final = 2
_POSITION_BYTES: Final = 4
_COLUMNS: Final = 13
"""Bytes a block takes in the head: its kind and three uint32."""
_HEAD_LEVEL: Final = 19
_DENSE_LEVEL: Final = 1
_WORTH_DENSE: Final = 0.5
"""Dense coding is tried where context coding takes more than this share of the raw size."""

_AHEAD: Final = 8
"""Blocks that are worked on, or done and not yet taken, at one time: what bounds the memory."""

_KEPT_BYTES: Final = 128 << 20
"""Of noted changes between counting and encoding: some ten million. Blocks beyond are walked over twice."""

_Coded = tuple[int, tuple[bytes, bytes]]
"""A block's kind and its two streams."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Flips:
    """The changes of one block: ascending positions within it (uint32), and the XOR of old and new words there."""

    block: Block
    positions: NDArray[np.uint32]
    bits: Words

    def apply(self, image: bytearray | memoryview) -> None:
        """Flip; once more flips back."""
        kernels.flip(self.block.words(image), self.block.starts, self.block.ends, self.positions, self.bits)

    @property
    def touched(self) -> set[int]:
        """The tensors in which something changes."""
        return self.block.tensors_at(self.positions)


@dataclass(frozen=True)
class _Entry:
    """What the head says about one block; ``offset`` is where its streams start in the payload."""

    kind: int
    changes: int
    sizes: tuple[int, int]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + sum(self.sizes)


def _shift(dtype: Dtype) -> int:
    """How far the class is shifted: eight bits with all of the exponent (f16: and three of the mantissa)."""
    return 23 if dtype == "f32" else 7


def _width(dtype: Dtype) -> int:
    return 8 * ITEM_BYTES[dtype]


# --- encoding --------------------------------------------------------------------------------------------------------
def encode_patch(layout: Layout, *, old: Bytes, new: Bytes, executor: Executor | None = None) -> bytes | None:
    """The payload that turns image ``old`` into image ``new``, or None when they are equal.

    Both have ``layout.image_bytes`` bytes. Blocks are worked on by the threads of ``executor``, if there is one.
    """
    check_length(layout, old)
    check_length(layout, new)
    blocks = blocks_of(layout)
    totals = {dtype: Histograms.empty() for dtype in _dtypes(layout)}
    changes: list[int] = []
    kept: list[_Noted | None] = []
    room = _KEPT_BYTES
    gatherer = _Gatherer(old, new)
    noted = in_order(gatherer.count, blocks, executor)
    for block, (found, histograms) in zip(blocks, noted, strict=True):
        changes.append(len(found.kinds))
        totals[block.dtype].add(histograms)
        room -= found.size
        kept.append(found if room >= 0 else None)
    if not any(changes):
        return None
    tables = {dtype: Tables.fit(total, width=_width(dtype)) for dtype, total in totals.items()}

    def encode(index: int) -> _Coded:
        block, found = blocks[index], kept[index]
        kept[index] = None
        return _encode_block(block, found or gatherer.gather(block), tables[block.dtype], old, new)

    coded = list(in_order(encode, range(len(blocks)), executor))
    head = _pack_head(tables, changes, coded)
    return b"".join([_START.pack(MAGIC, len(head)), head, *(stream for _, streams in coded for stream in streams)])


class _Noted(NamedTuple):
    """The changes of a block, as :func:`~rollmesh_protocol.patch.kernels.gather_block` notes them."""

    kinds: NDArray[np.uint8]
    gaps: NDArray[np.uint32]
    numbers: NDArray[np.uint32]
    words: Words
    met: NDArray[np.int64]

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self)


class _Scratch:
    """Room to note all changes of a block in. Used again for the next block: fresh memory costs more than the walk."""

    def __init__(self) -> None:
        self.kinds = np.empty(BLOCK_ELEMENTS, dtype=np.uint8)
        self.gaps = np.empty(BLOCK_ELEMENTS, dtype=np.uint32)
        self.numbers = np.empty(BLOCK_ELEMENTS, dtype=np.uint32)
        self.words = np.empty(BLOCK_ELEMENTS, dtype=np.uint32)
        self.met = np.empty((2, kernels.CLASSES), dtype=np.int64)


class _Gatherer:
    """Walks over blocks of two images; safe to use from several threads."""

    def __init__(self, old: Bytes, new: Bytes) -> None:
        self._old = old
        self._new = new
        self._unused: list[_Scratch] = []

    def gather(self, block: Block) -> _Noted:
        """The changes of a block."""
        try:
            scratch = self._unused.pop()
        except IndexError:
            scratch = _Scratch()
        before, after = _frozen(block.words(self._old)), _frozen(block.words(self._new))
        words = scratch.words.view(after.dtype)
        changes, classes = kernels.gather_block(
            before, after, block.starts, block.ends, _shift(block.dtype), _width(block.dtype), scratch.kinds,
            scratch.gaps, scratch.numbers, words, scratch.met,
        )  # fmt: skip
        found = _Noted(
            kinds=scratch.kinds[:changes].copy(),
            gaps=scratch.gaps[:changes].copy(),
            numbers=scratch.numbers[:changes].copy(),
            words=words[:changes].copy(),
            met=scratch.met[:, :classes].copy(),
        )
        self._unused.append(scratch)
        return found

    def count(self, block: Block) -> tuple[_Noted, Histograms]:
        """The changes of a block, and their symbols counted."""
        found, counts = self.gather(block), Histograms.empty()
        kernels.count_symbols(*found, _width(block.dtype), counts.gaps, counts.steps, counts.values)
        return found, counts


def _encode_block(block: Block, found: _Noted, tables: Tables, old: Bytes, new: Bytes) -> _Coded:
    if not len(found.kinds):
        return UNCHANGED, (b"", b"")
    words, raw = kernels.encode_block(
        *found, _width(block.dtype), tables.modes, tables.gap_tables, tables.step_tables, tables.frequencies,
        tables.cumulated,
    )  # fmt: skip
    streams = words.astype("<u2").tobytes(), raw.astype("<u4").tobytes()
    if sum(map(len, streams)) > _WORTH_DENSE * block.elements * ITEM_BYTES[block.dtype]:
        dense = _encode_dense(block, old, new)
        if len(dense) < sum(map(len, streams)):
            return DENSE, (dense, b"")
    return CONTEXT, streams


def _encode_dense(block: Block, old: Bytes, new: Bytes) -> bytes:
    numbers = kernels.dense_numbers(
        _frozen(block.words(old)), _frozen(block.words(new)), block.starts, block.ends, _width(block.dtype)
    )
    planes = numbers.astype("<u4").view(np.uint8).reshape(-1, 4)[:, : ITEM_BYTES[block.dtype]]
    return zstandard.ZstdCompressor(level=_DENSE_LEVEL).compress(np.ascontiguousarray(planes.T).tobytes())


def _pack_head(tables: dict[Dtype, Tables], changes: Sequence[int], coded: Sequence[_Coded]) -> bytes:
    columns = [changes, [len(first) for _, (first, _) in coded], [len(second) for _, (_, second) in coded]]
    parts = [tables[dtype].pack() for dtype in DTYPES if dtype in tables]
    parts.append(bytes(kind for kind, _ in coded))
    parts += [np.array(column, dtype="<u4").view(np.uint8).reshape(-1, 4).T.tobytes() for column in columns]
    return zstandard.ZstdCompressor(level=_HEAD_LEVEL).compress(b"".join(parts))


# --- decoding --------------------------------------------------------------------------------------------------------
class Patch:
    """A payload whose head was read and checked against the layout. ``payload`` may still be growing."""

    def __init__(self, layout: Layout, payload: Bytes) -> None:
        """Read the head, which must lie within ``payload`` already. Refused ``patch.invalid``."""
        self.layout = layout
        self.blocks = blocks_of(layout)
        self._view = memoryview(payload).cast("B")
        self._tables, self._entries = _read_head(layout, self.blocks, self._view)
        self._lookups = {dtype: tables.lookup() for dtype, tables in self._tables.items()}

    @property
    def payload_bytes(self) -> int:
        """How long the payload must be."""
        return self._entries[-1].end

    def changes(self, index: int) -> int:
        """How many elements block ``index`` changes."""
        return self._entries[index].changes

    def flips_bytes(self, index: int) -> int:
        """What the flips of block ``index`` take in memory."""
        return self._entries[index].changes * (_POSITION_BYTES + ITEM_BYTES[self.blocks[index].dtype])

    def span(self, index: int) -> tuple[int, int]:
        """Where the streams of block ``index`` start and end in the payload."""
        return self._entries[index].offset, self._entries[index].end

    def decode(self, index: int, image: Bytes) -> Flips:
        """What block ``index`` changes, given the old image; only its own span is read. Refused ``patch.invalid``."""
        start, end = self.span(index)
        if end > len(self._view):
            raise Refused("patch.invalid", "the payload is cut short")
        return self.decode_streams(index, image, self._view[start:end])

    def decode_streams(self, index: int, image: Bytes, streams: Bytes) -> Flips:
        """The same from ``streams``, the bytes of the block's span: the payload beyond its head is not needed."""
        block, entry = self.blocks[index], self._entries[index]
        view, middle = memoryview(streams).cast("B"), entry.sizes[0]
        positions = np.empty(entry.changes, dtype=np.uint32)
        old = _frozen(block.words(image))
        bits = np.empty(entry.changes, dtype=old.dtype)
        outcome = kernels.DECODED
        if entry.kind == CONTEXT:
            outcome = self._decode_context(block, (view[:middle], view[middle:]), old, positions, bits)
        elif entry.kind == DENSE:
            outcome = self._decode_dense(block, view, old, positions, bits)
        if outcome != kernels.DECODED:
            raise Refused("patch.invalid", _SAYS[outcome])
        return Flips(block, positions, bits)

    def _decode_context(
        self,
        block: Block,
        streams: tuple[memoryview, memoryview],
        old: Words,
        positions: NDArray[np.uint32],
        bits: Words,
    ) -> int:
        tables = self._tables[block.dtype]
        spare = kernels.SPARE_WORDS
        words = np.zeros(len(streams[0]) // 2 + spare, dtype=np.uint16)
        words[:-spare] = np.frombuffer(streams[0], "<u2")
        raw = np.zeros(len(streams[1]) // 4 + spare, dtype=np.uint32)
        raw[:-spare] = np.frombuffer(streams[1], "<u4")
        outcome = kernels.decode_block(
            old, block.starts, block.ends, _shift(block.dtype), _width(block.dtype), tables.modes, tables.gap_tables,
            tables.step_tables, self._lookups[block.dtype], words, raw, positions, bits,
        )  # fmt: skip
        return int(outcome)

    @staticmethod
    def _decode_dense(block: Block, view: memoryview, old: Words, positions: NDArray[np.uint32], bits: Words) -> int:
        size = block.elements * ITEM_BYTES[block.dtype]
        planes = np.frombuffer(decompress(view, exactly=size), np.uint8)
        outcome = kernels.decode_dense(
            old, block.starts, block.ends, _width(block.dtype), planes.reshape(ITEM_BYTES[block.dtype], -1), positions,
            bits,
        )  # fmt: skip
        return int(outcome)


def head_end(start: Bytes) -> int:
    """Where the head ends of a payload that begins with ``start``, at least START_BYTES. Refused ``patch.invalid``."""
    if len(start) < _START.size or _START.unpack_from(start)[0] != MAGIC:
        raise Refused("patch.invalid", "the payload is not a patch of codec context-1")
    return START_BYTES + int(_START.unpack_from(start)[1])


def _read_head(
    layout: Layout, blocks: Sequence[Block], view: memoryview
) -> tuple[dict[Dtype, Tables], tuple[_Entry, ...]]:
    end = head_end(view)
    if end > len(view):
        raise Refused("patch.invalid", "the head of the patch is cut short")
    dtypes = _dtypes(layout)
    most = len(dtypes) * MOST_PACKED_BYTES + len(blocks) * _COLUMNS
    rest = memoryview(decompress(view[_START.size : end], at_most=most))
    tables: dict[Dtype, Tables] = {}
    for dtype in dtypes:
        tables[dtype], rest = Tables.unpack(rest)
    if len(rest) != len(blocks) * _COLUMNS:
        raise Refused("patch.invalid", "the head of the patch is not about the blocks of this layout")
    kinds = rest[: len(blocks)]
    planes = np.frombuffer(rest[len(blocks) :], np.uint8).reshape(3, 4, len(blocks))
    columns = np.ascontiguousarray(planes.transpose(0, 2, 1)).view("<u4")[..., 0].tolist()
    sizes = list(zip(columns[1], columns[2], strict=True))
    offsets = accumulate((first + second for first, second in sizes), initial=end)
    entries = tuple(_Entry(*fields) for fields in zip(kinds, columns[0], sizes, offsets, strict=False))
    for block, entry in zip(blocks, entries, strict=True):
        _check_entry(block, entry)
    return tables, entries


def _check_entry(block: Block, entry: _Entry) -> None:
    first, second = entry.sizes
    if entry.kind == UNCHANGED:
        is_sound = entry.changes == first == second == 0
    elif entry.kind == CONTEXT:
        is_sound = first % 2 == second % 4 == 0
    else:
        is_sound = entry.kind == DENSE and second == 0
    if not is_sound or entry.changes > block.elements or (entry.changes == 0) != (entry.kind == UNCHANGED):
        raise Refused("patch.invalid", "the head of the patch contradicts itself")


def _dtypes(layout: Layout) -> tuple[Dtype, ...]:
    """The dtypes that have a block, in the order of DTYPES."""
    present = {tensor.dtype for tensor in layout.tensors if tensor.elements}
    return tuple(dtype for dtype in DTYPES if dtype in present)


def _frozen(words: Words) -> Words:
    """The same words, read-only: kernels are compiled for this kind of array only."""
    view = words.view()
    view.flags.writeable = False
    return view


_SAYS: Final = {
    kernels.CUT_SHORT: "a block's streams are cut short",
    kernels.TOO_MANY: "a block changes more elements than the head of the patch says",
    kernels.LEFT_OVER: "a block's streams do not end where its elements end",
}


def apply_patch(
    layout: Layout, image: bytearray | memoryview, payload: Bytes, *, executor: Executor | None = None
) -> tuple[int, ...]:
    """Apply ``payload`` to ``image`` in place; the indices of the tensors it touched, ascending.

    Raises:
        Refused: ``patch.invalid`` for anything that is not a patch of this layout; ``image`` is then as it was.
    """
    check_length(layout, image)
    done: list[Flips] = []
    try:
        with closing(decoded(layout, image, payload, executor=executor)) as changes:
            for flips in changes:
                flips.apply(image)
                done.append(flips)
    except Refused:
        for flips in done:
            flips.apply(image)
        raise
    return tuple(sorted(set().union(*(flips.touched for flips in done))))


def decoded(
    layout: Layout,
    image: Bytes,
    payload: Bytes,
    *,
    executor: Executor | None = None,
    ahead: MutableMapping[int, Flips] | None = None,
) -> Generator[Flips, None, None]:
    """The changes of each block that has any, in order. The payload must be whole. Refused ``patch.invalid``.

    Blocks in ``ahead`` were decoded before, from this payload and this image; they are taken out of it.
    """
    known = {} if ahead is None else ahead
    patch = Patch(layout, payload)
    if patch.payload_bytes != len(memoryview(payload).cast("B")):
        raise Refused("patch.invalid", "the payload does not end with its last block")
    changing = [index for index in range(len(patch.blocks)) if patch.changes(index)]
    yield from in_order(lambda index: known.pop(index, None) or patch.decode(index, image), changing, executor)


def in_order(
    work: Callable[[_Item], _Result], items: Sequence[_Item], executor: Executor | None
) -> Generator[_Result, None, None]:
    """Results in the order of ``items``; no work is under way any more when the iterator ends, or is closed."""
    if executor is None:
        yield from map(work, items)
        return
    pending: deque[Future[_Result]] = deque()
    try:
        for item in items:
            pending.append(executor.submit(work, item))
            if len(pending) >= _AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)


def check_length(layout: Layout, image: Bytes) -> None:
    """ValueError unless ``image`` has the bytes of an image of ``layout``."""
    if len(memoryview(image).cast("B")) != layout.image_bytes:
        raise ValueError(f"an image of this layout has {layout.image_bytes} bytes, not {len(image)}")


def decompress(frame: memoryview, *, exactly: int | None = None, at_most: int = 0) -> bytes:
    """One clean zstandard frame of a size that is known, or bounded, before anything is allocated."""
    bound = at_most if exactly is None else exactly
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared > bound or (exactly is not None and declared != exactly):
            raise Refused("patch.invalid", "a stream of a size that does not fit")
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        return decompressor.decompress(frame, max_output_size=bound, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refused("patch.invalid", "a stream that is not one clean zstandard frame") from error
