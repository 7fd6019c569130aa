"""Lossless weight patches, first version: what turns one image into another, bit for bit, and back again.

Codec ``sparse-1`` takes an image for what its bits are, a row of little-endian 16-bit words (a bf16 or f16 element is
one word, an f32 element two), and never looks at floats: NaN payloads, negative zero and infinities survive. The row is
cut into sections of :data:`SECTION_BYTES`, so that memory stays bounded and sections could be worked on side by side.
A payload is the magic ``RMP1`` and then for each section, in order:

- three uint32, little-endian: the lengths of the three zstandard frames that follow; all zero where nothing changed;
- gaps, uint8: for each changed word the number of unchanged words since the one before it (or since the start of the
  section), where a byte of 255 stands for 255 unchanged words and more to come;
- the low bytes, and then the high bytes, of the XOR of old and new word, for each changed word.

XOR is its own inverse: applying a patch twice gives the old image, so it also leads back. Applied twice by mistake it
would undo itself, which the digests of the manifest catch. Every frame declares its size, which is checked against
what the section can use before anything is allocated.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from rollmesh_protocol.errors import Refused
from rollmesh_protocol.layout import ALIGNMENT, Layout

SECTION_BYTES: Final = 8 << 20
"""Image bytes worked on together: two of them fit a third-level cache, and scratch stays under 100 MB at the worst."""
_ESCAPE: Final = 255
_ZSTD_LEVEL: Final = 1
"""Level 3 is no smaller on gaps and XORs of real steps, and slower."""
_MAX_WINDOW_BYTES: Final = SECTION_BYTES
_MAGIC: Final = b"RMP1"
_LENGTHS: Final = struct.Struct("<III")

Bytes = bytes | bytearray | memoryview
Words = NDArray[np.uint16]


@dataclass(frozen=True)
class _Section:
    """``words`` 16-bit words of the image from byte ``offset`` on; a whole number of cache lines."""

    offset: int
    words: int

    def view(self, image: Bytes) -> Words:
        return np.frombuffer(image, np.dtype("<u2"), self.words, self.offset)


def encode_patch(layout: Layout, *, old: Bytes, new: Bytes) -> bytes | None:
    """The payload that turns image ``old`` into image ``new`` (and back), or None when they are equal.

    Both images have ``layout.image_bytes`` bytes; their padding is zero, as images are made.
    """
    _check_length(layout, old)
    _check_length(layout, new)
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    payload = [_MAGIC]
    changed = False
    for section in _sections(layout):
        where, change = _difference(section.view(old), section.view(new))
        frames: list[bytes] = []
        if where.size:
            changed = True
            low, high = change.astype(np.uint8), (change >> 8).astype(np.uint8)
            frames = [compressor.compress(part.tobytes()) for part in (_to_gaps(where), low, high)]
        payload += [_LENGTHS.pack(*map(len, frames)) if frames else _LENGTHS.pack(0, 0, 0), *frames]
    return b"".join(payload) if changed else None


def apply_patch(layout: Layout, image: bytearray | memoryview, payload: Bytes) -> tuple[int, ...]:
    """Apply ``payload`` to ``image`` in place; the indices of the tensors it touched, ascending.

    Raises:
        Refused: ``patch.invalid`` for anything that does not decode to changes of elements of this layout; ``image``
            is then as it was.
    """
    _check_length(layout, image)
    parts = _split(layout, payload)
    touched: set[int] = set()
    for done, (section, frames) in enumerate(parts):
        try:
            touched.update(_apply_section(layout, section, frames, image))
        except Refused:
            for earlier, good in parts[:done]:
                _apply_section(layout, earlier, good, image)
            raise
    return tuple(sorted(touched))


def _sections(layout: Layout) -> Iterator[_Section]:
    for offset in range(0, layout.image_bytes, SECTION_BYTES):
        yield _Section(offset, min(SECTION_BYTES, layout.image_bytes - offset) // 2)


def _check_length(layout: Layout, image: Bytes) -> None:
    if len(memoryview(image).cast("B")) != layout.image_bytes:
        raise ValueError(f"an image of this layout has {layout.image_bytes} bytes, not {len(image)}")


# --- encoding --------------------------------------------------------------------------------------------------------
def _difference(old: Words, new: Words) -> tuple[NDArray[np.int64], Words]:
    """Where two rows of words differ, ascending, and the XOR there. Four words at a time first: most are equal."""
    lanes = np.flatnonzero(old.view("<u8") != new.view("<u8"))
    quads = (old.view("<u8")[lanes] ^ new.view("<u8")[lanes]).view("<u2")
    inside = np.flatnonzero(quads != 0)
    where = (lanes[inside >> 2] << 2) + (inside & 3)
    return where, quads[inside]


def _to_gaps(where: NDArray[np.int64]) -> NDArray[np.uint8]:
    gaps = np.diff(where, prepend=-1) - 1
    long = np.flatnonzero(gaps >= _ESCAPE)
    if not long.size:
        return gaps.astype(np.uint8)
    escapes = gaps[long] // _ESCAPE
    # Byte i of the gaps is preceded by all the escapes that belong to gaps up to i.
    shift = np.zeros(len(gaps), dtype=np.int64)
    shift[long] = escapes
    stream = np.full(len(gaps) + int(escapes.sum()), _ESCAPE, dtype=np.uint8)
    gaps[long] -= escapes * _ESCAPE
    stream[np.arange(len(gaps)) + np.cumsum(shift)] = gaps
    return stream


# --- decoding --------------------------------------------------------------------------------------------------------
def _split(layout: Layout, payload: Bytes) -> list[tuple[_Section, tuple[memoryview, ...]]]:
    """The sections that changed, each with its three frames."""
    view = memoryview(payload).cast("B")
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise Refused("patch.invalid", "the payload is not a sparse-1 patch")
    position = len(_MAGIC)
    parts = []
    for section in _sections(layout):
        if len(view) - position < _LENGTHS.size:
            raise Refused("patch.invalid", "the payload is cut short")
        lengths = _LENGTHS.unpack_from(view, position)
        position += _LENGTHS.size
        if sum(lengths) > len(view) - position:
            raise Refused("patch.invalid", "the payload is cut short")
        frames = []
        for length in lengths:
            frames.append(view[position : position + length])
            position += length
        if any(lengths):
            parts.append((section, tuple(frames)))
    if position != len(view):
        raise Refused("patch.invalid", f"{len(view) - position} bytes after the end of the patch")
    return parts


def _apply_section(
    layout: Layout, section: _Section, frames: tuple[memoryview, ...], image: bytearray | memoryview
) -> list[int]:
    """Change one section, once all of it is decoded and checked; the tensors that were touched."""
    gaps, low, high = (np.frombuffer(_decompress(frame, _most(section)), np.uint8) for frame in frames)
    where = _from_gaps(gaps, section)
    if not len(where) == len(low) == len(high) != 0:
        raise Refused("patch.invalid", "the streams of the patch do not fit together")
    touched = _tensors_of(layout, section, where)
    change = high.astype(np.uint16)
    change <<= 8
    change |= low
    words = section.view(image)
    words[where] ^= change
    return touched


def _most(section: _Section) -> int:
    """The longest stream that a section can use: a byte for each word, and one for each 255 words passed over."""
    return section.words + section.words // _ESCAPE + 1


def _from_gaps(gaps: NDArray[np.uint8], section: _Section) -> NDArray[np.int64]:
    """Ascending positions of the changed words, all inside the section."""
    ends = np.flatnonzero(gaps != _ESCAPE)
    if not ends.size or ends[-1] != len(gaps) - 1:
        raise Refused("patch.invalid", "the gaps of the patch end in the middle")
    where = np.cumsum(gaps, dtype=np.int64)[ends]
    where += np.arange(len(ends))
    if where[-1] >= section.words:
        raise Refused("patch.invalid", "a change beyond the end of its section")
    return where


def _tensors_of(layout: Layout, section: _Section, where: NDArray[np.int64]) -> list[int]:
    """The indices of the tensors in which the changed words lie; a change of the padding between them is refused."""
    offsets = layout.offsets
    first = max(bisect_right(offsets, section.offset) - 1, 0)
    last = bisect_left(offsets, section.offset + 2 * section.words)
    starts = np.array(offsets[first:last], dtype=np.int64)
    lengths = np.array([tensor.tensor_bytes for tensor in layout.tensors[first:last]], dtype=np.int64)
    begin = np.searchsorted(where, (starts - section.offset) // 2)
    end = np.searchsorted(where, (starts + lengths - section.offset) // 2)
    if int((end - begin).sum()) != len(where):
        raise Refused("patch.invalid", "a change between two tensors")
    return [first + int(index) for index in np.flatnonzero(end > begin)]


def _decompress(frame: memoryview, bound: int) -> bytes:
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared > bound:
            raise Refused("patch.invalid", "a stream larger than its section can use")
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        return decompressor.decompress(frame, max_output_size=bound, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refused("patch.invalid", "a stream that is not one clean zstandard frame") from error


assert SECTION_BYTES % ALIGNMENT == 0
