"""The one loader: RoPE stays exact, weights come from the image alone, loading is checked."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollmesh_peer.models import loader
from rollmesh_peer.models.image import layout_of, weights_of
from rollmesh_protocol.errors import ChildFailed, Refused
from tests.unit.models.tiny import small_config


def test_parameters_are_bf16_and_rope_is_float32(tiny):
    assert {tensor.dtype for tensor in weights_of(tiny.bf16).values()} == {torch.bfloat16}
    exact = 1.0 / 10_000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    assert tiny.bf16.model.rotary_emb.inv_freq.dtype == torch.float32
    torch.testing.assert_close(tiny.bf16.model.rotary_emb.inv_freq, exact, atol=0, rtol=1e-7)
    rounded = exact.bfloat16().float()
    assert not torch.equal(rounded, exact)  # so a loader that casts the whole model would be seen here


def test_it_computes_what_the_library_computes(tiny):
    theirs = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.bfloat16)
    ids = torch.randint(0, 260, (2, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(tiny.bf16(ids).logits, theirs(ids).logits)


def test_eager_attention_agrees_up_to_rounding(tiny):
    eager = loader.load_model(
        tiny.config, layout=tiny.layout, image=tiny.image, attention="eager", arithmetic="float32"
    )
    ids = torch.arange(50)[None]
    torch.testing.assert_close(eager(ids).logits, tiny.fp32(ids).logits, atol=1e-4, rtol=0)


def test_the_layout_needs_no_memory_and_is_the_models(tiny):
    assert loader.layout_of_config(tiny.config) == layout_of(tiny.bf16) == tiny.layout
    big = small_config(
        "llama", hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64
    )
    assert loader.layout_of_config(big).image_bytes > 10**11


def test_a_model_comes_without_gradients_in_eval_mode(tiny):
    assert not tiny.bf16.training
    assert not any(parameter.requires_grad for parameter in tiny.bf16.parameters())


def test_tied_matrices_stay_tied(tiny):
    assert tiny.bf16.get_input_embeddings().weight is tiny.bf16.get_output_embeddings().weight


def test_a_corrupt_image_of_the_right_length_still_loads_as_it_is(tiny, tmp_path):
    """Roots are the daemon's business; the reload check compares with the file that was named."""
    image = tmp_path / "image"
    image.write_bytes(bytes(tiny.layout.image_bytes))
    model = loader.load_model(tiny.config, layout=tiny.layout, image=image)
    assert all(not tensor.any() for tensor in weights_of(model).values())


def test_a_config_of_another_size_than_the_layout_is_refused_before_a_tensor_exists(tiny):
    """A node's limits were checked against the layout; the config alone says what would be allocated."""
    giant = {**tiny.config, "intermediate_size": 1 << 20, "num_hidden_layers": 40}
    with pytest.raises(Refused, match="other tensors than the layout"):
        loader.load_model(giant, layout=tiny.layout, image=tiny.image)


def test_a_load_that_did_not_copy_is_noticed(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "copy_image_into", lambda *_, **__: None)
    with pytest.raises(ChildFailed, match="does not hold the bits"):
        loader.load_model(tiny.config, layout=tiny.layout, image=tiny.image)


def test_float32_is_checked_as_the_bf16_that_it_came_from(tiny):
    assert tiny.fp32.dtype == torch.float32
    with torch.no_grad():
        norm = tiny.fp32.model.norm.weight
        before = norm.clone()
        norm[3] *= 1.05
        with pytest.raises(ChildFailed, match=r"model\.norm"):
            loader.check_reload(tiny.fp32, layout=tiny.layout, image=tiny.image)
        norm.copy_(before)
