"""The undo log of images on a disk: whatever a power cut leaves of image and log, the old image comes out of it."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rollmesh_peer.weights import undo_file
from rollmesh_peer.weights.undo_file import UndoFile
from rollmesh_protocol.errors import HostError
from rollmesh_protocol.layout import Layout, TensorSpec
from rollmesh_protocol.patch import blocks as blocks_module
from rollmesh_protocol.patch.blocks import blocks_of
from rollmesh_protocol.patch.codec import decoded, encode_patch
from tests.unit.weights.kit import MIXED, nudged, random_image, root_of

BASE = random_image(MIXED, 1)
SECTOR = 512
HEAD_BYTES = 8 + 3 * 32 + 32
RECORD_BYTES = 4 * 4 + 32


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 1,000 elements and a flush for a few of them: as many records as a large model has."""
    monkeypatch.setattr(blocks_module, "BLOCK_ELEMENTS", 1000)
    monkeypatch.setattr(undo_file, "BATCH_BYTES", 500)


def log_of(path: Path, old: bytes, new: bytes, *, layout: Layout = MIXED, spare_bytes: int = 0) -> UndoFile:
    return UndoFile(
        path, layout=layout, blocks=blocks_of(layout), before=root_of(layout, old), after=root_of(layout, new),
        spare_bytes=spare_bytes,
    )  # fmt: skip


def change(log: UndoFile, image: bytearray, *images: bytes, layout: Layout = MIXED) -> None:
    """Advance ``image`` over ``images``, one step each."""
    for new in images:
        payload = encode_patch(layout, old=bytes(image), new=new)
        assert payload is not None
        for flips in log.guarded(memoryview(image), decoded(layout, memoryview(image), payload)):
            flips.apply(image)
    assert image == images[-1]


def led_back(path: Path, image: bytes, *, layout: Layout = MIXED) -> bytes:
    """What the next process makes of them."""
    found = UndoFile.found(path, layout=layout, blocks=blocks_of(layout))
    again = bytearray(image)
    if found is not None:
        assert found.lead_back(memoryview(again))
    return bytes(again)


def images(count: int, *, share: float, layout: Layout = MIXED, base: bytes = BASE) -> list[bytes]:
    found = [base]
    for seed in range(count):
        found.append(nudged(layout, found[-1], seed + 10, share=share))
    return found[1:]


@pytest.mark.parametrize("share", [0.001, 0.05, 0.6, 1.0])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_change_is_undone_by_its_own_process_and_by_another(tmp_path: Path, share: float, steps: int) -> None:
    path = tmp_path / "log"
    new = images(steps, share=share)
    log, image = log_of(path, BASE, new[-1]), bytearray(BASE)
    change(log, image, *new)
    assert led_back(path, new[-1]) == BASE
    assert log.lead_back(memoryview(image))
    assert image == BASE
    log.remove()
    assert not path.exists()
    assert UndoFile.found(path, layout=MIXED, blocks=blocks_of(MIXED)) is None


def test_it_says_between_which_roots(tmp_path: Path) -> None:
    (new,) = images(1, share=0.05)
    change(log_of(tmp_path / "log", BASE, new), bytearray(BASE), new)
    found = UndoFile.found(tmp_path / "log", layout=MIXED, blocks=blocks_of(MIXED))
    assert found is not None
    assert (found.before, found.after) == (root_of(MIXED, BASE), root_of(MIXED, new))


def moments(log: UndoFile, image: bytearray, path: Path, new: Sequence[bytes]) -> list[tuple[bytes, bytes, bytes]]:
    """At each flush of the log: the log as it is durable then, the image before, and the image after those flips."""
    seen: list[tuple[bytes, bytes, bytes]] = []
    for target in new:
        payload = encode_patch(MIXED, old=bytes(image), new=target)
        assert payload is not None
        before, durable_log = bytes(image), b""
        for flips in log.guarded(memoryview(image), decoded(MIXED, memoryview(image), payload)):
            if path.read_bytes() != durable_log:
                before, durable_log = bytes(image), path.read_bytes()
            flips.apply(image)
            seen.append((durable_log, before, bytes(image)))
    return seen


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_after_a_power_cut_at_any_moment_the_old_image_is_there(tmp_path: Path, share: float) -> None:
    """Of the pages changed since the image was last flushed (never, so far) any may have reached the disk."""
    path, chance = tmp_path / "log", random.Random(5)
    new = images(2, share=share)
    image = bytearray(BASE)
    seen = moments(log_of(path, BASE, new[-1]), image, path, new)
    assert len({log for log, _, _ in seen}) > 5
    whole_log = path.read_bytes()
    history = [BASE, *(after for _, _, after in seen)]
    for number, (durable_log, _, _) in enumerate(seen):
        torn = mixed(history[: number + 2], chance)
        # The record that is being written may be there in part, and so may what was never flushed.
        tail = whole_log[len(durable_log) : len(durable_log) + chance.randrange(100)]
        for rest in (b"", tail, bytes(chance.randrange(200)), chance.randbytes(80)):
            path.write_bytes(durable_log + rest)
            once = led_back(path, torn)
            assert once == BASE
            # Undoing is cut off as well: some sectors are back, some are not, and it is done again.
            assert led_back(path, mixed([torn, once], chance)) == BASE


