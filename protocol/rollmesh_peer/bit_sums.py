"""Reload sums: what proves, in one pass over the words, that a model in memory holds the bits of a verified image.

For every tensor the sum of its 16-bit words and the sum of their squares, mod 2^64. They survive fusing, transposing,
zero padding and sharding (sums of parts add up), which digests do not. In bfloat16 tensors zeros of either sign and
subnormal numbers count as zero, as kernels may flush them; in others every word counts.

They find mistakes and decayed memory, not forgers: an image's digests were verified before. Numpy and numba only, so
that the weights worker measures an image before an engine stops for it, and the engine only its own memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.layout import Dtype, Layout

Sums = tuple[int, int]
"""Sum of the words of a tensor and of their squares, mod 2^64."""

BF16_EXPONENT: Final = np.uint64(0x7F80)
"""Bits of a bfloat16; all zero for zeros and subnormal numbers."""
_ANY: Final = np.uint64(0xFFFF)
_ENTRY: Final = struct.Struct("<QQ")
_PIECE: Final = 1 << 22
"""Words that one thread sums at a time."""


def sums_of_words(words: NDArray[np.uint16], *, dtype: Dtype, executor: Executor | None = None) -> Sums:
    """Return the sums of a tensor's words [n]; pieces of a large one are summed side by side in ``executor``."""
    from rollmesh_peer import bit_sums_kernel  # half a second that a process which sums nothing does not pay

    kernel = partial(bit_sums_kernel.sums, counted=BF16_EXPONENT if dtype == "bf16" else _ANY)
    if executor is None or words.size <= _PIECE:
        return _added([kernel(words)])
    return _added(executor.map(kernel, [words[start : start + _PIECE] for start in range(0, words.size, _PIECE)]))


def image_sums(image: memoryview, *, layout: Layout, executor: Executor | None = None) -> tuple[Sums, ...]:
    """Return the sums of every tensor of an image, in the layout's order."""
    words = np.frombuffer(image, dtype="<u2", count=layout.image_bytes // 2)
    return tuple(
        sums_of_words(words[offset // 2 : (offset + spec.tensor_bytes) // 2], dtype=spec.dtype, executor=executor)
        for spec, offset in zip(layout.tensors, layout.offsets, strict=True)
    )


def pack_sums(sums: Sequence[Sums]) -> bytes:
    """Return sums as 16 bytes a tensor, for a pipe."""
    return b"".join(_ENTRY.pack(*entry) for entry in sums)


def read_sums(packed: bytes, *, layout: Layout) -> tuple[Sums, ...]:
    """Return what :func:`pack_sums` was called on. ``ChildFailed("child.request")`` when it is of another layout."""
    if len(packed) != _ENTRY.size * len(layout.tensors):
        raise ChildFailed("the reload sums are not those of this layout", code="child.request")
    return tuple((total, squares) for total, squares in _ENTRY.iter_unpack(packed))


def _added(parts: Iterable[tuple[np.uint64, np.uint64]]) -> Sums:
    total, squares = 0, 0
    for more, more_squares in parts:
        total, squares = total + int(more), squares + int(more_squares)
    return total % 2**64, squares % 2**64
