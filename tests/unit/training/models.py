"""Tiny models for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from rollmesh_learner.training.session import Session
from rollmesh_learner.training.settings import TrainingSettings
from rollmesh_peer.models.image import weights_of
from rollmesh_peer.models.loader import build_model
from rollmesh_protocol.verdicts.logprobs import LogprobLimits

SIZES = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "sliding_window": None,
    "pad_token_id": 257, "bos_token_id": 258, "eos_token_id": 259,
}  # fmt: skip


def random_model(model_type: str, *, dtype: torch.dtype = torch.float64, **config: object) -> PreTrainedModel:
    """A model of a type with random weights; in float64, so that only rounding of float32 parts is left."""
    model = build_model({"model_type": model_type, "tie_word_embeddings": True, **SIZES, **config})
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in weights_of(model).values():
            tensor.copy_(torch.randn(tensor.shape) * 0.2 + (tensor.ndim == 1))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype != dtype:
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))
    model.tie_weights()
    return model.requires_grad_(True)


def open_session(
    folder: Path, *, checkpoint: Path | None = None, normaliser: float = 96.0, **settings: object
) -> Session:
    """A trainer of one thread in this process."""
    return Session.open(
        folder,
        checkpoint_folder=checkpoint,
        settings=TrainingSettings(**({"lr": 1e-3} | settings)),
        limits=LogprobLimits(),
        normaliser=normaliser,
        threads=1,
        seed=7,
        device="cpu",
    )
