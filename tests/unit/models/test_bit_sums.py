"""The reload sums against plain arithmetic, over every type, every length and in pieces."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rollmesh_peer import bit_sums
from rollmesh_peer.models.image import tensor_sums
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.layout import Layout, TensorSpec

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def plainly(words: np.ndarray, dtype: str) -> tuple[int, int]:
    counted = [int(word) if dtype != "bf16" or word & 0x7F80 else 0 for word in words]
    return sum(counted) % 2**64, sum(word * word for word in counted) % 2**64


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("length", [0, 2, 34, 1000, 70_000])
def test_they_are_the_sums_of_the_words(dtype, length):
    words = np.random.default_rng(length).integers(0, 2**16, length, dtype=np.uint16)
    found = bit_sums.sums_of_words(words, dtype=dtype)
    assert found == plainly(words, dtype)
    tensor = (
        torch.frombuffer(bytearray(words.tobytes()), dtype=TYPES[dtype])
        if length
        else torch.empty(0, dtype=TYPES[dtype])
    )
    assert tensor_sums(tensor) == found


def test_zeros_of_either_sign_and_subnormal_numbers_are_zero_in_bfloat16():
    words = np.array([0x0000, 0x8000, 0x0001, 0x807F], dtype=np.uint16)
    assert bit_sums.sums_of_words(words, dtype="bf16") == (0, 0)
    assert bit_sums.sums_of_words(words, dtype="f16") != (0, 0)


def test_pieces_add_up_and_the_largest_words_wrap_around():
    words = np.full(2 * bit_sums._PIECE + 3, 0xFFFF, dtype=np.uint16)
    words[::7] = 0x7F80
    with ThreadPoolExecutor(2) as executor:
        assert bit_sums.sums_of_words(words, dtype="bf16", executor=executor) == bit_sums.sums_of_words(
            words, dtype="bf16"
        )
    largest = np.full(3_000_000, 0xFFFF, dtype=np.uint16)
    assert bit_sums.sums_of_words(largest, dtype="f16") == (3_000_000 * 0xFFFF, 3_000_000 * 0xFFFF**2 % 2**64)


def test_what_is_on_the_device_is_summed_in_the_same_way(monkeypatch):
    """The way of a GPU, on this one: torch's own arithmetic, piece by piece."""
    monkeypatch.setattr("rollmesh_peer.models.image._PIECE", 1000)
    monkeypatch.setattr("rollmesh_peer.models.image._is_here", lambda _words: False)
    words = np.random.default_rng(3).integers(0, 2**16, 5_001 * 2, dtype=np.uint16)
    for dtype, kind in TYPES.items():
        assert tensor_sums(torch.from_numpy(words.view(np.int16).copy()).view(kind)) == plainly(words, dtype)


def test_they_travel_as_bytes_for_one_layout():
    layout = Layout(tensors=tuple(TensorSpec(name=name, dtype="bf16", shape=(5,)) for name in "ab"))
    image = np.random.default_rng(1).bytes(layout.image_bytes)
    sums = bit_sums.image_sums(memoryview(image), layout=layout)
    packed = bit_sums.pack_sums(sums)
    assert bit_sums.read_sums(packed, layout=layout) == sums
    with pytest.raises(ChildFailed, match="layout"):
        bit_sums.read_sums(packed + bytes(16), layout=layout)
