"""Patches: bit-exact both ways for any bits, small, and harmless whatever bytes a payload is made of."""

from __future__ import annotations

import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_protocol.errors import Refused
from rollmesh_protocol.layout import Layout, TensorSpec
from rollmesh_protocol.patch.blocks import BLOCK_ELEMENTS, blocks_of
from rollmesh_protocol.patch.codec import CONTEXT, DENSE, Patch, apply_patch, decoded, encode_patch
from tests.unit.weights.kit import MIXED, nudged, random_image

START = struct.Struct("<4sI")


def one(elements: int, dtype: str = "bf16") -> Layout:
    return Layout(tensors=(TensorSpec(name="w", dtype=dtype, shape=(elements,)),))


def forth_and_back(layout: Layout, old: bytes, new: bytes) -> bytes:
    """Encode, apply, flip back, apply again; the payload."""
    payload = encode_patch(layout, old=old, new=new)
    assert payload is not None
    image = bytearray(old)
    flips = list(decoded(layout, image, payload))
    for part in flips:
        part.apply(image)
    assert bytes(image) == new
    for part in reversed(flips):
        part.apply(image)
    assert bytes(image) == old
    apply_patch(layout, image, payload)
    assert bytes(image) == new
    return payload


def bell_image(layout: Layout, seed: int) -> bytes:
    """Weights as models have them: normal, with a share of zeros; nothing between tensors."""
    image = bytearray(layout.image_bytes)
    generator = np.random.default_rng(seed)
    for tensor, offset in zip(layout.tensors, layout.offsets, strict=True):
        floats = generator.normal(0, 0.05, tensor.elements).astype(np.float32)
        floats[generator.random(tensor.elements) < 0.05] = 0
        if tensor.dtype == "f32":
            raw = floats.tobytes()
        elif tensor.dtype == "f16":
            raw = floats.astype(np.float16).tobytes()
        else:
            raw = (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        image[offset : offset + tensor.tensor_bytes] = raw
    return bytes(image)


def kinds(layout: Layout, payload: bytes) -> set[int]:
    return {entry.kind for entry in Patch(layout, payload)._entries}


# --- lossless --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [0.0001, 0.003, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("make", [bell_image, random_image])
def test_any_share_of_changes_round_trips(share: float, make) -> None:
    old = make(MIXED, 1)
    forth_and_back(MIXED, old, nudged(MIXED, old, 2, share=share))


def test_equal_images_have_no_patch() -> None:
    image = random_image(MIXED, 1)
    assert encode_patch(MIXED, old=image, new=image) is None


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_every_bit_pattern_of_two_bytes_can_become_every_other(dtype: str) -> None:
    """Among them all NaN payloads, both zeros, both infinities, and steps of half the range."""
    layout = one(65536, dtype)
    every = np.arange(65536, dtype="<u2")
    forth_and_back(layout, every.tobytes(), np.random.default_rng(0).permutation(every).astype("<u2").tobytes())
    for flipped in (0x8000, 0xFFFF, 0x7FFF, 1):
        forth_and_back(layout, every.tobytes(), (every ^ flipped).astype("<u2").tobytes())
    for added in (1, 0x7FFF, 0x8000, 0xFFFF):
        forth_and_back(layout, every.tobytes(), (every + np.uint16(added)).astype("<u2").tobytes())


def test_special_floats_of_four_bytes_survive() -> None:
    special = [0x7FC00001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 0, 1, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF]
    pairs = [(old, new) for old in special for new in special]
    old, new = np.array(pairs, "<u4").T
    pad = one(len(pairs), "f32").image_bytes - 4 * len(pairs)
    forth_and_back(one(len(pairs), "f32"), old.tobytes() + bytes(pad), new.tobytes() + bytes(pad))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_unrelated_images_travel_dense_and_close_ones_do_not(dtype: str) -> None:
    layout = one(20_000, dtype)
    old = random_image(layout, 1)
    far, near = random_image(layout, 2), nudged(layout, old, 3, share=0.01)
    dense = forth_and_back(layout, old, far)
    assert kinds(layout, dense) == {DENSE}
    assert len(dense) < 1.01 * layout.image_bytes + 2000
    assert kinds(layout, forth_and_back(layout, old, near)) == {CONTEXT}


def test_images_of_several_blocks_and_long_gaps() -> None:
    layout = Layout(
        tensors=(
            TensorSpec(name="big", dtype="bf16", shape=(2 * BLOCK_ELEMENTS + 1000,)),
            TensorSpec(name="norm", dtype="f32", shape=(100,)),
            TensorSpec(name="bigger", dtype="bf16", shape=(BLOCK_ELEMENTS // 2,)),
        )
    )
    assert [block.elements for block in blocks_of(layout)] == [
        BLOCK_ELEMENTS, BLOCK_ELEMENTS, BLOCK_ELEMENTS // 2 + 1000, 100,
    ]  # fmt: skip
    old = bytearray(layout.image_bytes)
    new = bytearray(old)
    for element in (0, 254, 510, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS - 1, 2 * BLOCK_ELEMENTS + 999):
        new[2 * element] ^= 1
    new[layout.offsets[1] + 396] ^= 1
    new[layout.offsets[2] + BLOCK_ELEMENTS - 2] ^= 1
    payload = forth_and_back(layout, bytes(old), bytes(new))
    assert len(payload) < 400
    with ThreadPoolExecutor(4) as executor:
        assert encode_patch(layout, old=bytes(old), new=bytes(new), executor=executor) == payload
        assert apply_patch(layout, old, payload, executor=executor) == (0, 1, 2)
    assert old == new


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
    assert len(payload) < 150


def test_a_thousand_patches_in_a_row_stay_bit_identical() -> None:
    """Forth, and back over the flips of the last hundred."""
    truth = random_image(MIXED, 0)
    image = bytearray(truth)
    history = []
    for step in range(1000):
        new = nudged(MIXED, truth, step)
        payload = encode_patch(MIXED, old=truth, new=new)
        assert payload is not None
        flips = list(decoded(MIXED, image, payload))
        for part in flips:
            part.apply(image)
        assert bytes(image) == new
        history.append((truth, flips))
        history = history[-100:]
        truth = new
    for before, flips in reversed(history):
        for part in flips:
            part.apply(image)
        assert bytes(image) == before


@given(st.data())
def test_any_two_images_round_trip(data: st.DataObject) -> None:
    layout = Layout(
        tensors=(
            TensorSpec(name="a", dtype="bf16", shape=(40,)),
            TensorSpec(name="b", dtype="f32", shape=(9,)),
            TensorSpec(name="c", dtype="f16", shape=(5,)),
        )
    )
    old, new = bytearray(layout.image_bytes), bytearray(layout.image_bytes)
    for offset, tensor in zip(layout.offsets, layout.tensors, strict=True):
        size = tensor.tensor_bytes
        old[offset : offset + size] = data.draw(st.binary(min_size=size, max_size=size))
        new[offset : offset + size] = data.draw(st.binary(min_size=size, max_size=size))
    if old != new:
        forth_and_back(layout, bytes(old), bytes(new))


def test_contexts_pay_off_on_steps_like_those_of_training() -> None:
    """Small weights move by many steps, large ones rarely by one: within 1.15 of the exponent-context bound."""
    layout = one(1 << 20)
    generator = np.random.default_rng(0)
    masters = generator.normal(0, 0.05, 1 << 20).astype(np.float32)
    masters[generator.random(1 << 20) < 0.003] *= 1e-4
    moved = masters + np.float32(1e-5) * generator.normal(0, 0.5, 1 << 20).astype(np.float32)
    old, new = ((floats.view(np.uint32) >> 16).astype("<u2") for floats in (masters, moved))
    payload = forth_and_back(layout, old.tobytes(), new.tobytes())
    assert len(payload) <= 1.15 * exponent_bound_bytes(old, new)


def exponent_bound_bytes(old: np.ndarray, new: np.ndarray) -> float:
    """Per exponent of the old value, the entropy of changed or not, and of the step."""
    ordered_old, ordered_new = (np.where(b & 0x8000, b ^ 0xFFFF, b | 0x8000).astype(np.int64) for b in (old, new))
    exponents = (old >> 7) & 255
    bits = 0.0
    for exponent in np.unique(exponents):
        chosen = exponents == exponent
        steps = (ordered_new - ordered_old)[chosen]
        bits += _entropy_bits(np.unique(steps != 0, return_counts=True)[1])
        bits += _entropy_bits(np.unique(steps[steps != 0], return_counts=True)[1])
    return bits / 8


def _entropy_bits(counts: np.ndarray) -> float:
    return float((counts * np.log2(counts.sum() / counts)).sum()) if counts.size else 0.0


# --- hostile payloads ------------------------------------------------------------------------------------------------
def refuse(payload: bytes, layout: Layout = MIXED) -> str:
    image = bytearray(random_image(layout, 5))
    before = bytes(image)
    with pytest.raises(Refused) as caught:
        apply_patch(layout, image, payload)
    assert caught.value.code == "patch.invalid"
    assert bytes(image) == before
    return str(caught.value)


def good_payload(layout: Layout = MIXED, *, share: float = 0.05) -> bytes:
    old = random_image(layout, 5)
    payload = encode_patch(layout, old=old, new=nudged(layout, old, 6, share=share))
    assert payload is not None
    return payload


PAYLOAD = good_payload()


def opened(payload: bytes) -> tuple[bytearray, bytes]:
    """The head, unpacked, and what follows it."""
    _, length = START.unpack_from(payload)
    head = zstandard.ZstdDecompressor().decompress(payload[START.size : START.size + length])
    return bytearray(head), payload[START.size + length :]


def closed(head: bytes, rest: bytes) -> bytes:
    packed = zstandard.ZstdCompressor().compress(head)
    return START.pack(b"RMP2", len(packed)) + packed + rest


def test_the_tools_of_these_tests_make_good_payloads() -> None:
    assert apply_patch(MIXED, bytearray(random_image(MIXED, 5)), closed(*opened(PAYLOAD)))


def test_every_truncation_is_refused() -> None:
    for length in range(len(PAYLOAD)):
        refuse(PAYLOAD[:length])


def test_bytes_after_the_end_are_refused() -> None:
    assert "does not end" in refuse(PAYLOAD + b"\0")


def test_a_patch_of_another_layout_is_refused() -> None:
    refuse(good_payload(one(100_000)))
    refuse(PAYLOAD, one(100_000))


def test_a_patch_of_another_parent_is_refused_or_decodes_to_the_wrong_weights() -> None:
    """What decodes by chance is for the digests to catch; what does not must not be applied in part."""
    image = bytearray(random_image(MIXED, 77))
    before = bytes(image)
    try:
        apply_patch(MIXED, image, PAYLOAD)
    except Refused:
        assert bytes(image) == before


@pytest.mark.parametrize("magic", [b"RMP1", b"", b"RMP2", b"\0" * 8])
def test_what_is_no_patch_is_refused(magic: bytes) -> None:
    refuse(magic)
    refuse(magic + bytes(12))


def test_a_head_that_says_too_much_is_refused_before_anything_is_allocated() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 30))
    tracemalloc.start()
    refuse(START.pack(b"RMP2", len(bomb)) + bomb)
    head, rest = opened(PAYLOAD)
    blocks = len(blocks_of(MIXED))
    huge = np.frombuffer(head[-12 * blocks :], np.uint8).copy().reshape(3, 4, blocks)
    for column in range(3):
        columns = huge.copy()
        columns[column] = 255
        refuse(closed(bytes(head[: -12 * blocks]) + columns.tobytes(), rest))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_every_kind_of_contradiction_in_the_head_is_refused() -> None:
    head, rest = opened(PAYLOAD)
    blocks = len(blocks_of(MIXED))
    kinds_at = len(head) - 13 * blocks
    for at, value in ((kinds_at, 3), (kinds_at, 0), (kinds_at, DENSE), (0, 0), (1, 0), (0, 255), (2, 2)):
        wrong = bytearray(head)
        wrong[at] = value
        refuse(closed(bytes(wrong), rest))
    refuse(closed(bytes(head[:-1]), rest))
    refuse(closed(bytes(head) + b"\0", rest))
    refuse(closed(b"", rest))
    frequency_at = 2 + 3 * 256 + int(np.flatnonzero(np.frombuffer(head[2 + 3 * 256 :], np.uint8))[0])
    wrong = bytearray(head)
    wrong[frequency_at] ^= 1
    assert "contradict" in refuse(closed(bytes(wrong), rest))


def test_a_head_of_unknown_size_is_refused() -> None:
    head, rest = opened(PAYLOAD)
    stream = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(head))
    refuse(START.pack(b"RMP2", len(stream)) + stream + rest)


