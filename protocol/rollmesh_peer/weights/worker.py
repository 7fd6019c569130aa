"""The weights worker: a child process that encodes, applies and digests, so that no daemon ever does.

It works on images in place through shared mappings and holds nothing between calls but the layout and what it has
decoded ahead (:mod:`rollmesh_peer.weights.ahead`). An image counts only once its tensors' digests were compared. What a
killed worker leaves in memory is for the keeper to discard; an image on a disk is changed under an undo log
(:mod:`rollmesh_peer.weights.undo_file`), and the next worker leads it back or on. Numpy, numba, blake3 and zstandard
only. Run as ``python -m rollmesh_peer.weights.worker`` by :mod:`rollmesh_peer.weights.workshop`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from blake3 import blake3

from rollmesh_peer.bit_sums import image_sums, pack_sums
from rollmesh_peer.children.child import run_child
from rollmesh_peer.children.frames import Body
from rollmesh_peer.faults import fault_point
from rollmesh_peer.weights import durable
from rollmesh_peer.weights.ahead import Ahead
from rollmesh_peer.weights.image_file import copy, flush, mapped, undo_path, unnamed_path, written_alone
from rollmesh_peer.weights.undo_file import UndoFile
from rollmesh_peer.weights.worker_calls import (
    AheadCall,
    ApplyAnswer,
    ApplyCall,
    DigestCall,
    Digests,
    Done,
    EncodeCall,
    OpenCall,
    RecoverAnswer,
    RecoverCall,
    RestoreAnswer,
    RestoreCall,
    SnapshotCall,
    Step,
    SumsAnswer,
    SumsCall,
)
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed, HostError, Refused
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.manifest import split_digests
from rollmesh_protocol.patch.blocks import blocks_of
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

    def guarded(self, _image: memoryview, changes: Iterable[Flips]) -> Iterator[Flips]:
        """The changes of one step, each handed out once it is noted."""
        for flips in changes:
            self.add(flips)
            yield flips

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
        self._ahead: Ahead | None = None
        self._free_disk_bytes = 0
        self._threads = 1
        self._executor: ThreadPoolExecutor | None = None

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            raise ChildFailed("the weights worker was not told its layout")
        return self._layout

    @property
    def decoded_ahead(self) -> Ahead:
        if self._ahead is None:
            raise ChildFailed("the weights worker was not told its layout")
        return self._ahead

    def open(self, body: Body) -> Body:
        """Learn the layout."""
        call = OpenCall.read(body)
        self._layout = _WireLayout.decode(call.layout, limit=limits.CARD_BYTES)
        self._ahead = Ahead(self._layout)
        self._free_disk_bytes = call.free_disk_bytes
        self._threads = call.threads
        self._executor = ThreadPoolExecutor(call.threads, thread_name_prefix="block") if call.threads > 1 else None
        return Done().model_dump()

    def digest(self, body: Body) -> Body:
        """Digest every tensor of an image, and the image in chunks."""
        call = DigestCall.read(body)
        with mapped(Path(call.image), length=self.layout.image_bytes) as image:
            tensors = self._tensor_digests(image)
            return Digests(
                tensors=b"".join(tensors),
                root=self.layout.root(tensors),
                chunks=_chunk_digests(image, call.chunk_bytes),
                payload_bytes=len(image),
            ).model_dump()

    def sums(self, body: Body) -> Body:
        """Sum the bits of every tensor of an image."""
        call = SumsCall.read(body)
        with mapped(Path(call.image), length=self.layout.image_bytes) as image:
            found = image_sums(image, layout=self.layout, executor=self._executor)
        return SumsAnswer(sums=pack_sums(found)).model_dump()

    def encode(self, body: Body) -> Body:
        """Write the patch between two images to a file."""
        call = EncodeCall.read(body)
        length = self.layout.image_bytes
        with mapped(Path(call.old), length=length) as old, mapped(Path(call.new), length=length) as new:
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

    def ahead(self, body: Body) -> Body:
        """Decode more blocks of a patch that is on its way."""
        call = AheadCall.read(body)
        with mapped(Path(call.image), length=self.layout.image_bytes) as image:
            return self.decoded_ahead.go_on(call, image, self._executor).model_dump()

    def apply(self, body: Body) -> Body:
        """Advance an image; on anything wrong undo it, as far as that is possible."""
        call = ApplyCall.read(body)
        ahead = self.decoded_ahead.take(image=call.image, before=call.before, step=call.steps[0])
        if not call.is_on_disk:
            return self._apply(call, UndoLog(), ahead).model_dump()
        image = Path(call.image)
        undo = UndoFile(
            undo_path(image),
            layout=self.layout,
            blocks=blocks_of(self.layout),
            before=self._root(call.before),
            after=self._root(call.steps[-1].tensors),
            spare_bytes=self._free_disk_bytes,
        )
        with written_alone(image):
            answer = self._apply(call, undo, ahead)
            if answer.outcome == "undone":
                undo.remove()
        return answer.model_dump()

    def restore(self, body: Body) -> Body:
        """Make an image from a snapshot and a chain."""
        self.decoded_ahead.forget()
        call = RestoreCall.read(body)
        if not call.is_on_disk:
            return self._restore(call).model_dump()
        image = Path(call.image)
        unnamed = unnamed_path(image)
        with written_alone(image):
            if not call.keeps_old:
                durable.remove_file(undo_path(image))
                durable.remove_file(image)
            try:
                answer = self._restore(call.model_copy(update={"image": str(unnamed)}))
                if answer.applied == len(call.steps) or (answer.applied >= 0 and not call.keeps_old):
                    self._give_name(unnamed, image)
            finally:
                unnamed.unlink(missing_ok=True)
        return answer.model_dump()

    def recover(self, body: Body) -> Body:
        """Use an image that is on the disk: undo what was begun from these digests, and compare every one of them."""
        self.decoded_ahead.forget()
        call = RecoverCall.read(body)
        path = Path(call.image)
        if not path.exists():
            return RecoverAnswer(is_good=False, detail="").model_dump()
        with written_alone(path), mapped(path, length=self.layout.image_bytes, writable=True) as image:
            undo = UndoFile.found(undo_path(path), layout=self.layout, blocks=blocks_of(self.layout))
            # A log that began elsewhere is of no use: it led here, and the image was flushed before that was written
            # down; or it leads from weights that are not wanted, and then the digests differ.
            is_begun = undo is not None and undo.before == self._root(call.tensors) and undo.lead_back(image)
            if is_begun:
                fault_point("weights.led_back")
            try:
                self._verify(image, None, before=b"", after=call.tensors)
            except Refused as error:
                return RecoverAnswer(is_good=False, detail=error.detail).model_dump()
            if is_begun:
                flush(path, image)
            durable.remove_file(undo_path(path))
        return RecoverAnswer(is_good=True, detail="").model_dump()

    def _give_name(self, unnamed: Path, image: Path) -> None:
        with mapped(unnamed, length=self.layout.image_bytes, writable=True) as made:
            flush(unnamed, made)
        fault_point("weights.image_made")
        durable.remove_file(undo_path(image))
        with durable.disk_errors(f"{image} cannot be written"):
            durable.settle(unnamed, image)

    def _restore(self, call: RestoreCall) -> RestoreAnswer:
        """Quickly, and with every step verified if that does not fit."""
        with durable.disk_errors(f"{call.snapshot} cannot be read"):
            size = Path(call.snapshot).stat().st_size
        if size != self.layout.image_bytes:
            detail = f"it has {size} bytes instead of {self.layout.image_bytes}"
            return RestoreAnswer(applied=-1, detail=detail)
        copy(Path(call.snapshot), Path(call.image), may_share=not call.is_on_disk)
        fault_point("weights.snapshot_copied")
        with mapped(Path(call.image), length=self.layout.image_bytes, writable=True) as image:
            try:
                for step in call.steps:
                    self._apply_step(image, step, UndoLog(most_bytes=0), {})
                self._verify(image, None, before=b"", after=call.steps[-1].tensors if call.steps else call.tensors)
            except (Refused, HostError) as error:
                reason = error.detail
            else:
                return RestoreAnswer(applied=len(call.steps), detail="")
        return self._restore_slowly(call, reason)

    def snapshot(self, body: Body) -> Body:
        """Copy an image to the disk."""
        call = SnapshotCall.read(body)
        path = Path(call.path)
        unfinished = path.with_name(path.name + durable.UNFINISHED)
        with durable.disk_errors("the snapshot of the weights cannot be written"):
            try:
                durable.copy_bytes(Path(call.image), unfinished, may_share=not call.is_on_disk)
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
            "sums": self.sums,
            "encode": self.encode,
            "ahead": self.ahead,
            "apply": self.apply,
            "restore": self.restore,
            "recover": self.recover,
            "snapshot": self.snapshot,
        }

    # --- applying ----------------------------------------------------------------------------------------------------
    def _apply(self, call: ApplyCall, undo: UndoLog | UndoFile, ahead: dict[int, Flips]) -> ApplyAnswer:
        """``ahead``: flips of the first step that are known."""
        path = Path(call.image)
        touched: set[int] = set()
        with mapped(path, length=self.layout.image_bytes, writable=True) as image:
            try:
                for number, step in enumerate(call.steps):
                    touched.update(self._apply_step(image, step, undo, {} if number else ahead))
                    fault_point("weights.applied")
                self._verify(image, touched, before=call.before, after=call.steps[-1].tensors)
                if call.is_on_disk:
                    flush(path, image)
                    fault_point("weights.flushed")
            except (Refused, HostError) as error:
                is_undone = undo.lead_back(image) and self._is_whole(image, call.before)
                if is_undone and call.is_on_disk:
                    fault_point("weights.led_back")
                    flush(path, image)
                return ApplyAnswer(outcome="undone" if is_undone else "broken", code=error.code, detail=error.detail)
        return ApplyAnswer(outcome="applied", code="", detail="")

    def _apply_step(self, image: memoryview, step: Step, undo: UndoLog | UndoFile, ahead: dict[int, Flips]) -> set[int]:
        """One payload, its chunks verified first; blocks are taken from ``ahead``. The tensors that it touched."""
        with mapped(Path(step.payload)) as payload:
            if _chunk_digests(payload, step.chunk_bytes) != step.chunks:
                raise Refused("chunk.digest", f"{Path(step.payload).name} has changed on the disk")
            if step.is_anchor:
                if len(payload) != len(image):
                    raise Refused("manifest.invalid", "an anchor that is not as long as the image")
                undo.give_up()
                image[:] = payload
                return set(range(len(self.layout.tensors)))
            touched: set[int] = set()
            with contextlib.closing(
                decoded(self.layout, image, payload, executor=self._executor, ahead=ahead)
            ) as blocks:
                for flips in undo.guarded(image, blocks):
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
        copy(Path(call.snapshot), Path(call.image), may_share=not call.is_on_disk)
        with mapped(Path(call.image), length=self.layout.image_bytes, writable=True) as image:
            try:
                self._verify(image, None, before=b"", after=call.tensors)
            except Refused as error:
                return RestoreAnswer(applied=-1, detail=error.detail)
            before = call.tensors
            for applied, step in enumerate(call.steps):
                answer = self._apply(ApplyCall(image=call.image, before=before, steps=[step]), UndoLog(), {})
                if answer.outcome == "broken":
                    # Only what came before this step is good, and it is lost: make that much again.
                    shorter = call.model_copy(update={"steps": call.steps[:applied]})
                    return self._restore(shorter)
                if answer.outcome == "undone":
                    return RestoreAnswer(applied=applied, detail=answer.detail)
                before = step.tensors
        return RestoreAnswer(applied=len(call.steps), detail=reason)

    def _root(self, tensors: bytes) -> bytes:
        return self.layout.root(split_digests(tensors))

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


if __name__ == "__main__":
    run_child(WeightsWorker().verbs())
