"""The weights worker: a child process that encodes, applies and digests, so that no daemon ever does.

It works on images in place through shared mappings and holds nothing between calls but the layout. An image counts
only once its tensors' digests were compared; what a killed worker leaves behind is for the keeper to discard. Numpy,
numba, blake3 and zstandard only. Run as ``python -m rollmesh_peer.weights.worker`` by
:mod:`rollmesh_peer.weights.workshop`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from blake3 import blake3

from rollmesh_peer.children.child import run_child
from rollmesh_peer.children.frames import Body
from rollmesh_peer.faults import fault_point
from rollmesh_peer.weights import durable
from rollmesh_peer.weights.worker_calls import (
    ApplyAnswer,
    ApplyCall,
    DigestCall,
    Digests,
    Done,
    EncodeCall,
    OpenCall,
    RestoreAnswer,
    RestoreCall,
    SnapshotCall,
    Step,
)
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed, HostError, Refused
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.manifest import split_digests
from rollmesh_protocol.patch.codec import Flips, decoded, encode_patch

UNDO_BYTES: Final = 256 << 20
"""Of flips kept for undoing: more than 40 million changed weights. Beyond, the keeper makes the image anew."""
_PARALLEL_BYTES: Final = 1 << 20
"""Tensors below this are digested faster by one thread."""


class UndoLog:
    """The flips of a change that is under way, in memory, up to ``most_bytes`` of them; they are their own inverse."""

    def __init__(self, *, most_bytes: int = UNDO_BYTES) -> None:
        self._flips: list[Flips] = []
        self._room = most_bytes
        self._is_given_up = False

    def add(self, flips: Flips) -> None:
        """Note what is going to be flipped."""
        self._room -= flips.positions.nbytes + flips.bits.nbytes
        if self._room < 0:
            self.give_up()
        if not self._is_given_up:
            self._flips.append(flips)

    def give_up(self) -> None:
        """What happens now cannot be undone from here: an anchor overwrites, or the change is too large."""
        self._is_given_up = True
        self._flips.clear()

    def lead_back(self, image: memoryview) -> bool:
        """Undo everything, last first. False where that is not possible."""
        for flips in reversed(self._flips):
            flips.apply(image)
        self._flips.clear()
        return not self._is_given_up


class WeightsWorker:
    """The verbs. Every image and snapshot has ``layout.image_bytes`` bytes; a file of another length is refused."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._threads = 1
        self._executor: ThreadPoolExecutor | None = None

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            raise ChildFailed("the weights worker was not told its layout")
        return self._layout

    def open(self, body: Body) -> Body:
        """Learn the layout."""
        call = OpenCall.read(body)
        self._layout = _WireLayout.decode(call.layout, limit=limits.CARD_BYTES)
        self._threads = call.threads
        self._executor = ThreadPoolExecutor(call.threads, thread_name_prefix="block") if call.threads > 1 else None
        return Done().model_dump()

    def digest(self, body: Body) -> Body:
        """Digest every tensor of an image, and the image in chunks."""
        call = DigestCall.read(body)
        with _mapped(call.image, length=self.layout.image_bytes) as image:
            tensors = self._tensor_digests(image)
            return Digests(
                tensors=b"".join(tensors),
                root=self.layout.root(tensors),
                chunks=_chunk_digests(image, call.chunk_bytes),
                payload_bytes=len(image),
            ).model_dump()

    def encode(self, body: Body) -> Body:
        """Write the patch between two images to a file."""
        call = EncodeCall.read(body)
        length = self.layout.image_bytes
        with _mapped(call.old, length=length) as old, _mapped(call.new, length=length) as new:
            payload = encode_patch(self.layout, old=old, new=new, executor=self._executor) or b""
            tensors = self._tensor_digests(new)
        fault_point("weights.encoded")
        if payload:
            durable.write_file(Path(call.payload), payload)
        return Digests(
            tensors=b"".join(tensors),
            root=self.layout.root(tensors),
            chunks=_chunk_digests(memoryview(payload), call.chunk_bytes),
            payload_bytes=len(payload),
        ).model_dump()

    def apply(self, body: Body) -> Body:
        """Advance an image; on anything wrong undo it, as far as that is possible."""
        call = ApplyCall.read(body)
        expected = call.steps[-1].tensors
        undo = UndoLog()
        touched: set[int] = set()
        with _mapped(call.image, length=self.layout.image_bytes, writable=True) as image:
            try:
                for step in call.steps:
                    touched.update(self._apply_step(image, step, undo))
                    fault_point("weights.applied")
                self._verify(image, touched, before=call.before, after=expected)
            except (Refused, HostError) as error:
                undone = undo.lead_back(image) and self._is_whole(image, call.before)
                return ApplyAnswer(
                    outcome="undone" if undone else "broken", code=error.code, detail=error.detail
                ).model_dump()
        return ApplyAnswer(outcome="applied", code="", detail="").model_dump()

    def restore(self, body: Body) -> Body:
        """Make an image from a snapshot and a chain: quickly, and with every step verified if that does not fit."""
        call = RestoreCall.read(body)
        with durable.disk_errors(f"{call.snapshot} cannot be read"):
            size = Path(call.snapshot).stat().st_size
        if size != self.layout.image_bytes:
            detail = f"it has {size} bytes instead of {self.layout.image_bytes}"
            return RestoreAnswer(applied=-1, detail=detail).model_dump()
        _copy(Path(call.snapshot), Path(call.image))
        fault_point("weights.snapshot_copied")
        with _mapped(call.image, length=self.layout.image_bytes, writable=True) as image:
            try:
                for step in call.steps:
                    self._apply_step(image, step, UndoLog(most_bytes=0))
                self._verify(image, None, before=b"", after=call.steps[-1].tensors if call.steps else call.tensors)
            except (Refused, HostError) as error:
                reason = error.detail
            else:
                return RestoreAnswer(applied=len(call.steps), detail="").model_dump()
        return self._restore_slowly(call, reason).model_dump()

    def snapshot(self, body: Body) -> Body:
        """Copy an image to the disk."""
        call = SnapshotCall.read(body)
        path = Path(call.path)
        unfinished = path.with_name(path.name + durable.UNFINISHED)
        with durable.disk_errors("the snapshot of the weights cannot be written"):
            try:
                durable.copy_bytes(Path(call.image), unfinished)
                fault_point("weights.snapshot_written")
                durable.sync_file(unfinished)
                durable.settle(unfinished, path)
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
        return Done().model_dump()

    def verbs(self) -> dict[str, Callable[[Body], Body]]:
        """What this worker answers to."""
        return {
            "open": self.open,
            "digest": self.digest,
            "encode": self.encode,
            "apply": self.apply,
            "restore": self.restore,
            "snapshot": self.snapshot,
        }

    # --- applying ----------------------------------------------------------------------------------------------------
    def _apply_step(self, image: memoryview, step: Step, undo: UndoLog) -> set[int]:
        """One payload, its chunks verified first; the tensors that it touched."""
        with _mapped(step.payload) as payload:
            if _chunk_digests(payload, step.chunk_bytes) != step.chunks:
                raise Refused("chunk.digest", f"{Path(step.payload).name} has changed on the disk")
            if step.is_anchor:
                if len(payload) != len(image):
                    raise Refused("manifest.invalid", "an anchor that is not as long as the image")
                undo.give_up()
                image[:] = payload
                return set(range(len(self.layout.tensors)))
            touched: set[int] = set()
            with contextlib.closing(decoded(self.layout, image, payload, executor=self._executor)) as blocks:
                for flips in blocks:
                    undo.add(flips)
                    flips.apply(image)
                    touched |= flips.touched
            return touched

    def _verify(self, image: memoryview, touched: set[int] | None, *, before: bytes, after: bytes) -> None:
        """Refuse an image unless its tensors have the digests ``after``; only ``touched`` ones are read, None: all."""
        known, expected = split_digests(before), split_digests(after)
        for index, tensor in enumerate(self.layout.tensors):
            is_read = touched is None or index in touched
            found = self._tensor_digest(image, index) if is_read else known[index]
            if found != expected[index]:
                raise Refused("patch.root", f"the tensor {tensor.name} does not have the promised digest")

    def _is_whole(self, image: memoryview, tensors: bytes) -> bool:
        """True when every tensor has these digests."""
        return b"".join(self._tensor_digests(image)) == tensors

    def _restore_slowly(self, call: RestoreCall, reason: str) -> RestoreAnswer:
        _copy(Path(call.snapshot), Path(call.image))
        with _mapped(call.image, length=self.layout.image_bytes, writable=True) as image:
            try:
                self._verify(image, None, before=b"", after=call.tensors)
            except Refused as error:
                return RestoreAnswer(applied=-1, detail=error.detail)
            before = call.tensors
            for applied, step in enumerate(call.steps):
                answer = ApplyAnswer.read(
                    self.apply(ApplyCall(image=call.image, before=before, steps=[step]).model_dump())
                )
                if answer.outcome == "broken":
                    # Only what came before this step is good, and it is lost: make that much again.
                    shorter = call.model_copy(update={"steps": call.steps[:applied]})
                    return RestoreAnswer.read(self.restore(shorter.model_dump()))
                if answer.outcome == "undone":
                    return RestoreAnswer(applied=applied, detail=answer.detail)
                before = step.tensors
        return RestoreAnswer(applied=len(call.steps), detail=reason)

    # --- digests -----------------------------------------------------------------------------------------------------
    def _tensor_digests(self, image: memoryview) -> tuple[bytes, ...]:
        return tuple(self._tensor_digest(image, index) for index in range(len(self.layout.tensors)))

    def _tensor_digest(self, image: memoryview, index: int) -> bytes:
        start = self.layout.offsets[index]
        tensor = image[start : start + self.layout.tensors[index].tensor_bytes]
        return blake3(tensor, max_threads=self._threads if len(tensor) >= _PARALLEL_BYTES else 1).digest()


