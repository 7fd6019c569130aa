"""The weights worker's head start on a patch: its blocks, decoded while other chunks of it are still on their way.

A block needs the head of the payload, its own span, and the old image: nothing else. So what it flips is known as soon
as the chunks under its span are there, and kept in memory until the payload is complete and applied. Invariant: what is
handed out for an apply is what decoding would give then. It was decoded from bytes that were compared with the digests
of their chunks after they were read, against the image of the same digests, and everything is forgotten when an image
changes (the worker calls :meth:`Ahead.take` or :meth:`Ahead.forget`).

Nothing is written here, and nothing is refused: a payload in which something is wrong is left to the apply, which says
so. Not here: when to call (:mod:`rollmesh_peer.weights.preparing`).
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Executor
from pathlib import Path
from typing import BinaryIO, Final

from blake3 import blake3

from rollmesh_peer.faults import fault_point
from rollmesh_peer.weights import durable
from rollmesh_peer.weights.worker_calls import AheadAnswer, AheadCall, Step
from rollmesh_protocol.chunks import from_bitmap
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.layout import ITEM_BYTES, Layout
from rollmesh_protocol.manifest import split_digests
from rollmesh_protocol.patch.codec import START_BYTES, Flips, Patch, head_end, in_order

AHEAD_BYTES: Final = 128 << 20
"""Of flips kept: some twenty million changed weights of two bytes. Blocks beyond are decoded by the apply."""
CALL_BYTES: Final = 64 << 20
"""Of image and payload that one call goes through: some 50 ms on one core, for which an apply may have to wait."""


class Ahead:
    """What is decoded of one payload; a call about another one, or another image, begins anew."""

    def __init__(self, layout: Layout, *, most_bytes: int = AHEAD_BYTES, call_bytes: int = CALL_BYTES) -> None:
        self._layout = layout
        self._most_bytes = most_bytes
        self._call_bytes = call_bytes
        self._begun: _Begun | None = None

    def go_on(self, call: AheadCall, image: memoryview, executor: Executor | None) -> AheadAnswer:
        """Decode more blocks, at most ``call_bytes`` of them (or one). HostError when the payload cannot be read."""
        subject = (call.image, call.before, call.chunk_bytes, call.chunks)
        if self._begun is None or self._begun.subject != subject:
            self._begun = _Begun(self._layout, subject, room=self._most_bytes)
        path = Path(call.payload)
        with durable.disk_errors(f"{path} cannot be read"), path.open("rb") as file:
            is_more = self._begun.go_on(_Chunks(file, call, bad=self._begun.bad), image, executor, self._call_bytes)
        fault_point("weights.decoded_ahead")
        return AheadAnswer(ready=len(self._begun.flips), is_more=is_more, is_over=self._begun.is_over)

    def take(self, *, image: str, before: bytes, step: Step) -> dict[int, Flips]:
        """What is known of ``step``'s flips, by block, for an image that has the digests ``before``; then forget it."""
        begun, self._begun = self._begun, None
        if begun is None or step.is_anchor or begun.subject != (image, before, step.chunk_bytes, step.chunks):
            return {}
        return begun.flips

    def forget(self) -> None:
        """An image changes."""
        self._begun = None


