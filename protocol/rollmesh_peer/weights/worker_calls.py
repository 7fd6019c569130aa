"""What a daemon asks of its weights worker, one record a verb: both ends of the pipe read the same fields.

Not a protocol between peers: both ends are the same installed program. Paths are text, digests of several tensors or
chunks are joined 32-byte strings as in a manifest, lists are what msgpack makes of arrays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from rollmesh_protocol.manifest import Manifest
from rollmesh_protocol.record import Record


class OpenCall(Record):
    """The first call: the run's tensors, what is left free on a disk, and how many threads digests may use."""

    layout: bytes
    free_disk_bytes: int = Field(ge=0)
    threads: int = Field(ge=1, le=64)


class Step(Record):
    """One payload to apply: where it lies, its chunks, and each tensor's digest afterwards."""

    payload: str
    is_anchor: bool
    chunk_bytes: int
    chunks: bytes
    tensors: bytes


class ApplyCall(Record):
    """Apply ``steps`` to ``image`` in place, whose tensors have the digests ``before`` now.

    On a disk the image is flushed before the answer is ``applied``; its undo log is left for the daemon to remove.
    """

    image: str
    is_on_disk: bool = False
    before: bytes
    steps: list[Step]


class ApplyAnswer(Record):
    """``undone``: the image is what it was, verified; ``broken``: it must be made anew. ``code``, ``detail``: why."""

    outcome: Literal["applied", "undone", "broken"]
    code: str
    detail: str


class AheadCall(Record):
    """Decode blocks of a patch that is on its way; ``image`` has the digests ``before``, and stays as it is.

    ``payload`` is a file with some of its ``payload_bytes`` at their places, ``held`` the bitmap of the chunks there.
    """

    image: str
    before: bytes
    payload: str
    payload_bytes: int = Field(ge=1)
    chunk_bytes: int = Field(ge=1)
    chunks: bytes
    held: bytes


class AheadAnswer(Record):
    """How many blocks are decoded by now; whether another call would decode more at once, or none ever would."""

    ready: int
    is_more: bool
    is_over: bool


class RestoreCall(Record):
    """Make ``image`` anew: ``snapshot``, whose tensors have the digests ``tensors``, and then ``steps``.

    On a disk it has its name only once it is flushed. With ``keeps_old`` (there only) the image that there was is
    replaced by one with all the steps, or stays; without, it goes first to make room.
    """

    image: str
    is_on_disk: bool = False
    keeps_old: bool = False
    snapshot: str
    tensors: bytes
    steps: list[Step]


class RestoreAnswer(Record):
    """How many of the steps the image has now, all verified; -1 when the snapshot itself is not what it should be."""

    applied: int
    detail: str


class RecoverCall(Record):
    """Use the ``image`` that an earlier worker left on a disk, if its tensors have, or had, the digests ``tensors``."""

    image: str
    tensors: bytes


class RecoverAnswer(Record):
    """``is_good``: the image has these digests, is durable, and nothing is to be undone. ``detail``: why not."""

    is_good: bool
    detail: str


class EncodeCall(Record):
    """Write the patch from ``old`` to ``new`` to the file ``payload`` (flushed) and digest all of it."""

    old: str
    new: str
    payload: str
    chunk_bytes: int


class DigestCall(Record):
    """Digest the image's tensors, and its bytes in chunks."""

    image: str
    chunk_bytes: int


class Digests(Record):
    """Answer of ``encode`` and ``digest``: ``payload_bytes`` is 0, and ``chunks`` empty, when nothing changed."""

    tensors: bytes
    root: bytes
    chunks: bytes
    payload_bytes: int


class SumsCall(Record):
    """Sum the bits of ``image`` (:mod:`rollmesh_peer.bit_sums`)."""

    image: str


class SumsAnswer(Record):
    """``sums`` as ``pack_sums`` writes them."""

    sums: bytes


class SnapshotCall(Record):
    """Copy ``image`` (which is on a disk, or in memory) to the file ``path``, durable before it has that name."""

    image: str
    path: str
    is_on_disk: bool = False


class Done(Record):
    """The answer of verbs that have nothing to say."""


def step_of(manifest: Manifest, payload: Path) -> Step:
    """The step along ``manifest``."""
    return Step(
        payload=str(payload),
        is_anchor=manifest.parent is None,
        chunk_bytes=manifest.chunk_bytes,
        chunks=manifest.chunks,
        tensors=manifest.tensors,
    )