class _WireLayout(Layout):
    """A layout as the daemon sends it; large models have more values in it than an ordinary message may."""

    max_items = limits.MAX_CARD_ITEMS


def _chunk_digests(payload: memoryview, chunk_bytes: int) -> bytes:
    starts = range(0, len(payload), chunk_bytes)
    return b"".join(blake3(payload[start : start + chunk_bytes]).digest() for start in starts)


@contextlib.contextmanager
def _mapped(path: str, *, length: int | None = None, writable: bool = False) -> Iterator[memoryview]:
    """A file's bytes, shared with everybody else who maps it."""
    with durable.disk_errors(f"{path} cannot be read"), Path(path).open("r+b" if writable else "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0 or length not in (None, size):
            raise HostError(f"{path} has {size} bytes where {length} are expected")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    view = memoryview(mapping)
    try:
        yield view
    finally:
        # Arrays in the frames of an exception on its way may still look at it; then the last of them closes it.
        with contextlib.suppress(BufferError):
            view.release()
            mapping.close()


def _copy(source: Path, target: Path) -> None:
    with durable.disk_errors(f"{source} cannot be copied to {target}"):
        target.unlink(missing_ok=True)  # never truncated: somebody's mapping of it would end in SIGBUS
        durable.copy_bytes(source, target)


if __name__ == "__main__":
    run_child(WeightsWorker().verbs())
