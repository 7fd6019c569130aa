"""Bitmaps of chunks: which pieces of a payload somebody holds. Bit i of byte i // 8, lowest bit first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rollmesh_protocol.errors import Refused


def bitmap_bytes(chunk_count: int) -> int:
    """The length of a bitmap of ``chunk_count`` bits."""
    return -(-chunk_count // 8)


def to_bitmap(held: Iterable[int], *, chunk_count: int) -> bytes:
    """The bitmap with the bits of ``held`` set."""
    bitmap = bytearray(bitmap_bytes(chunk_count))
    for index in held:
        bitmap[index // 8] |= 1 << (index % 8)
    return bytes(bitmap)


def from_bitmap(bitmap: bytes, *, chunk_count: int) -> frozenset[int]:
    """The indices of the bits set, or :class:`Refused` when the bitmap does not fit ``chunk_count``."""
    if len(bitmap) != bitmap_bytes(chunk_count):
        raise Refused("request.invalid", f"a bitmap of {len(bitmap)} bytes for {chunk_count} chunks")
    held = frozenset(_bits(bitmap))
    if held and max(held) >= chunk_count:
        raise Refused("request.invalid", "a bitmap with bits beyond the last chunk")
    return held


def _bits(bitmap: bytes) -> Iterator[int]:
    for position, byte in enumerate(bitmap):
        yield from (8 * position + bit for bit in range(8) if byte >> bit & 1)