def test_swapped_blocks_are_refused() -> None:
    layout = one(2 * BLOCK_ELEMENTS)
    old = bell_image(layout, 1)
    payload = encode_patch(layout, old=old, new=nudged(layout, old, 2, share=0.001))
    assert payload is not None
    patch = Patch(layout, payload)
    (start, middle), (_, end) = patch.span(0), patch.span(1)
    swapped = payload[:start] + payload[middle:end] + payload[start:middle]
    image = bytearray(old)
    with pytest.raises(Refused):
        apply_patch(layout, image, swapped)
    assert bytes(image) == old


def test_a_late_block_that_is_wrong_undoes_the_earlier_ones() -> None:
    layout = one(2 * BLOCK_ELEMENTS)
    old = bytes(layout.image_bytes)
    new = bytearray(old)
    new[0] ^= 1
    new[-2] ^= 1
    payload = bytearray(encode_patch(layout, old=old, new=bytes(new)) or b"")
    payload[Patch(layout, payload).span(1)[0]] ^= 0xFF  # the state that its decoding starts with
    with ThreadPoolExecutor(2) as executor:
        for threads in (None, executor):
            image = bytearray(old)
            with pytest.raises(Refused):
                apply_patch(layout, image, bytes(payload), executor=threads)
            assert bytes(image) == old


