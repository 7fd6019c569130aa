"""Tiny random models of every architecture, as weights on disk, small enough to be made on the fly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rollmesh_node.engine.backend import Weights
from rollmesh_peer.models.folder import Json
from rollmesh_peer.models.image import layout_of, weights_of, write_image
from rollmesh_peer.models.loader import build_model

VOCABULARY = 320
"""256 bytes, some markers, and ids that no text has."""
POSITIONS = 2048
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "qwen3_moe")
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-5, "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258,
}  # fmt: skip
"""Heads of 32 are the smallest that vLLM's kernels for processors take."""
_OWN: dict[str, dict[str, object]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None, "tie_word_embeddings": False},
    "qwen2": {"hidden_size": 128, "tie_word_embeddings": True},  # whose heads have no size of their own
    "qwen3": {"tie_word_embeddings": False},
    "gemma": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    "qwen3_moe": {
        "tie_word_embeddings": False, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two sets of weights of one architecture."""

    first: Weights
    second: Weights


def config_of(model_type: str) -> Json:
    config = {"model_type": model_type, **SIZES, **_OWN[model_type]}
    if model_type == "qwen2":
        del config["head_dim"]
    return config


def make_pair(model_type: str, folder: Path) -> Pair:
    first, second = (make_weights(model_type, folder / f"{model_type}-{seed}", seed=seed) for seed in (1, 2))
    return Pair(first, second)


def make_weights(model_type: str, image: Path, *, seed: int) -> Weights:
    """Weights whose logits spread by about 2, as the image of their layout."""
    config = config_of(model_type)
    model = build_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in weights_of(model).items():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * _spread(name) + _centre(name, model_type))
    layout = layout_of(model)
    write_image(weights_of(model), layout=layout, image=image)
    return Weights(config=config, layout=layout, image=image)


def _spread(name: str) -> float:
    if "embed" in name or "lm_head" in name:
        return 0.25
    if "norm" in name or "bias" in name:
        return 0.1
    return 0.5 if name.endswith("mlp.gate.weight") else 0.16  # a router that knows what it wants, as trained ones do


def _centre(name: str, model_type: str) -> float:
    return 1.0 if "norm" in name and model_type != "gemma" else 0.0  # gemma adds the 1 itself
