"""A batch with everything per completion token in flat tensors, sample after sample, on the model's device.

Invariant: element k of every tensor speaks of the same token, and the samples' order is the ledger's; micro-batches
pick from it in whatever order suits the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh_learner.training.batch import Sample
from rollmesh_learner.training.loss import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """n samples with K completion tokens in all."""

    samples: Sequence[Sample]
    offsets: NDArray[np.int64]
    """[n + 1] where each sample's tokens begin in the flat tensors."""
    ids: Tensor
    """int64 [K] token ids."""
    tokens: Tokens
    old: Tensor
    """float32 [K]: pi_old, filled in on the way."""
    reference: Tensor | None
    """float32 [K]: log-probabilities under the base model, filled in where the objective asks for them."""

    def where(self, indices: Sequence[int]) -> Tensor:
        """Return the flat positions of the tokens of some samples, in the samples' order."""
        spans = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in indices]
        return torch.from_numpy(np.concatenate(spans)).to(self.old.device)


def flatten(
    samples: Sequence[Sample], *, advantages: NDArray[np.float64], device: torch.device, has_reference: bool
) -> FlatBatch:
    """Lay out a batch; ``advantages`` has one per sample."""
    lengths = np.array([len(sample.tokens) for sample in samples])
    ids = np.concatenate([sample.tokens for sample in samples]).astype(np.int64)
    tokens = Tokens(
        mu=torch.from_numpy(np.concatenate([sample.mu for sample in samples])).to(device),
        exact=torch.from_numpy(np.repeat([sample.exact for sample in samples], lengths)).to(device),
        advantage=torch.from_numpy(np.repeat(advantages, lengths).astype(np.float32)).to(device),
    )
    return FlatBatch(
        samples=samples,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        ids=torch.from_numpy(ids).to(device),
        tokens=tokens,
        old=torch.zeros(len(ids), device=device),
        reference=torch.zeros(len(ids), device=device) if has_reference else None,
    )
