"""How an image is cut into the blocks that a patch codes one by one.

The elements of all tensors of one dtype form a row, in layout order and without the padding between them: first bf16,
then f16, then f32. Each row is cut every :data:`BLOCK_ELEMENTS` elements. So a block is a few whole or partial tensors
of one dtype, however small its tensors are, and padding cannot be named, let alone changed. Blocks share no element;
they can be coded and applied side by side and in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollmesh_protocol.layout import ITEM_BYTES, Dtype, Layout

BLOCK_ELEMENTS: Final = 1 << 22
"""Elements of a block at most: 8 MiB of bf16. What a decoded block takes stays under 32 MiB where all of it changes."""

DTYPES: Final[tuple[Dtype, ...]] = ("bf16", "f16", "f32")
"""The order of the rows."""

Bytes = bytes | bytearray | memoryview
Words = NDArray[np.uint16] | NDArray[np.uint32]
Bounds = NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """Elements ``starts[i]`` to ``ends[i]`` (counted in items of the dtype from the image's first byte), in order."""

    dtype: Dtype
    starts: Bounds
    ends: Bounds
    tensors: tuple[int, ...]
    """The index of the tensor that each stretch belongs to."""

    @cached_property
    def elements(self) -> int:
        """How many elements the block has, at least one."""
        return int((self.ends - self.starts).sum())

    def words(self, image: Bytes) -> Words:
        """The whole image as a row of this dtype's words; ``starts`` and ``ends`` point into it."""
        return np.frombuffer(
            image, "<u2" if ITEM_BYTES[self.dtype] == 2 else "<u4", len(image) // ITEM_BYTES[self.dtype]
        )

    def tensors_at(self, positions: NDArray[np.uint32]) -> set[int]:
        """The tensors that hold the elements at these ascending ``positions``, counted within the block."""
        edges = np.concatenate([[0], np.cumsum(self.ends - self.starts)])
        counts = np.diff(np.searchsorted(positions, edges))
        return {self.tensors[int(index)] for index in np.flatnonzero(counts)}


def blocks_of(layout: Layout) -> tuple[Block, ...]:
    """The blocks of an image, in the order in which a patch lists them."""
    found: list[Block] = []
    for dtype in DTYPES:
        item = ITEM_BYTES[dtype]
        stretches: list[tuple[int, int, int]] = []
        room = BLOCK_ELEMENTS
        for index, (tensor, offset) in enumerate(zip(layout.tensors, layout.offsets, strict=True)):
            if tensor.dtype != dtype:
                continue
            start, end = offset // item, offset // item + tensor.elements
            while start < end:
                stop = min(end, start + room)
                stretches.append((start, stop, index))
                room -= stop - start
                start = stop
                if not room:
                    found.append(_block(dtype, stretches))
                    stretches, room = [], BLOCK_ELEMENTS
        if stretches:
            found.append(_block(dtype, stretches))
    return tuple(found)


def _block(dtype: Dtype, stretches: list[tuple[int, int, int]]) -> Block:
    starts, ends, tensors = zip(*stretches, strict=True)
    return Block(dtype, np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64), tensors)
