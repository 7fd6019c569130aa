"""Which model configs are loaded: a closed list of decoder types whose every field is known.

Invariant: a config, whoever sent it, is data. Only fields that the model type itself declares reach the library;
anything that could fetch or run code (auto_map, kernels, quantisers) is refused or dropped, and sizes are bounded
before a tensor exists.

Left out on purpose, each refused with its reason: sliding windows (the shared-prompt masks of :mod:`.packing` and the
engine's assume full attention), RoPE types whose frequencies depend on the longest sequence seen so far (the same
lease would give other logits in another batch), types that scale or cap logits outside the output head, and mixtures
of experts whose routing depends on anything but the token's own state (noise, or experts that fill up).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Final

from transformers import CONFIG_MAPPING, PretrainedConfig

from rollmesh_peer.models.folder import Json, refuse_remote_code
from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused

MODEL_TYPES: Final = ("gemma", "llama", "mistral", "olmo2", "qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Each has a test: its head on its last hidden state gives its logits, packed or not, cached or not."""
REASONS: Final = {
    "gemma2": "it caps logits and has sliding windows",
    "gemma3_text": "it has sliding windows",
    "gpt_oss": "it has sliding windows and attention sinks",
    "mixtral": "its training adds noise to the routing; qwen3_moe is the mixture that is loaded",
    "granite": "it scales logits outside the output head",
    "cohere": "it scales logits outside the output head",
}
"""Of types that people ask for, why they are left out."""
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
MAX_LAYERS: Final = 1024
"""Bounds the time that building an empty model takes; the deepest open model has 126."""
MAX_WIDTH: Final = 1 << 20
"""Of any other size in a config: hidden, intermediate, heads."""
_COMMON: Final = frozenset(field.name for field in dataclasses.fields(PretrainedConfig))
_OLD_ROPE: Final = frozenset({"rope_theta", "rope_scaling"})
_UNDECLARED: Final = {"qwen3_moe": frozenset({"head_dim"})}
"""Sizes that a type's model reads though its config does not declare them."""
_SIZES: Final = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_EXPERT_SIZES: Final = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")


def read_config(config: Json) -> PretrainedConfig:
    """Return the library's config for ``config`` (the object of a config.json).

    Raises ``Refused("card.model")`` with a sentence for anything that this loader does not load.
    """
    if len(json.dumps(config, default=str)) > limits.MAX_MODEL_CONFIG_BYTES:
        raise _refused("the config is too long")
    refuse_remote_code(config, where="the config")
    if config.get("quantization_config"):
        raise _refused("the config asks for quantised weights; runs use bf16, fp16 or fp32")
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        name = str(model_type)[:40]
        why = REASONS.get(name)
        raise _refused(
            f"the model type {name!r} is not one of {', '.join(MODEL_TYPES)}{f': {why}' if why else ''}",
        )
    known = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    allowed = (known - _COMMON) | _OLD_ROPE | _UNDECLARED.get(model_type, frozenset())
    fields = {name: value for name, value in config.items() if name in allowed}
    _check_sizes(fields)
    fixed: Json = {"attention_dropout": 0.0}
    if model_type == "qwen3_moe":
        _check_experts(fields)
        fixed = {**fixed, "output_router_logits": False}
    try:
        read = CONFIG_MAPPING[model_type].from_dict({**fields, **fixed})
    except Exception as error:  # the library raises many types for a bad config; all mean the same here
        why = " ".join(str(error).split())[:200]
        raise _refused(f"the config is not a valid {model_type} config: {why}") from error
    _check_attention(read)
    return read


def _check_sizes(fields: Json) -> None:
    bounds = {"vocab_size": limits.MAX_VOCABULARY, "num_hidden_layers": MAX_LAYERS}
    for name in ("vocab_size", "num_hidden_layers", *_SIZES):
        size, most = fields.get(name), bounds.get(name, MAX_WIDTH)
        if size is None and name in {"head_dim", "num_key_value_heads"}:
            continue
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= most:
            raise _refused(f"{name} must be a whole number from 1 to {most}")


def _check_experts(fields: Json) -> None:
    """Every token goes to its best experts, whatever else is in the batch; there must be enough of them."""
    defaults = {"decoder_sparse_step": 1}
    sizes = {name: fields.get(name, defaults.get(name)) for name in _EXPERT_SIZES}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_WIDTH:
            raise _refused(f"{name} must be a whole number from 1 to {MAX_WIDTH}")
    if sizes["num_experts_per_tok"] > sizes["num_experts"]:  # type: ignore[operator]  # whole numbers by now
        raise _refused("a token cannot go to more experts than there are")


def _check_attention(config: PretrainedConfig) -> None:
    layers = getattr(config, "layer_types", None) or []
    if getattr(config, "sliding_window", None) is not None or any(kind != "full_attention" for kind in layers):
        raise _refused("models with sliding-window attention are not supported yet")
    if getattr(config, "use_bidirectional_attention", None):
        raise _refused("models whose tokens see what comes after them are not supported")
    if config.model_type == "gemma" and not config.tie_word_embeddings:
        raise _refused("a gemma whose output head is not its embedding is not supported: not every engine has one")
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default") if isinstance(rope, dict) else None
    if rope_type not in ROPE_TYPES:
        raise _refused(f"the RoPE type {str(rope_type)[:40]!r} is not one of {', '.join(ROPE_TYPES)}")


def _refused(detail: str) -> Refused:
    return Refused("card.model", detail)
