"""The fixed table of tensors of a run, and the flat image that holds them.

An **image** is one contiguous run of bytes: every tensor of the layout in order, row-major, little-endian, each
starting at a multiple of :data:`ALIGNMENT` with zeros between. It is what working copies, snapshots and anchors hold,
so a byte offset means the same tensor element on every machine. Names and shapes are fixed per run; patches carry
digests only. Tied tensors appear once.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Final, Literal

from blake3 import blake3
from pydantic import Field

from rollmesh_protocol import limits
from rollmesh_protocol.record import Record

ALIGNMENT: Final = 64
"""Bytes; one cache line, and enough for every dtype and for vector loads."""

Dtype = Literal["bf16", "f16", "f32"]
ITEM_BYTES: Final[dict[str, int]] = {"bf16": 2, "f16": 2, "f32": 4}


class TensorSpec(Record):
    """One tensor: its name in the model, its element type and its shape."""

    name: str = Field(min_length=1, max_length=limits.MAX_TENSOR_NAME_CHARS)
    dtype: Dtype
    shape: tuple[Annotated[int, Field(ge=0)], ...] = Field(max_length=limits.MAX_TENSOR_DIMS)

    @property
    def elements(self) -> int:
        """The number of elements; 1 for a scalar, 0 when any side is 0."""
        return math.prod(self.shape)

    @property
    def tensor_bytes(self) -> int:
        """The bytes that the elements take."""
        return self.elements * ITEM_BYTES[self.dtype]


class Layout(Record):
    """The ordered table of tensors; its digest names it."""

    tensors: tuple[TensorSpec, ...] = Field(min_length=1, max_length=limits.MAX_TENSORS)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The byte offset of each tensor in the image."""
        offsets = []
        position = 0
        for tensor in self.tensors:
            offsets.append(position)
            position += -(-tensor.tensor_bytes // ALIGNMENT) * ALIGNMENT
        return tuple(offsets)

    @cached_property
    def image_bytes(self) -> int:
        """The length of the image, padding included."""
        return self.offsets[-1] + -(-self.tensors[-1].tensor_bytes // ALIGNMENT) * ALIGNMENT

    @cached_property
    def digest(self) -> bytes:
        """blake3 over the ordered, length-prefixed table."""
        return _table_digest(b"rollmesh/layout", self, None)

    def root(self, digests: tuple[bytes, ...]) -> bytes:
        """The root of weights whose tensors have these blake3 digests: (name, dtype, shape, digest), in order."""
        if len(digests) != len(self.tensors):
            raise ValueError(f"{len(digests)} digests for {len(self.tensors)} tensors")
        return _table_digest(b"rollmesh/root", self, digests)


def _table_digest(domain: bytes, layout: Layout, digests: tuple[bytes, ...] | None) -> bytes:
    hasher = blake3(domain)
    for index, tensor in enumerate(layout.tensors):
        fields = [tensor.name.encode(), tensor.dtype.encode(), ",".join(map(str, tensor.shape)).encode()]
        if digests is not None:
            fields.append(digests[index])
        for field in fields:
            hasher.update(len(field).to_bytes(4, "little"))
            hasher.update(field)
    return hasher.digest()
