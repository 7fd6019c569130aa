"""The daemon's side of the weights worker: one method a verb, with a deadline that grows with the image.

Calls run one after the other in the child. A call that was begun is always waited for, also by a cancelled task,
because an image must not change behind its keeper's back. A worker that dies raises ``ChildFailed`` here; the
supervisor starts another one, and what became of the image is the keeper's business.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from rollmesh_peer import faults
from rollmesh_peer.children.process import Child, ChildSpec, kept_environment, python_argv
from rollmesh_peer.children.supervisor import Supervisor
from rollmesh_peer.weights.worker_calls import (
    AheadAnswer,
    AheadCall,
    ApplyAnswer,
    ApplyCall,
    DigestCall,
    Digests,
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
from rollmesh_protocol.chunks import to_bitmap
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.manifest import Manifest
from rollmesh_protocol.record import Record

CALL_S: Final = 60.0
"""Least deadline of a call: a worker that is starved of its core still answers."""
SLOWEST_BYTES_PER_S: Final = 20e6
"""An old disk; one pass over the image at this rate is allowed for each time that a call goes through it."""
START_S: Final = 60.0
DIGEST_THREADS: Final = 4
"""Memory bandwidth is used up with about this many."""


class Workshop:
    """The verbs of the weights worker. Made by :func:`open_workshop`."""

    def __init__(self, supervisor: Supervisor, layout: Layout) -> None:
        self.supervisor: Final = supervisor
        self.layout: Final = layout

    @property
    def state(self) -> str:
        """What the worker is doing, in words."""
        return self.supervisor.state

    async def digest(self, image: Path, *, chunk_bytes: int) -> Digests:
        """The digests of an image's tensors and chunks, and its root."""
        return Digests.read(await self._call("digest", DigestCall(image=str(image), chunk_bytes=chunk_bytes)))

    async def sums(self, image: Path) -> bytes:
        """The reload sums of an image's tensors, as ``bit_sums.pack_sums`` writes them."""
        return SumsAnswer.read(await self._call("sums", SumsCall(image=str(image)))).sums

    async def encode(self, *, old: Path, new: Path, payload: Path, chunk_bytes: int) -> Digests:
        """Write the patch from ``old`` to ``new`` to the file ``payload``, flushed; ``payload_bytes`` 0: no change."""
        call = EncodeCall(old=str(old), new=str(new), payload=str(payload), chunk_bytes=chunk_bytes)
        return Digests.read(await self._call("encode", call))

    async def apply(
        self, image: Path, *, before: bytes, steps: Sequence[Step], is_on_disk: bool = False
    ) -> ApplyAnswer:
        """Apply ``steps`` to ``image``, whose tensors have the digests ``before``; on a disk under its undo log."""
        call = ApplyCall(image=str(image), is_on_disk=is_on_disk, before=before, steps=list(steps))
        return ApplyAnswer.read(await self._call("apply", call, passes=(4 if is_on_disk else 2) * (len(steps) + 1)))

    async def ahead(
        self, image: Path, *, before: bytes, manifest: Manifest, part: Path, held: Collection[int]
    ) -> AheadAnswer:
        """Decode what can be of a patch of which the chunks ``held`` lie in ``part``; a short call, nothing changes."""
        call = AheadCall(
            image=str(image), before=before, payload=str(part), payload_bytes=manifest.payload_bytes,
            chunk_bytes=manifest.chunk_bytes, chunks=manifest.chunks,
            held=to_bitmap(held, chunk_count=manifest.chunk_count),
        )  # fmt: skip
        return AheadAnswer.read(await self._call("ahead", call))

    async def restore(
        self,
        image: Path,
        *,
        snapshot: Path,
        tensors: bytes,
        steps: Sequence[Step],
        is_on_disk: bool = False,
        keeps_old: bool = False,
    ) -> RestoreAnswer:
        """Make ``image`` from ``snapshot``, whose tensors have the digests ``tensors``, and all steps that are good.

        On a disk, ``keeps_old`` leaves the image that there is in its place unless every step is good.
        """
        call = RestoreCall(
            image=str(image), is_on_disk=is_on_disk, keeps_old=keeps_old, snapshot=str(snapshot), tensors=tensors,
            steps=list(steps),
        )  # fmt: skip
        return RestoreAnswer.read(await self._call("restore", call, passes=4 * len(steps) + 4))

    async def recover(self, image: Path, *, tensors: bytes) -> RecoverAnswer:
        """Lead ``image``, left on a disk by an earlier worker, to the digests ``tensors``, if it has or had them."""
        return RecoverAnswer.read(await self._call("recover", RecoverCall(image=str(image), tensors=tensors), passes=4))

    async def snapshot(self, image: Path, path: Path, *, is_on_disk: bool = False) -> None:
        """Copy ``image`` to ``path``, durable before it has that name. HostError when the disk is full."""
        await self._call("snapshot", SnapshotCall(image=str(image), path=str(path), is_on_disk=is_on_disk), passes=2)

    async def _call(self, verb: str, call: Record, *, passes: int = 1) -> dict[str, object]:
        deadline_s = CALL_S + passes * self.layout.image_bytes / SLOWEST_BYTES_PER_S
        async with self.supervisor.use() as child:
            with trio.CancelScope(shield=True):
                answer = await child.call(verb, call.model_dump(), deadline_s=deadline_s)
        return answer


@asynccontextmanager
async def open_workshop(layout: Layout, *, environ: Mapping[str, str] | None = None) -> AsyncIterator[Workshop]:
    """A weights worker for images of ``layout``, kept alive until the block is left."""
    source = os.environ if environ is None else environ
    spec = ChildSpec(
        name="weights worker",
        argv=python_argv("rollmesh_peer.weights.worker"),
        environment=kept_environment(source, faults.armed(source)),
        start_deadline_s=START_S,
    )
    opening = OpenCall(
        layout=layout.encode(),
        free_disk_bytes=limits.FREE_DISK_BYTES,
        threads=min(DIGEST_THREADS, os.cpu_count() or 1),
    )

    async def prepare(child: Child) -> None:
        await child.call("open", opening.model_dump(), deadline_s=CALL_S)

    supervisor = Supervisor(spec, prepare)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        try:
            yield Workshop(supervisor, layout)
        except BaseException as error:  # noqa: BLE001 - raised again below, as it is and not in a group
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
