"""Patches: bit-exact both ways for any bits, small, and harmless whatever bytes a payload is made of."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_protocol.errors import Refused
from rollmesh_protocol.layout import Layout, TensorSpec
from rollmesh_protocol.patch import SECTION_BYTES, apply_patch, encode_patch
from tests.unit.weights.kit import MIXED, nudged, random_image


def round_trip(layout: Layout, old: bytes, new: bytes) -> bytes:
    payload = encode_patch(layout, old=old, new=new)
    assert payload is not None
    image = bytearray(old)
    apply_patch(layout, image, payload)
    assert bytes(image) == new
    apply_patch(layout, image, payload)
    assert bytes(image) == old
    return payload


def packed(*streams: bytes) -> bytes:
    """A one-section payload of three streams, compressed as they are."""
    frames = [zstandard.ZstdCompressor().compress(stream) for stream in streams]
    return b"RMP1" + struct.pack("<III", *map(len, frames)) + b"".join(frames)


@pytest.mark.parametrize("share", [0.0001, 0.003, 0.02, 0.5, 1.0])
def test_any_share_of_changes_round_trips(share: float) -> None:
    old = random_image(MIXED, 1)
    round_trip(MIXED, old, nudged(MIXED, old, 2, share=share))


def test_equal_images_have_no_patch() -> None:
    image = random_image(MIXED, 1)
    assert encode_patch(MIXED, old=image, new=image) is None


def test_every_bit_pattern_of_two_bytes_can_become_every_other() -> None:
    """Among them all NaN payloads, both zeros and both infinities."""
    layout = Layout(tensors=(TensorSpec(name="all", dtype="bf16", shape=(65536,)),))
    every = np.arange(65536, dtype="<u2")
    round_trip(layout, every.tobytes(), np.random.default_rng(0).permutation(every).astype("<u2").tobytes())
    round_trip(layout, every.tobytes(), (every ^ 0x8000).astype("<u2").tobytes())


def test_special_floats_of_four_bytes_survive() -> None:
    layout = Layout(tensors=(TensorSpec(name="f", dtype="f32", shape=(16,)),))
    special = [0x7FC00001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 0, 1, 0x7F800001]
    old, new = np.array(special + special[::-1], "<u4"), np.array(special[::-1] + special, "<u4")
    round_trip(layout, old.tobytes(), new.tobytes())


def test_images_of_several_sections_and_long_gaps() -> None:
    layout = Layout(tensors=(TensorSpec(name="big", dtype="bf16", shape=(SECTION_BYTES // 2 * 2 + 1000,)),))
    old = bytearray(layout.image_bytes)
    new = bytearray(old)
    last = layout.tensors[0].tensor_bytes - 2
    for at in (0, 2 * 254, 2 * 510, 2 * 766, SECTION_BYTES - 2, SECTION_BYTES, 2 * SECTION_BYTES - 2, last):
        new[at] ^= 1
    payload = round_trip(layout, bytes(old), bytes(new))
    assert len(payload) < 400


def test_the_touched_tensors_are_named() -> None:
    old = random_image(MIXED, 3)
    new = bytearray(old)
    for index in (0, 3, 6):
        new[MIXED.offsets[index]] ^= 1
    payload = encode_patch(MIXED, old=old, new=bytes(new))
    assert payload is not None
    assert apply_patch(MIXED, bytearray(old), payload) == (0, 3, 6)


def test_an_untouched_model_costs_a_few_bytes() -> None:
    layout = Layout(tensors=tuple(TensorSpec(name=f"t{i}", dtype="bf16", shape=(1000,)) for i in range(1000)))
    old = bytes(layout.image_bytes)
    new = bytearray(old)
    new[layout.offsets[500]] = 1
    payload = encode_patch(layout, old=old, new=bytes(new))
    assert payload is not None
    assert len(payload) < 100


def test_two_hundred_patches_in_a_row_stay_bit_identical() -> None:
    first = random_image(MIXED, 0)
    image, truth, payloads = bytearray(first), first, []
    for step in range(200):
        new = nudged(MIXED, truth, step)
        payload = encode_patch(MIXED, old=truth, new=new)
        assert payload is not None
        apply_patch(MIXED, image, payload)
        assert bytes(image) == new
        payloads.append(payload)
        truth = new
    for payload in reversed(payloads):
        apply_patch(MIXED, image, payload)
    assert bytes(image) == first


@given(st.data())
def test_any_two_images_round_trip(data: st.DataObject) -> None:
    layout = Layout(
        tensors=(TensorSpec(name="a", dtype="bf16", shape=(40,)), TensorSpec(name="b", dtype="f32", shape=(9,)))
    )
    old, new = bytearray(layout.image_bytes), bytearray(layout.image_bytes)
    for offset, tensor in zip(layout.offsets, layout.tensors, strict=True):
        size = tensor.tensor_bytes
        old[offset : offset + size] = data.draw(st.binary(min_size=size, max_size=size))
        new[offset : offset + size] = data.draw(st.binary(min_size=size, max_size=size))
    if old != new:
        round_trip(layout, bytes(old), bytes(new))


# --- hostile payloads ------------------------------------------------------------------------------------------------
def refuse(payload: bytes, layout: Layout = MIXED) -> str:
    image = bytearray(random_image(layout, 5))
    before = bytes(image)
    with pytest.raises(Refused) as caught:
        apply_patch(layout, image, payload)
    assert caught.value.code == "patch.invalid"
    assert bytes(image) == before
    return str(caught.value)


def good_payload() -> bytes:
    old = random_image(MIXED, 5)
    payload = encode_patch(MIXED, old=old, new=nudged(MIXED, old, 6, share=0.05))
    assert payload is not None
    return payload


def test_every_truncation_is_refused() -> None:
    payload = good_payload()
    for length in range(len(payload)):
        refuse(payload[:length])


def test_bytes_after_the_end_are_refused() -> None:
    assert "after the end" in refuse(good_payload() + b"\0")


def test_a_patch_of_another_layout_is_refused_or_changes_only_elements() -> None:
    """What fits by chance is for the digests to catch; what does not fit must not be applied in part."""
    other = Layout(tensors=(TensorSpec(name="other", dtype="bf16", shape=(SECTION_BYTES,)),))
    old = bytes(other.image_bytes)
    payload = encode_patch(other, old=old, new=b"\1" + old[1:-1] + b"\1")
    assert payload is not None
    refuse(payload)


WORDS = MIXED.image_bytes // 2


@pytest.mark.parametrize(
    ("payload", "word"),
    [
        (packed(b"", b"", b""), "middle"),
        (packed(b"\xff", b"", b""), "middle"),
        (packed(b"\0\xff", b"\1", b"\0"), "middle"),
        (packed(b"\0\0", b"\1", b"\0\0"), "together"),
        (packed(b"\0", b"\1", b""), "together"),
        (packed(b"\xff" * (WORDS // 255) + b"\xfe", b"\1", b"\0"), "beyond the end"),
        (packed(b"\0" * (WORDS + 1), b"\1" * (WORDS + 1), b"\0" * (WORDS + 1)), "beyond the end"),
        (packed(b"\0" * (2 * WORDS), b"\1", b"\0"), "larger"),
        (b"RMP1" + struct.pack("<III", 2**32 - 1, 2**32 - 1, 2**32 - 1), "cut short"),
        (b"RMP1" + struct.pack("<III", 0, 0, 5) + b"zzzzz", "zstandard"),
        (b"RMP2" + bytes(12), "not a sparse-1"),
        (b"", "not a sparse-1"),
    ],
)
def test_streams_that_do_not_fit_are_refused(payload: bytes, word: str) -> None:
    assert word in refuse(payload)


def test_a_change_of_the_padding_is_refused() -> None:
    """It would be in no tensor's digest."""
    end = MIXED.offsets[0] + MIXED.tensors[0].tensor_bytes
    assert end % 64
    skipped, rest = divmod(end // 2, 255)
    assert "between two tensors" in refuse(packed(b"\xff" * skipped + bytes([rest]), b"\1", b"\0"))


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 30))
    payload = b"RMP1" + struct.pack("<III", len(bomb), len(bomb), len(bomb)) + 3 * bomb
    tracemalloc.start()
    refuse(payload)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_frame_of_unknown_size_is_refused() -> None:
    stream = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 100)
    refuse(b"RMP1" + struct.pack("<III", len(stream), len(stream), len(stream)) + 3 * stream)


