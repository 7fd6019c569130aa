"""Between tensors and the flat image: every bit arrives, and a wrong one is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from rollmesh_peer.bit_sums import image_sums
from rollmesh_peer.models import image as images
from rollmesh_protocol.errors import ChildFailed, Refused
from rollmesh_protocol.layout import Layout


class Odd(nn.Module):
    """Tensors of every type and shape that may come: scalar, empty, odd, tied, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.z_matrix = nn.Parameter(torch.empty(3, 5, dtype=torch.bfloat16))
        self.fp16 = nn.Parameter(torch.empty(7, dtype=torch.float16))
        self.single = nn.Parameter(torch.empty(2, 3, 1, dtype=torch.float32))
        self.scalar = nn.Parameter(torch.empty((), dtype=torch.bfloat16))
        self.nothing = nn.Parameter(torch.empty(0, 4, dtype=torch.bfloat16))
        self.tied = self.z_matrix
        self.register_buffer("kept", torch.empty(33, dtype=torch.bfloat16))
        self.register_buffer("computed", torch.zeros(2), persistent=False)


def random_bits(model: nn.Module, seed: int) -> None:
    """Any bit pattern: NaN payloads, infinities, -0.0 and subnormals are among them."""
    generator = np.random.default_rng(seed)
    for tensor in images.weights_of(model).values():
        words = generator.integers(0, 2**16, tensor.numel() * tensor.element_size() // 2, dtype=np.uint16)
        tensor.data.reshape(-1).view(torch.int16).copy_(torch.from_numpy(words.view(np.int16)))


def bits(model: nn.Module) -> dict[str, bytes]:
    return {
        name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in images.weights_of(model).items()
    }


@pytest.fixture
def odd(tmp_path):
    model = Odd()
    random_bits(model, 1)
    layout = images.layout_of(model)
    images.write_image(images.weights_of(model), layout=layout, image=tmp_path / "image")
    return model, layout, tmp_path / "image"


def test_the_layout(odd):
    _, layout, _ = odd
    names = [spec.name for spec in layout.tensors]
    assert names == sorted(names)
    assert set(names) == {"z_matrix", "fp16", "single", "scalar", "nothing", "kept"} or "tied" in names
    assert len(names) == 6
    assert {spec.name: spec.dtype for spec in layout.tensors}["single"] == "f32"


def test_every_bit_makes_the_round_trip(odd):
    model, layout, path = odd
    other = Odd()
    random_bits(other, 2)
    assert bits(other) != bits(model)
    images.copy_image_into(other, layout=layout, image=path)
    assert bits(other) == bits(model)
    images.check_reload(other, layout=layout, image=path)


def test_the_file_is_the_layouts_image(odd):
    model, layout, path = odd
    content = path.read_bytes()
    assert len(content) == layout.image_bytes
    held = bits(model)
    covered = bytearray(len(content))
    for spec, offset in zip(layout.tensors, layout.offsets, strict=True):
        assert offset % 64 == 0
        assert content[offset : offset + spec.tensor_bytes] == held[spec.name]
        covered[offset : offset + spec.tensor_bytes] = b"\1" * spec.tensor_bytes
    assert all(byte == 0 for byte, mark in zip(content, covered, strict=True) if not mark)


def test_the_model_does_not_keep_the_files_memory(odd):
    model, layout, path = odd
    images.copy_image_into(model, layout=layout, image=path)
    before = bits(model)
    with path.open("r+b") as file:
        file.write(bytes(layout.image_bytes))
    assert bits(model) == before


def test_one_flipped_bit_is_noticed_wherever_it_is(odd):
    model, layout, path = odd
    good = path.read_bytes()
    for spec, offset in zip(layout.tensors, layout.offsets, strict=True):
        if not spec.tensor_bytes:
            continue
        bad = bytearray(good)
        bad[offset + spec.tensor_bytes - 1] ^= 0x40
        path.write_bytes(bad)
        with pytest.raises(ChildFailed, match=spec.name) as failure:
            images.check_reload(model, layout=layout, image=path)
        assert failure.value.code == "child.weights"


def test_two_values_that_changed_places_and_kept_the_sum_are_noticed(odd):
    """The sum alone would not see +1 here and -1 there; the squares do."""
    model, layout, path = odd
    kept = model.kept.view(torch.int16)
    kept[0] += 1
    kept[1] -= 1
    expected = image_sums(memoryview(path.read_bytes()), layout=layout)
    found = images.model_sums(model, layout=layout)
    index = [spec.name for spec in layout.tensors].index("kept")
    assert expected != found and expected[index][0] == found[index][0]


def test_sums_that_are_known_are_what_counts(odd):
    model, layout, path = odd
    known = image_sums(memoryview(path.read_bytes()), layout=layout)
    path.unlink()
    images.check_reload(model, layout=layout, image=path, expected=known)
    wrong = [*known[:-1], (known[-1][0] + 1, known[-1][1])]
    with pytest.raises(ChildFailed, match=layout.tensors[-1].name):
        images.check_reload(model, layout=layout, image=path, expected=wrong)


def test_a_file_of_another_length_is_refused(odd):
    model, layout, path = odd
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ChildFailed, match="bytes"):
        images.copy_image_into(model, layout=layout, image=path)


def test_another_models_layout_is_refused(odd, tmp_path):
    model, layout, path = odd
    fewer = Layout(tensors=layout.tensors[:-1])
    with pytest.raises(ChildFailed, match="layout"):
        images.copy_image_into(model, layout=fewer, image=path)


def test_other_dtypes_are_refused():
    with pytest.raises(Refused) as refusal:
        images.layout_of(nn.Linear(2, 2, dtype=torch.float64))
    assert refusal.value.code == "patch.dtype"


def test_masters_are_rounded_to_the_layouts_type(tmp_path):
    layout = images.layout_of(nn.Linear(8, 8, dtype=torch.bfloat16))
    masters = {name: torch.randn(8, 8) if name == "weight" else torch.randn(8) for name in ("weight", "bias")}
    images.write_image(masters, layout=layout, image=tmp_path / "image", durable=True)
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    images.copy_image_into(model, layout=layout, image=tmp_path / "image")
    assert torch.equal(model.weight, masters["weight"].bfloat16())


def test_a_failed_write_leaves_the_old_image(odd):
    model, layout, path = odd
    before = path.read_bytes()
    with pytest.raises(KeyError):
        images.write_image({}, layout=layout, image=path)
    with pytest.raises(ValueError, match="shape"):
        images.write_image(dict.fromkeys(images.weights_of(model), torch.zeros(1)), layout=layout, image=path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
