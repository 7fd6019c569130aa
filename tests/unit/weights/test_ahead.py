"""Decoding ahead: whatever the order in which chunks come, the image that comes out is the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from blake3 import blake3

from rollmesh_peer.weights.ahead import Ahead
from rollmesh_peer.weights.worker import WeightsWorker
from rollmesh_peer.weights.worker_calls import (
    AheadAnswer,
    AheadCall,
    ApplyAnswer,
    ApplyCall,
    OpenCall,
    RecoverCall,
    RestoreCall,
    Step,
)
from rollmesh_protocol.chunks import to_bitmap
from rollmesh_protocol.patch import blocks as blocks_module
from rollmesh_protocol.patch.codec import CONTEXT, DENSE, Patch, encode_patch, head_end
from tests.unit.weights.kit import MIXED, digests, nudged, random_image

BASE = random_image(MIXED, 1)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 1,000 elements: some fifteen of them, of every dtype."""
    monkeypatch.setattr(blocks_module, "BLOCK_ELEMENTS", 1000)


@pytest.fixture
def decoded_late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that an apply had to decode itself."""
    late: list[int] = []
    decode = Patch.decode

    def noted(patch: Patch, index: int, image: bytes) -> object:
        late.append(index)
        return decode(patch, index, image)

    monkeypatch.setattr(Patch, "decode", noted)
    return late


class Site:
    """A worker, an image that it keeps, and one payload of which chunks come and go."""

    def __init__(
        self,
        folder: Path,
        new: bytes,
        *,
        chunk_bytes: int = 128,
        payload: bytes | None = None,
        is_on_disk: bool = False,
    ) -> None:
        self.image = folder / "image"
        self.image.write_bytes(BASE)
        self.part = folder / "payload"
        self.payload = payload or encode_patch(MIXED, old=BASE, new=new) or b""
        self.chunk_bytes = chunk_bytes
        self.is_on_disk = is_on_disk
        self.before = b"".join(digests(MIXED, BASE))
        starts = range(0, len(self.payload), chunk_bytes)
        self.count = len(starts)
        self.step = Step(
            payload=str(self.part),
            is_anchor=False,
            chunk_bytes=chunk_bytes,
            chunks=b"".join(blake3(self.payload[start : start + chunk_bytes]).digest() for start in starts),
            tensors=b"".join(digests(MIXED, new)),
        )
        self.held: set[int] = set()
        self.part.write_bytes(bytes(len(self.payload)))
        self.worker = WeightsWorker()
        self.worker.open(OpenCall(layout=MIXED.encode(), free_disk_bytes=0, threads=2).model_dump())

    def bring(self, chunks: Collection[int], *, flipped: int = 0) -> None:
        """These chunks come in; with ``flipped`` they rot at once."""
        with self.part.open("r+b") as file:
            for index in chunks:
                start = index * self.chunk_bytes
                chunk = self.payload[start : start + self.chunk_bytes]
                file.seek(start)
                file.write(bytes(byte ^ flipped for byte in chunk))
        self.held |= set(chunks)

    def bound(self, **options: int) -> None:
        self.worker._ahead = Ahead(MIXED, **options)

    def ahead(self) -> AheadAnswer:
        call = AheadCall(
            image=str(self.image),
            before=self.before,
            payload=str(self.part),
            payload_bytes=len(self.payload),
            chunk_bytes=self.chunk_bytes,
            chunks=self.step.chunks,
            held=to_bitmap(self.held, chunk_count=self.count),
        )
        return AheadAnswer.read(self.worker.ahead(call.model_dump()))

    def apply(self) -> ApplyAnswer:
        call = ApplyCall(image=str(self.image), is_on_disk=self.is_on_disk, before=self.before, steps=[self.step])
        return ApplyAnswer.read(self.worker.apply(call.model_dump()))

    def taken(self) -> int:
        """How many blocks are kept for this step; they are forgotten by that."""
        return len(self.worker.decoded_ahead.take(image=str(self.image), before=self.before, step=self.step))

    def decodable(self) -> set[int]:
        """The blocks of which everything is held, told from the whole payload."""
        patch = Patch(MIXED, self.payload)

        def has(start: int, end: int) -> bool:
            return all(index in self.held for index in range(start // self.chunk_bytes, -(-end // self.chunk_bytes)))

        if not has(0, head_end(self.payload)):
            return set()
        return {index for index in range(len(patch.blocks)) if patch.changes(index) and has(*patch.span(index))}


# --- the same bits ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_on_disk", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_chunks_in_any_order_and_of_any_size_give_the_same_image(
    tmp_path: Path, decoded_late: list[int], seed: int, *, is_on_disk: bool
) -> None:
    chance = Random(seed)
    new = nudged(MIXED, BASE, seed, share=chance.choice([0.001, 0.02, 0.3]))
    site = Site(tmp_path, new, chunk_bytes=chance.choice([64, 100, 333, 1024, 4096]), is_on_disk=is_on_disk)
    order = chance.sample(range(site.count), site.count)
    last = order.pop()
    while order:
        some, order = order[: chance.randint(1, 5)], order[5:]
        site.bring(some)
        answer = site.ahead()
        assert answer.ready == len(site.decodable())
        assert not answer.is_more
        assert site.image.read_bytes() == BASE
    ready = site.decodable()
    site.bring(set(range(site.count)) - site.held | {last})
    assert site.apply().outcome == "applied"
    assert site.image.read_bytes() == new
    assert set(decoded_late) == site.decodable() - ready


def test_context_coded_and_dense_blocks_of_every_dtype_are_among_them(tmp_path: Path, decoded_late: list[int]) -> None:
    sparse, dense = nudged(MIXED, BASE, 1, share=0.05), random_image(MIXED, 9)
    half = MIXED.offsets[3] + MIXED.tensors[3].tensor_bytes // 2
    new = dense[:half] + sparse[half:]
    site = Site(tmp_path, new)
    patch = Patch(MIXED, site.payload)
    kinds = {(block.dtype, entry.kind) for block, entry in zip(patch.blocks, patch._entries, strict=True)}
    assert {("bf16", CONTEXT), ("bf16", DENSE), ("f16", CONTEXT)} <= kinds
    assert "f32" in {dtype for dtype, _ in kinds}
    site.bring(range(site.count))
    assert site.ahead().is_over
    assert site.apply().outcome == "applied"
    assert site.image.read_bytes() == new
    assert decoded_late == []


def test_without_the_head_nothing_is_decoded(tmp_path: Path) -> None:
    site = Site(tmp_path, nudged(MIXED, BASE, 2))
    site.bring(range(1, site.count))
    assert site.ahead() == AheadAnswer(ready=0, is_more=False, is_over=False)
    site.bring([0])
    answer = site.ahead()
    assert answer.is_over
    assert answer.ready == len(site.decodable()) > 10


# --- bounds ----------------------------------------------------------------------------------------------------------
def test_what_is_kept_stays_below_its_bound(tmp_path: Path, decoded_late: list[int]) -> None:
    new = nudged(MIXED, BASE, 3, share=0.05)
    site = Site(tmp_path, new)
    site.bound(most_bytes=1500)
    site.bring(range(site.count))
    answer = site.ahead()
    begun = site.worker.decoded_ahead._begun
    assert begun is not None
    kept = sum(flips.positions.nbytes + flips.bits.nbytes for flips in begun.flips.values())
    assert 1000 < kept <= 1500
    assert answer.is_over
    assert 0 < answer.ready < len(site.decodable())
    assert site.apply().outcome == "applied"
    assert site.image.read_bytes() == new
    assert len(decoded_late) == len(site.decodable()) - answer.ready


def test_one_call_does_a_part_and_says_so(tmp_path: Path) -> None:
    site = Site(tmp_path, nudged(MIXED, BASE, 4))
    site.bound(call_bytes=5000)  # two blocks of 2,000 bytes, and what goes beyond
    site.bring(range(site.count))
    answers = [site.ahead()]
    while answers[-1].is_more:
        answers.append(site.ahead())
    steps = [after.ready - before.ready for before, after in pairwise(answers)]
    assert answers[0].ready == 3
    assert set(steps) <= {1, 2, 3}
    assert answers[-1].is_over
    assert answers[-1].ready == len(site.decodable())


# --- what is forgotten -----------------------------------------------------------------------------------------------
def restored(site: Site) -> None:
    snapshot = site.image.with_name("snapshot")
    snapshot.write_bytes(BASE)
    call = RestoreCall(image=str(site.image), snapshot=str(snapshot), tensors=site.before, steps=[])
    site.worker.restore(call.model_dump())


def recovered(site: Site) -> None:
    site.worker.recover(RecoverCall(image=str(site.image), tensors=site.before).model_dump())


def applied(site: Site) -> None:
    assert site.apply().outcome == "applied"


def applied_in_vain(site: Site) -> None:
    step = site.step.model_copy(update={"tensors": site.before})
    call = ApplyCall(image=str(site.image), before=site.before, steps=[step])
    assert ApplyAnswer.read(site.worker.apply(call.model_dump())).outcome == "undone"


def begun_elsewhere(site: Site) -> None:
    site.before = bytes(len(site.before))
    site.ahead()
    site.before = b"".join(digests(MIXED, BASE))


@pytest.mark.parametrize("change", [restored, recovered, applied, applied_in_vain, begun_elsewhere])
def test_a_changed_image_or_another_patch_ends_it(tmp_path: Path, change: Callable[[Site], None]) -> None:
    site = Site(tmp_path, nudged(MIXED, BASE, 5))
    site.bring(range(site.count))
    ready = site.ahead().ready
    assert site.taken() == ready > 10
    assert site.taken() == 0
    site.ahead()
    change(site)
    assert site.taken() == 0


@pytest.mark.parametrize("field", ["before", "chunks", "chunk_bytes", "is_anchor"])
def test_flips_are_for_their_own_step_only(tmp_path: Path, field: str) -> None:
    site = Site(tmp_path, nudged(MIXED, BASE, 5))
    site.bring(range(site.count))
    site.ahead()
    if field == "before":
        site.before = bytes(len(site.before))
    else:
        other = {"chunks": bytes(len(site.step.chunks)), "chunk_bytes": 129, "is_anchor": True}[field]
        site.step = site.step.model_copy(update={field: other})
    assert site.taken() == 0


# --- what is wrong ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", [0, 4, 20, 0.3, 0.6, 0.9, -1])
def test_a_wrong_payload_is_refused_as_it_would_be_anyway(tmp_path: Path, place: float) -> None:
    """Its chunks are what the manifest says: it is the learner who is wrong."""
    new = nudged(MIXED, BASE, 6, share=0.05)
    payload = bytearray(encode_patch(MIXED, old=BASE, new=new) or b"")
    payload[place if isinstance(place, int) else int(place * len(payload))] ^= 0x55
    answers = []
    for is_ahead in (False, True):
        site = Site(tmp_path, new, payload=bytes(payload))
        site.bring(range(site.count))
        if is_ahead:
            site.ahead()
        answers.append(site.apply())
        assert site.image.read_bytes() == BASE
    assert answers[0] == answers[1]
    assert answers[0].outcome == "undone"
    assert answers[0].code in ("patch.invalid", "patch.root")


def test_a_patch_to_other_weights_than_promised_is_undone(tmp_path: Path, decoded_late: list[int]) -> None:
    site = Site(tmp_path, nudged(MIXED, BASE, 7))
    site.bring(range(site.count))
    site.ahead()
    site.step = site.step.model_copy(update={"tensors": b"".join(digests(MIXED, nudged(MIXED, BASE, 8)))})
    answer = site.apply()
    assert (answer.outcome, answer.code) == ("undone", "patch.root")
    assert site.image.read_bytes() == BASE
    assert decoded_late == []


def test_a_chunk_that_rots_on_the_disk_is_not_decoded_and_costs_only_that(
    tmp_path: Path, decoded_late: list[int]
) -> None:
    new = nudged(MIXED, BASE, 8, share=0.05)
    site = Site(tmp_path, new)
    rotten = site.count // 2
    site.bring(set(range(site.count)) - {rotten})
    sound = site.decodable()
    site.bring([rotten], flipped=0xFF)
    answer = site.ahead()
    assert answer == AheadAnswer(ready=len(sound), is_more=False, is_over=True)
    assert site.apply().code == "chunk.digest"
    assert site.image.read_bytes() == BASE
    site.ahead()
    site.bring([rotten])
    assert site.apply().outcome == "applied"
    assert site.image.read_bytes() == new
    assert set(decoded_late) == site.decodable() - sound != set()


def test_a_rotten_head_leaves_it_to_the_apply(tmp_path: Path) -> None:
    site = Site(tmp_path, nudged(MIXED, BASE, 8))
    site.bring(range(site.count))
    site.bring([0], flipped=1)
    assert site.ahead() == AheadAnswer(ready=0, is_more=False, is_over=True)
    site.bring([0])
    assert site.apply().outcome == "applied"
