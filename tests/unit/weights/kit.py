"""Small models, their images, and signed edges between them: what the tests of the weights layer are made of."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from blake3 import blake3

from rollmesh_protocol.envelope import seal
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.layout import Layout, TensorSpec
from rollmesh_protocol.manifest import Manifest, manifest_name
from rollmesh_protocol.patch.codec import encode_patch

RUN = "run-of-the-tests"
LEARNER = Identity(bytes(range(32)))
CHUNK = 4096

MIXED = Layout(
    tensors=(
        TensorSpec(name="embed", dtype="bf16", shape=(300, 33)),
        TensorSpec(name="empty", dtype="bf16", shape=(0, 7)),
        TensorSpec(name="scalar", dtype="f32", shape=()),
        TensorSpec(name="norm", dtype="f32", shape=(129,)),
        TensorSpec(name="half", dtype="f16", shape=(3, 5, 7)),
        TensorSpec(name="empty.last.but.one", dtype="f32", shape=(5, 0)),
        TensorSpec(name="head", dtype="bf16", shape=(4, 1000)),
    )
)
"""Every dtype, a scalar, empty tensors and odd shapes: about 30 kB."""


def sized(megabytes: int, *, tensors: int = 4) -> Layout:
    """A bf16 model of about this size."""
    rows = megabytes * 1_000_000 // 2 // 1000 // tensors
    return Layout(tensors=tuple(TensorSpec(name=f"w{i}", dtype="bf16", shape=(rows, 1000)) for i in range(tensors)))


def random_image(layout: Layout, seed: int) -> bytes:
    """Random bits in every element (NaNs and all), zeros between."""
    image = bytearray(layout.image_bytes)
    generator = np.random.default_rng(seed)
    for tensor, offset in zip(layout.tensors, layout.offsets, strict=True):
        image[offset : offset + tensor.tensor_bytes] = generator.bytes(tensor.tensor_bytes)
    return bytes(image)


def nudged(layout: Layout, image: bytes, seed: int, *, share: float = 0.01) -> bytes:
    """``image`` with about ``share`` of its elements' 16-bit words changed by a few."""
    words = np.frombuffer(image, "<u2").copy()
    generator = np.random.default_rng(seed)
    inside = np.concatenate(
        [
            np.arange(offset // 2, (offset + tensor.tensor_bytes) // 2)
            for tensor, offset in zip(layout.tensors, layout.offsets, strict=True)
        ]
    )
    if share >= 1:
        chosen = inside
    else:
        chosen = inside[np.unique(generator.integers(0, len(inside), max(1, int(share * len(inside)))))]
    words[chosen] += generator.integers(1, 4, len(chosen)).astype(np.uint16)
    return words.tobytes()


def digests(layout: Layout, image: bytes) -> tuple[bytes, ...]:
    """The digest of every tensor."""
    return tuple(
        blake3(image[offset : offset + tensor.tensor_bytes]).digest()
        for tensor, offset in zip(layout.tensors, layout.offsets, strict=True)
    )


def root_of(layout: Layout, image: bytes) -> bytes:
    """The root of an image."""
    return layout.root(digests(layout, image))


@dataclass(frozen=True)
class SignedEdge:
    """A manifest as it travels, and its payload."""

    name: bytes
    envelope: bytes
    manifest: Manifest
    payload: bytes

    @property
    def link(self) -> tuple[bytes, Manifest]:
        return self.name, self.manifest

    def chunk(self, index: int) -> bytes:
        start = index * self.manifest.chunk_bytes
        return self.payload[start : start + self.manifest.chunk_length(index)]


def sign(
    layout: Layout,
    *,
    version: int,
    step: int | None = None,
    parent: bytes | None,
    image: bytes,
    payload: bytes,
    identity: Identity = LEARNER,
    run: str = RUN,
    chunk_bytes: int = CHUNK,
) -> SignedEdge:
    """An edge to ``image`` with any payload, right or wrong."""
    kind: Literal["anchor", "patch"] = "anchor" if parent is None else "patch"
    starts = range(0, len(payload), chunk_bytes)
    manifest = Manifest(
        run=run,
        version=version,
        step=version - 1 if step is None else step,
        kind=kind,
        parent=parent,
        root=root_of(layout, image),
        codec="raw" if parent is None else "context-1",
        layout=layout.digest,
        chunk_bytes=chunk_bytes,
        payload_bytes=len(payload),
        chunks=b"".join(blake3(payload[start : start + chunk_bytes]).digest() for start in starts),
        tensors=b"".join(digests(layout, image)),
    )
    envelope = seal(manifest.encode(), run=run, kind="manifest", identity=identity).encode()
    return SignedEdge(name=manifest_name(envelope), envelope=envelope, manifest=manifest, payload=payload)


def anchor(layout: Layout, image: bytes, *, version: int, chunk_bytes: int = CHUNK) -> SignedEdge:
    """The whole image as an edge."""
    return sign(layout, version=version, parent=None, image=image, payload=image, chunk_bytes=chunk_bytes)


def patch(layout: Layout, old: bytes, new: bytes, *, version: int, chunk_bytes: int = CHUNK) -> SignedEdge:
    """The edge between two images."""
    payload = encode_patch(layout, old=old, new=new)
    assert payload is not None
    parent = root_of(layout, old)
    return sign(layout, version=version, parent=parent, image=new, payload=payload, chunk_bytes=chunk_bytes)


def versions(
    layout: Layout, base: bytes, *, first: int, last: int, chunk_bytes: int = CHUNK
) -> tuple[list[SignedEdge], list[bytes]]:
    """Patches for these versions, each from the image before, beginning with ``base``; and the images they make."""
    edges, images = [], [base]
    for version in range(first, last + 1):
        images.append(nudged(layout, images[-1], version))
        edges.append(patch(layout, images[-2], images[-1], version=version, chunk_bytes=chunk_bytes))
    return edges, images[1:]


def write(path: Path, content: bytes) -> Path:
    """A file with this content."""
    path.write_bytes(content)
    return path


def inode(image: Path, *, witnesses: Path) -> int:
    """Which file this is. A second name for it in the folder ``witnesses`` keeps its number from any later file."""
    number = image.stat().st_ino
    with contextlib.suppress(FileExistsError):
        os.link(image, witnesses / f"witness-{number}")
    return number
