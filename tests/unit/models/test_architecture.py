"""Which configs are loaded: a hostile one is data, and every admitted type computes what the rest of us assumes."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from rollmesh_peer.models.architecture import MODEL_TYPES, read_config
from rollmesh_peer.models.loader import build_model, layout_of_config
from rollmesh_protocol.errors import Refused
from tests.unit.models.tiny import random_model, small_config

ALWAYS_TIED = {"gemma"}
FAMILIES = [(kind, tied) for kind in MODEL_TYPES for tied in (True, False) if tied or kind not in ALWAYS_TIED]


@pytest.mark.parametrize(("model_type", "tied"), FAMILIES)
def test_the_head_on_the_last_state_gives_the_logits(model_type, tied):
    """Nothing scales or caps logits outside the head: log-probs and draws use the head alone."""
    model = random_model(model_type, tie_word_embeddings=tied)
    ids = torch.arange(20)[None] + 3
    with torch.no_grad():
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        assert torch.equal(model.get_output_embeddings()(states), model(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize(("model_type", "tied"), FAMILIES)
def test_a_tied_matrix_is_in_the_layout_once(model_type, tied):
    names = [spec.name for spec in layout_of_config(small_config(model_type, tie_word_embeddings=tied)).tensors]
    assert len(names) == len(set(names))
    assert ("lm_head.weight" in names) != tied
    assert "model.embed_tokens.weight" in names


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"auto_map": {"AutoConfig": "evil.Config"}}, "never run"),
        ({"model_type": "bert"}, "not one of"),
        ({"model_type": "gpt_oss"}, "'gpt_oss' is not one of .* attention sinks"),
        ({"model_type": "gemma2"}, "'gemma2' is not one of .* caps logits"),
        ({"model_type": "mixtral"}, "'mixtral' is not one of .* noise"),
        ({"model_type": ["llama"]}, "not one of"),
        ({"model_type": None}, "not one of"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"vocab_size": 2**30}, "vocab_size"),
        ({"head_dim": 0}, "head_dim"),
        ({"hidden_act": "no_such_function"}, "no model"),
        ({"rms_norm_eps": "tiny"}, "not a valid"),
        ({"hidden_size": 33}, "multiple"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"padding": "x" * 70_000}, "too long"),
    ],
)
def test_configs_that_are_refused(fields, why):
    with pytest.raises(Refused, match=why) as refusal:
        layout_of_config(small_config("llama") | fields)
    assert refusal.value.code == "card.model"


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("mistral", {"sliding_window": 128}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}),
    ],
)
def test_sliding_windows_are_refused(model_type, fields):
    with pytest.raises(Refused, match="sliding"):
        read_config(small_config(model_type, **fields))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_experts": 0}, "num_experts must"),
        ({"num_experts": 2**40}, "num_experts must"),
        ({"num_experts_per_tok": 7}, "more experts than there are"),
        ({"num_experts_per_tok": True}, "num_experts_per_tok must"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size must"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must"),
    ],
)
def test_mixtures_whose_sizes_make_no_sense_are_refused(fields, why):
    with pytest.raises(Refused, match=why):
        layout_of_config(small_config("qwen3_moe") | fields)


@pytest.mark.parametrize("fields", [{"tie_word_embeddings": False}, {"use_bidirectional_attention": True}])
def test_a_gemma_that_some_engine_does_not_have_is_refused(fields):
    with pytest.raises(Refused, match="not supported"):
        read_config(small_config("gemma", **fields))


@pytest.mark.parametrize("model_type", ["gemma", "llama", "mistral", "qwen3", "qwen3_moe"])
def test_heads_may_be_wider_than_their_share(model_type):
    shapes = {spec.name: spec.shape for spec in layout_of_config(small_config(model_type, head_dim=48)).tensors}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (4 * 48, 32)


def test_a_gemmas_embedding_is_scaled():
    """The scale is the computation's, not the layout's: a loader that forgot it would show in every log-prob."""
    model = random_model("gemma")
    with torch.no_grad():
        ids = torch.arange(5)
        scaled = model.model.embed_tokens(ids)
        torch.testing.assert_close(scaled, model.model.embed_tokens.weight[ids] * 32**0.5)
    assert not [spec.name for spec in layout_of_config(small_config("gemma")).tensors if "scale" in spec.name]


def test_an_expert_is_chosen_by_the_tokens_own_state():
    """The same token goes to the same experts whatever comes after it or beside it in the batch."""
    model = random_model("qwen3_moe")
    chosen = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
    ids = torch.randint(0, 130, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(input_ids=ids[:, :9], use_cache=False)
        model(input_ids=torch.cat([ids, ids.flip(1)]), use_cache=False)
    assert torch.equal(chosen[0], chosen[1].view(2, 24, 2)[0, :9])


def test_a_model_larger_than_a_run_is_refused():
    with pytest.raises(Refused, match="bytes"):
        layout_of_config(small_config("llama", hidden_size=2**19, intermediate_size=2**20, num_hidden_layers=2))


def test_fields_that_could_reach_code_are_dropped(tmp_path, monkeypatch):
    """Kernels from the hub, pickled names, import paths: nothing of it reaches the library."""
    (tmp_path / "evil.py").write_text("import os; os.environ['ROLLMESH_TEST_EVIL'] = '1'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    config = small_config(
        "llama",
        attn_implementation="evil/kernel",
        _attn_implementation="evil/kernel",
        _attn_implementation_internal="evil/kernel",
        _name_or_path="evil",
        torch_dtype="float16",
        dtype="float16",
        use_kernels=True,
        attention_dropout=0.5,
        is_encoder_decoder=True,
        architectures=["EvilModel"],
    )
    model = build_model(config)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config._attn_implementation == "sdpa"
    assert model.dtype == torch.bfloat16
    assert model.config.attention_dropout == 0
    assert not model.config.is_encoder_decoder
    assert not hasattr(model.config, "use_kernels")
    assert "ROLLMESH_TEST_EVIL" not in os.environ
