"""Packed linear layers give the bits that plain ones give, before and after a swap."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rollmesh_node.engine import memory, packed_linear
from rollmesh_node.engine.packed_linear import PackedLinear
from rollmesh_peer.models.image import check_reload, layout_of
from rollmesh_peer.models.loader import load_model


def needs_packing(model):
    if not packed_linear.is_useful(model):
        pytest.skip("this CPU or torch has no packed bf16 products")


def plain(rows: int, columns: int, *, bias: bool) -> nn.Linear:
    torch.manual_seed(rows)
    return nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(576, 576), (260, 64), (33, 7), (1, 1)])
@pytest.mark.parametrize("shape", [(1,), (8,), (65,), (3, 5), (64, 1)])
def test_every_bit_is_the_same(rows, columns, shape, bias):
    linear = plain(rows, columns, bias=bias)
    needs_packing(linear)
    x = torch.randn(*shape, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(PackedLinear(linear)(x), linear(x))


def test_a_whole_model_is_the_same_and_keeps_its_parameters(tiny):
    model = load_model(tiny.config, layout=tiny.layout, image=tiny.image)
    needs_packing(model)
    ids = torch.arange(60)[None]
    before = model(ids).logits
    packed = packed_linear.install(model)
    assert len(packed) == 2 * 7 + 1
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert torch.equal(model(ids).logits, before)
    assert layout_of(model) == tiny.layout
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    check_reload(model, layout=tiny.layout, image=tiny.image)


def test_new_weights_count_after_packing(tiny):
    linear = plain(32, 16, bias=False)
    needs_packing(linear)
    packed, x = PackedLinear(linear), torch.ones(2, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.mul_(2)
    assert not torch.equal(packed(x), linear(x))
    packed.pack()
    assert torch.equal(packed(x), linear(x))


def test_where_it_is_not_used(tiny, monkeypatch):
    assert not packed_linear.is_useful(tiny.fp32)
    assert not packed_linear.is_useful(nn.Linear(2, 2, dtype=torch.bfloat16))  # wants gradients
    assert not packed_linear.is_useful(nn.ReLU())
    monkeypatch.setattr(memory, "free_bytes", lambda **_: 1000)
    assert not packed_linear.is_useful(tiny.bf16)