def test_a_block_decodes_before_the_next_one_arrives() -> None:
    layout = one(2 * BLOCK_ELEMENTS)
    old = bell_image(layout, 1)
    new = nudged(layout, old, 2, share=0.001)
    payload = encode_patch(layout, old=old, new=new)
    assert payload is not None
    growing = bytearray(len(payload))
    first = Patch(layout, payload).span(0)[1]
    growing[:first] = payload[:first]
    patch = Patch(layout, growing)
    image = bytearray(old)
    patch.decode(0, image).apply(image)
    assert image[: 2 * BLOCK_ELEMENTS] == new[: 2 * BLOCK_ELEMENTS]
    with pytest.raises(Refused):
        patch.decode(1, image)
    growing[first:] = payload[first:]
    patch.decode(1, image).apply(image)
    assert bytes(image) == new


@given(st.binary(max_size=400))
def test_no_bytes_crash_the_decoder(noise: bytes) -> None:
    head, rest = opened(PAYLOAD)
    for payload in (noise, b"RMP2" + noise, closed(noise, rest), closed(bytes(head), noise), PAYLOAD[:-400] + noise):
        image = bytearray(MIXED.image_bytes)
        try:
            apply_patch(MIXED, image, payload)
        except Refused:
            assert not any(image)


@given(st.integers(0, 100_000), st.integers(1, 255), st.booleans())
def test_no_flipped_byte_crashes_the_decoder(position: int, flip: int, in_head: bool) -> None:
    head, rest = opened(PAYLOAD)
    if in_head:
        head[position % len(head)] ^= flip
        payload = closed(bytes(head), rest)
    else:
        wrong = bytearray(PAYLOAD)
        wrong[position % len(wrong)] ^= flip
        payload = bytes(wrong)
    image = bytearray(random_image(MIXED, 5))
    before = bytes(image)
    try:
        apply_patch(MIXED, image, payload)
    except Refused:
        assert bytes(image) == before
    # It may decode to something: then the digests are what refuses it. Padding stays zero in any case.
    for tensor, offset in zip(MIXED.tensors, MIXED.offsets, strict=True):
        end = offset + tensor.tensor_bytes
        assert not any(image[end : -(-end // 64) * 64])