def test_a_late_section_that_is_wrong_undoes_the_earlier_ones() -> None:
    layout = Layout(tensors=(TensorSpec(name="big", dtype="bf16", shape=(SECTION_BYTES,)),))
    old = random_image(layout, 5)
    new = bytearray(old)
    new[0] ^= 1
    new[SECTION_BYTES] ^= 1
    payload = bytearray(encode_patch(layout, old=old, new=bytes(new)) or b"")
    payload[-10] ^= 0xFF  # the magic of the last frame
    refuse(bytes(payload), layout)


@given(st.binary(max_size=400))
def test_no_bytes_crash_the_decoder(noise: bytes) -> None:
    for payload in (noise, b"RMP1" + noise):
        image = bytearray(MIXED.image_bytes)
        try:
            apply_patch(MIXED, image, payload)
        except Refused:
            assert not any(image)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_flipped_byte_crashes_the_decoder(position: int, flip: int) -> None:
    payload = bytearray(PAYLOAD)
    payload[position % len(payload)] ^= flip
    image = bytearray(random_image(MIXED, 5))
    before = bytes(image)
    try:
        touched = apply_patch(MIXED, image, bytes(payload))
    except Refused:
        assert bytes(image) == before
        return
    # It decoded to something: then only whole elements changed, and a second time leads back.
    assert touched
    apply_patch(MIXED, image, bytes(payload))
    assert bytes(image) == before


@given(st.binary(max_size=2000), st.binary(max_size=2000), st.binary(max_size=2000))
def test_no_streams_crash_the_decoder(gaps: bytes, low: bytes, high: bytes) -> None:
    image = bytearray(MIXED.image_bytes)
    try:
        apply_patch(MIXED, image, packed(gaps, low[: len(gaps)], high[: len(gaps)]))
    except Refused:
        assert not any(image)


PAYLOAD = good_payload()
