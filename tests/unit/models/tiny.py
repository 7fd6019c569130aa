"""What the tests of models and engine share: the tiny model, random rollouts, and a naive model of every type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh_peer.models.folder import Json
from rollmesh_peer.models.image import weights_of
from rollmesh_peer.models.loader import build_model
from rollmesh_protocol import sampling
from rollmesh_protocol.layout import Layout


@dataclass(frozen=True)
class Tiny:
    folder: Path
    image: Path
    config: Json
    layout: Layout
    bf16: PreTrainedModel
    fp32: PreTrainedModel


EXTRA: dict[str, dict[str, object]] = {
    "gemma": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
"""What some types need beside the fields that all have."""


def small_config(model_type: str, **fields: object) -> dict[str, object]:
    """A config of 2 narrow layers of any type that is loaded."""
    return {
        "model_type": model_type, "vocab_size": 130, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": None,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        **EXTRA.get(model_type, {}), **fields,
    }  # fmt: skip


def random_model(model_type: str, **fields: object) -> PreTrainedModel:
    """A model of a type in float32 with random weights."""
    model = build_model(small_config(model_type, **fields), arithmetic="float32")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in weights_of(model).values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + (tensor.ndim == 1))
    return model


def random_ids(seed: int, lengths: Sequence[int], *, vocabulary: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocabulary, length).astype(np.uint32) for length in lengths]


@torch.no_grad()
def naive_logits(model: PreTrainedModel, prompt: np.ndarray, completion: np.ndarray) -> Tensor:
    """The logits that predict each completion token, float32 [n, V]: one sequence, no padding, no cache."""
    ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits


def naive_logprobs(model: PreTrainedModel, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]) -> Tensor:
    """What :func:`rollmesh_peer.models.logprobs.completion_logprobs` must give, one sequence at a time."""
    parts = []
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = torch.from_numpy(completion.astype(np.int64))
        parts.append(naive_logits(model, prompt, completion).log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    return torch.cat(parts)


def naive_generate(
    model: PreTrainedModel, prompt: np.ndarray, *, seed: int, max_new_tokens: int, stop: frozenset[int]
) -> list[int]:
    """Draw a completion with the numpy reference, recomputing everything for every token."""
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in stop):
        logits = naive_logits(model, prompt, np.array([*tokens, 0], dtype=np.uint32))[-1]
        tokens.append(sampling.sample_token(logits.numpy(), seed, len(tokens)))
    return tokens
