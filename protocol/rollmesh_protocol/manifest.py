"""Manifests and edges: the learner's signed description of how to get from one root to another.

A manifest is the only thing that says which bytes are good: every chunk's digest, every resulting tensor's digest and
the root they make. It is named by the blake3 of its signed envelope, so it can be fetched from anyone. An **edge** is
its short form, with which a node plans its way to the head before fetching anything.
"""

from __future__ import annotations

from typing import Final, Literal, Self

from blake3 import blake3
from pydantic import Field, model_validator

from rollmesh_protocol import limits
from rollmesh_protocol.envelope import RUN_ID_CHARS, Envelope
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.lease import DIGEST_BYTES
from rollmesh_protocol.record import Record

EdgeKind = Literal["patch", "skip", "cumulative", "anchor"]

CONTEXT_CODEC: Final = "context-1"
RAW_CODEC: Final = "raw"
Codec = Literal["context-1", "raw"]


class Manifest(Record):
    """One edge in full. ``parent`` is None for an anchor, whose payload is the whole image."""

    run: str = Field(min_length=1, max_length=RUN_ID_CHARS)
    version: int = Field(ge=1)
    step: int = Field(ge=0)
    kind: EdgeKind
    parent: bytes | None = Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)
    root: bytes = Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)
    codec: Codec
    layout: bytes = Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)
    chunk_bytes: int = Field(ge=limits.MIN_CHUNK_BYTES, le=limits.MAX_CHUNK_BYTES)
    payload_bytes: int = Field(ge=1, le=limits.MAX_MODEL_BYTES)
    chunks: bytes = Field(max_length=DIGEST_BYTES * limits.MAX_CHUNKS)
    """blake3-256 of each chunk, in order. Every chunk has ``chunk_bytes`` but the last, which has the rest."""
    tensors: bytes = Field(max_length=DIGEST_BYTES * limits.MAX_TENSORS)
    """blake3-256 of each tensor of the layout after this edge, in order."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.chunks) != DIGEST_BYTES * self.chunk_count:
            raise ValueError("the chunk digests do not match the payload's length")
        if len(self.tensors) % DIGEST_BYTES:
            raise ValueError("a tensor digest has 32 bytes")
        if (self.parent is None) != (self.kind == "anchor"):
            raise ValueError("an anchor has no parent, and every other edge has one")
        if (self.codec == RAW_CODEC) != (self.kind == "anchor"):
            raise ValueError("an anchor is raw, and every other edge is a patch")
        return self

    @property
    def chunk_count(self) -> int:
        """The number of chunks of the payload."""
        return -(-self.payload_bytes // self.chunk_bytes)

    def chunk_digest(self, index: int) -> bytes:
        """The digest that chunk ``index`` must have."""
        return self.chunks[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]

    def chunk_length(self, index: int) -> int:
        """The length of chunk ``index`` in bytes."""
        return min(self.chunk_bytes, self.payload_bytes - index * self.chunk_bytes)

    @property
    def tensor_digests(self) -> tuple[bytes, ...]:
        """The digest of each tensor after this edge."""
        return split_digests(self.tensors)

    def check(self, *, run: str, layout: Layout) -> None:
        """Refuse a manifest that is not about this run's tensors, or whose root does not follow from its table."""
        if self.run != run or self.layout != layout.digest:
            raise Refused("manifest.run")
        digests = self.tensor_digests
        if len(digests) != len(layout.tensors) or layout.root(digests) != self.root:
            raise Refused("manifest.invalid", "the root does not follow from the tensor digests")
        if self.kind == "anchor" and self.payload_bytes != layout.image_bytes:
            raise Refused("manifest.invalid", "an anchor that is not as long as the image")


class Edge(Record):
    """The short form of a manifest: from where to where, and at what price in bytes."""

    kind: EdgeKind
    version: int = Field(ge=1)
    step: int = Field(ge=0)
    parent: bytes | None = Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)
    root: bytes = Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)
    manifest: bytes = Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)
    manifest_bytes: int = Field(ge=1, le=limits.MANIFEST_BYTES)
    payload_bytes: int = Field(ge=1, le=limits.MAX_MODEL_BYTES)

    @property
    def cost_bytes(self) -> int:
        """Every byte that a node fetches for this edge."""
        return self.manifest_bytes + self.payload_bytes


def manifest_name(envelope: bytes) -> bytes:
    """The name of a manifest: blake3-256 of its encoded envelope."""
    return blake3(envelope).digest()


def open_manifest(envelope: bytes, *, name: bytes, run: str, learner: str, layout: Layout) -> Manifest:
    """The manifest called ``name``, verified to be the learner's word about this run's tensors.

    Raises:
        Refused: ``manifest.invalid``, ``manifest.run`` or an ``envelope.*`` code.
    """
    if manifest_name(envelope) != name:
        raise Refused("manifest.invalid", "the manifest does not have the digest that names it")
    sealed = Envelope.decode(envelope, limit=limits.MANIFEST_BYTES, code="manifest.invalid")
    body = sealed.open(run=run, kind="manifest", signer=learner)
    manifest = Manifest.decode(body, limit=limits.MANIFEST_BYTES, code="manifest.invalid")
    manifest.check(run=run, layout=layout)
    return manifest


def split_digests(joined: bytes) -> tuple[bytes, ...]:
    """The 32-byte digests that ``joined`` is made of."""
    return tuple(joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES))