def mixed(versions: Sequence[bytes], chance: random.Random) -> bytes:
    """Each sector from any of these images."""
    return b"".join(chance.choice(versions)[at : at + SECTOR] for at in range(0, len(BASE), SECTOR))


def test_a_log_cut_anywhere_undoes_what_is_whole_and_never_does_harm(tmp_path: Path) -> None:
    path = tmp_path / "log"
    (new,) = images(1, share=0.05)
    change(log_of(path, BASE, new), bytearray(BASE), new)
    whole = path.read_bytes()
    ends = {0, HEAD_BYTES, *random.Random(1).sample(range(len(whole)), 300)}
    differing = []
    for end in sorted(ends):
        path.write_bytes(whole[:end])
        assert led_back(path, BASE) == BASE
        differing.append(int(np.count_nonzero(np.frombuffer(led_back(path, new), "u1") != np.frombuffer(BASE, "u1"))))
    assert differing == sorted(differing, reverse=True)


@pytest.mark.parametrize("place", ["head", "fields", "checksum", "body", "last"])
def test_a_damaged_record_ends_the_log(tmp_path: Path, place: str) -> None:
    path = tmp_path / "log"
    (new,) = images(1, share=0.05)
    change(log_of(path, BASE, new), bytearray(BASE), new)
    content = bytearray(path.read_bytes())
    at = {"head": 50, "fields": HEAD_BYTES + 5, "checksum": HEAD_BYTES + 20, "body": HEAD_BYTES + RECORD_BYTES + 1,
          "last": len(content) - 1}[place]  # fmt: skip
    content[at] ^= 0x40
    path.write_bytes(content)
    found = UndoFile.found(path, layout=MIXED, blocks=blocks_of(MIXED))
    assert (found is None) == (place == "head")
    assert led_back(path, BASE) == BASE
    if place != "last":
        assert led_back(path, new) == new


def test_a_record_counts_in_its_place_only(tmp_path: Path) -> None:
    """Two logs of the same blocks: the second's records behind the first's head are nothing."""
    one, two = images(2, share=0.05)
    change(log_of(tmp_path / "one", BASE, one), bytearray(BASE), one)
    change(log_of(tmp_path / "two", one, two), bytearray(one), two)
    head, rest = (tmp_path / "one").read_bytes()[:HEAD_BYTES], (tmp_path / "two").read_bytes()[HEAD_BYTES:]
    (tmp_path / "log").write_bytes(head + rest)
    assert led_back(tmp_path / "log", two) == two


def test_the_log_of_another_model_is_none(tmp_path: Path) -> None:
    (new,) = images(1, share=0.05)
    change(log_of(tmp_path / "log", BASE, new), bytearray(BASE), new)
    other = Layout(tensors=(*MIXED.tensors, TensorSpec(name="more", dtype="bf16", shape=(1,))))
    assert UndoFile.found(tmp_path / "log", layout=other, blocks=blocks_of(other)) is None


@pytest.mark.parametrize("share", [0.02, 0.2, 1.0])
def test_the_log_stays_below_twice_the_image(tmp_path: Path, share: float) -> None:
    path = tmp_path / "log"
    new = images(12, share=share)
    image = bytearray(BASE)
    change(log_of(path, BASE, new[-1]), image, *new)
    records = 12 * len(blocks_of(MIXED))
    assert path.stat().st_size <= 2 * len(BASE) + HEAD_BYTES + records * RECORD_BYTES
    assert led_back(path, bytes(image)) == BASE


def test_without_room_nothing_is_touched_and_it_says_so(tmp_path: Path) -> None:
    (new,) = images(1, share=0.05)
    log, image = log_of(tmp_path / "log", BASE, new, spare_bytes=1 << 62), bytearray(BASE)
    with pytest.raises(HostError, match=r"undo log .* cannot be written: the disk is full"):
        change(log, image, new)
    assert image == BASE
    assert not (tmp_path / "log").exists()


def test_a_disk_that_fails_in_the_middle_leaves_what_can_be_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (new,) = images(1, share=0.05)
    log, image = log_of(tmp_path / "log", BASE, new), bytearray(BASE)
    flushes = 0

    def fail(descriptor: int) -> None:
        nonlocal flushes
        flushes += 1
        if flushes > 5:
            raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(HostError, match="Input/output error"):
        change(log, image, new)
    assert image != BASE
    assert log.lead_back(memoryview(image))
    assert image == BASE


def test_what_an_anchor_overwrites_cannot_be_undone(tmp_path: Path) -> None:
    one, two = images(2, share=0.05)
    log, image = log_of(tmp_path / "log", BASE, two), bytearray(BASE)
    change(log, image, one)
    log.give_up()
    change(log, image, two)
    assert not log.lead_back(memoryview(image))
