"""Log-probabilities of given completions: one teacher-forced forward pass, the same for trainer and auditor.

Invariant: only completion positions reach the vocabulary, at most ``chunk_tokens`` of them at a time, so that the
float32 logits of a batch never exist together (512 tokens of a 49k vocabulary are 100 MB).

Not here: how rows are laid out (:mod:`.packing`), noise and margins (:mod:`.margins`), the objective (the trainer's).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rollmesh_peer.models.packing import Batch, Ids, batches

CHUNK_TOKENS = 512


def completion_logprobs(
    model: PreTrainedModel, prompts: Sequence[Ids], completions: Sequence[Ids], *, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Return log softmax(logits)[token] of every completion token: 1-D float32, concatenated in the given order.

    ``prompts[i]`` and ``completions[i]`` are 1-D token ids, both non-empty (ValueError). Gradients flow when they are
    enabled; the vocabulary part is then computed again, chunk by chunk, in the backward pass.
    """
    tokens = all_tokens(completions).to(model.device)
    head = output_head(model)
    parts, order = [], []
    for hidden, indices in completion_states(model, prompts, completions):
        order.append(indices)
        chunks = zip(torch.split(hidden, chunk_tokens), torch.split(tokens[indices], chunk_tokens), strict=True)
        for piece, wanted in chunks:
            if torch.is_grad_enabled():
                parts.append(checkpoint(_token_logprobs, head, piece, wanted, use_reentrant=False))
            else:
                parts.append(_token_logprobs(head, piece, wanted))
    return torch.cat(parts)[torch.cat(order).argsort()]


def completion_states(
    model: PreTrainedModel, prompts: Sequence[Ids], completions: Sequence[Ids]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (states [n, hidden], indices int64 [n]): the last hidden states that predict completion tokens.

    The indices point into the concatenation of all completions; together they name each token once.
    """
    for batch in batches(prompts, completions):
        states = _forward(model, batch)
        flat = states.reshape(-1, states.shape[-1])
        yield flat[_on(model, batch.where)], _on(model, batch.order)


def output_head(model: PreTrainedModel) -> nn.Module:
    """Return the module that turns last hidden states into logits."""
    head: object = model.get_output_embeddings()
    assert isinstance(head, nn.Module)  # every type in architecture.MODEL_TYPES has one
    return head


def additive_mask(visible: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return 0 where ``visible`` and -inf elsewhere: made once, where a boolean mask is converted in every layer."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def all_tokens(completions: Sequence[Ids]) -> Tensor:
    """Return all completion tokens in order: int64, 1-D, on the CPU."""
    return torch.from_numpy(np.concatenate([np.asarray(c, dtype=np.int64) for c in completions]))


def _forward(model: PreTrainedModel, batch: Batch) -> Tensor:
    mask = None if batch.visible is None else additive_mask(_on(model, batch.visible), dtype=model.dtype)
    states: Tensor = model.base_model(
        input_ids=_on(model, batch.ids), position_ids=_on(model, batch.positions), attention_mask=mask, use_cache=False
    ).last_hidden_state
    return states


def _token_logprobs(head: nn.Module, hidden: Tensor, tokens: Tensor) -> Tensor:
    logits: Tensor = head(hidden).float()
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def _on(model: PreTrainedModel, array: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
    return torch.from_numpy(array).to(model.device)