class _Begun:
    """One payload against one image. ``waiting``: blocks that may still be decoded, None before the head is read."""

    def __init__(self, layout: Layout, subject: tuple[str, bytes, int, bytes], *, room: int) -> None:
        self.subject: Final = subject
        self.flips: dict[int, Flips] = {}
        self.bad: set[int] = set()
        """Chunks that were not what they should be when they were read: not trusted again."""
        self._layout = layout
        self._room = room
        self._patch: Patch | None = None
        self._waiting: list[int] = []
        self._is_hopeless = False

    @property
    def is_over(self) -> bool:
        """True when no further block will be decoded, whatever comes."""
        return self._is_hopeless or (self._patch is not None and not self._waiting)

    def go_on(self, chunks: _Chunks, image: memoryview, executor: Executor | None, most_bytes: int) -> bool:
        """Decode what ``chunks`` allow; True when there is more than ``most_bytes`` of that."""
        if self.is_over:
            return False
        try:
            patch = self._patch or self._begin(chunks, most_bytes)
            if patch is None:
                return False
            chosen, is_more = self._choose(patch, chunks, most_bytes)
            found = in_order(lambda item: patch.decode_streams(item[0], image, item[1]), chosen, executor)
            for (index, _), flips in zip(chosen, found, strict=True):
                self.flips[index] = flips
        except Refused:
            self._is_hopeless = True
            self.flips.clear()
            return False
        return is_more

    def _begin(self, chunks: _Chunks, most_bytes: int) -> Patch | None:
        """Read the head; None while it is not there. Refused: there is nothing to be had of this payload."""
        if not chunks.has(0, START_BYTES):
            return None
        end = head_end(chunks.read(0, START_BYTES))
        if end > min(most_bytes, chunks.payload_bytes):
            raise Refused("patch.invalid", "a head that is too long to be read ahead")
        if not chunks.has(0, end):
            return None
        patch = Patch(self._layout, chunks.read(0, end))
        if patch.payload_bytes != chunks.payload_bytes:
            raise Refused("patch.invalid", "the payload does not end with its last block")
        self._patch = patch
        self._waiting = [index for index in range(len(patch.blocks)) if patch.changes(index)]
        return patch

    def _choose(self, patch: Patch, chunks: _Chunks, most_bytes: int) -> tuple[list[tuple[int, bytes]], bool]:
        """Blocks to decode now, with their streams; and whether some had to be left for the next call."""
        chosen: list[tuple[int, bytes]] = []
        later: list[int] = []
        is_more = False
        spent = 0
        for index in self._waiting:
            start, end = patch.span(index)
            size = patch.flips_bytes(index)
            if size > self._room:
                continue  # never: the room only shrinks
            if not chunks.has(start, end):
                later.append(index)
            elif spent >= most_bytes:
                later.append(index)
                is_more = True
            else:
                spent += end - start + patch.blocks[index].elements * ITEM_BYTES[patch.blocks[index].dtype]
                try:
                    chosen.append((index, chunks.read(start, end)))
                except Refused:
                    continue  # never from this chunk; the apply reads what lies there then
                self._room -= size
        self._waiting = later
        return chosen, is_more


class _Chunks:
    """The chunks that are held of a payload, in ``file``; ``bad`` grows by those that have a wrong digest."""

    def __init__(self, file: BinaryIO, call: AheadCall, *, bad: set[int]) -> None:
        self.payload_bytes: Final = call.payload_bytes
        self._file = file
        self._chunk_bytes = call.chunk_bytes
        self._digests = split_digests(call.chunks)
        self._held: Collection[int] = from_bitmap(call.held, chunk_count=len(self._digests))
        self._bad = bad
        self._last = (-1, b"")

    def has(self, start: int, end: int) -> bool:
        """True when all bytes from ``start`` to ``end`` lie in held chunks."""
        return all(index in self._held for index in self._under(start, end))

    def read(self, start: int, end: int) -> bytes:
        """These bytes, as the digests of their chunks promise; Refused ``chunk.digest`` where they are others."""
        under = self._under(start, end)
        read = b"".join(self._chunk(index) for index in under)
        skipped = start - under.start * self._chunk_bytes
        return read[skipped : skipped + end - start]

    def _under(self, start: int, end: int) -> range:
        return range(start // self._chunk_bytes, -(-end // self._chunk_bytes))

    def _chunk(self, index: int) -> bytes:
        """One chunk; neighbours in a payload mostly share theirs, so the last one is kept."""
        if self._last[0] != index:
            if index in self._bad:
                raise Refused("chunk.digest")
            start = index * self._chunk_bytes
            self._file.seek(start)
            chunk = self._file.read(min(self._chunk_bytes, self.payload_bytes - start))
            if blake3(chunk).digest() != self._digests[index]:
                self._bad.add(index)
                raise Refused("chunk.digest")
            self._last = (index, chunk)
        return self._last[1]
