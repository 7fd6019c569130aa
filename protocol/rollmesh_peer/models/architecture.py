"""Which model configs are loaded: a closed list of decoder types whose every field is known.

Invariant: a config, whoever sent it, is data. Only fields that the model type itself declares reach the library;
anything that could fetch or run code (auto_map, kernels, quantisers) is refused or dropped, and sizes are bounded
before a tensor exists.

Left out on purpose, each refused with its reason: sliding windows (the shared-prompt masks of :mod:`.packing` and the
engine's assume full attention), RoPE types whose frequencies depend on the longest sequence seen so far (the same
lease would give other logits in another batch), and types that scale or cap logits outside the output head.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Final

from transformers import CONFIG_MAPPING, PretrainedConfig

from rollmesh_peer.models.folder import Json, refuse_remote_code
from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused

MODEL_TYPES: Final = ("llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")
"""Each has a test: its head on its last hidden state gives its logits, packed or not, cached or not."""
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
MAX_LAYERS: Final = 1024
"""Bounds the time that building an empty model takes; the deepest open model has 126."""
MAX_WIDTH: Final = 1 << 20
"""Of any other size in a config: hidden, intermediate, heads."""
_COMMON: Final = frozenset(field.name for field in dataclasses.fields(PretrainedConfig))
_OLD_ROPE: Final = frozenset({"rope_theta", "rope_scaling"})
_SIZES: Final = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


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
        raise _refused(f"the model type {str(model_type)[:40]!r} is not one of {', '.join(MODEL_TYPES)}")
    known = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    fields = {name: value for name, value in config.items() if name in (known - _COMMON) | _OLD_ROPE}
    _check_sizes(fields)
    try:
        read = CONFIG_MAPPING[model_type].from_dict({**fields, "attention_dropout": 0.0})
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


def _check_attention(config: PretrainedConfig) -> None:
    layers = getattr(config, "layer_types", None) or []
    if getattr(config, "sliding_window", None) is not None or any(kind != "full_attention" for kind in layers):
        raise _refused("models with sliding-window attention are not supported yet")
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default") if isinstance(rope, dict) else None
    if rope_type not in ROPE_TYPES:
        raise _refused(f"the RoPE type {str(rope_type)[:40]!r} is not one of {', '.join(ROPE_TYPES)}")


def _refused(detail: str) -> Refused:
    return Refused("card.model", detail)
