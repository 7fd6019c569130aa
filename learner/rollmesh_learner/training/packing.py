"""The forward pass over a forest of prefixes: last hidden states of exactly the nodes that predict completion tokens.

Attention goes block by block: a block's queries meet their common ancestors and each other, and nothing else is ever
computed, which at short completions is a sixth of the row's all-pairs attention. Small blocks are plain matrix products
in float32 (nothing to lose to rounding, quicker than a fused kernel at this size); large ones are PyTorch's SDPA, which
holds no scores.

Invariant: with no plan in hand the attention function is plain causal SDPA, so the model computes as any other does.
The architectures that :mod:`rollmesh_peer.models.architecture` admits pass keyword arguments through to attention and
attend fully; a test compares each with the unpacked pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from rollmesh_learner.training import forest as forests
from rollmesh_learner.training.batch import Sample

ATTENTION: Final = "rollmesh_forest"
"""The name under which transformers finds :func:`forest_attention`."""
BLOCK_NODES: Final = 128
"""Nodes of a block. On two cores 100-160 were equally quick, 64 and 400 took 1.5 x and 2 x as long."""
SMALL_SCORES: Final = 512 * 512
"""Scores per head up to which a block is computed with plain matrix products; 1 MiB of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One block, ready to compute."""

    first: int
    last: int
    keys: int
    """How many keys the block's queries meet."""
    bias: Tensor
    """float32 [n, keys]: 0 where a query sees a key, -inf where not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The blocks of one forest on the model's device."""

    parts: tuple[Part, ...]
    gather: Tensor
    """int64: the keys of all blocks, one after the other."""


def enable(model: PreTrainedModel) -> None:
    """Let ``model`` attend by forest when :func:`completion_states` asks for it; otherwise it computes as before."""
    AttentionInterface.register(ATTENTION, forest_attention)
    model.set_attn_implementation(ATTENTION)


def completion_states(model: PreTrainedModel, samples: Sequence[Sample]) -> tuple[Tensor, int]:
    """Return the last hidden state that predicts each completion token, [K, hidden], sample after sample.

    The second value is the number of tokens computed. Gradients flow when they are enabled. ``model`` must have been
    through :func:`enable`.
    """
    forest = forests.grow(samples)
    states: Tensor = model.base_model(
        input_ids=torch.from_numpy(forest.tokens)[None].to(model.device),
        position_ids=torch.from_numpy(forest.positions)[None].to(model.device),
        use_cache=False,
        forest=plan(forest, device=model.device),
    ).last_hidden_state
    return states[0].index_select(0, torch.from_numpy(forest.sources).to(model.device)), len(forest.tokens)


def plan(forest: forests.Forest, *, device: torch.device, block_nodes: int = BLOCK_NODES) -> Plan:
    """Prepare the blocks of ``forest`` for every layer of one forward pass."""
    parts, keys = [], []
    for block in forests.blocks(forest, max_nodes=block_nodes):
        seen = torch.from_numpy(forests.visible(forest, block=block)).to(device)
        bias = torch.zeros(seen.shape, dtype=torch.float32, device=device).masked_fill_(~seen, -torch.inf)
        parts.append(Part(first=block.first, last=block.last, keys=seen.shape[1], bias=bias))
        keys.append(np.concatenate([block.above, np.arange(block.first, block.last)]))
    return Plan(parts=tuple(parts), gather=torch.from_numpy(np.concatenate(keys)).to(device))


def forest_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    forest: Plan | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend as transformers asks: query [B, H, N, D], key and value [B, H / g, N, D] -> [B, N, H, D].

    With ``forest`` B is 1 and each node sees its ancestors; without, attention is causal under ``attention_mask``.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    groups = query.shape[1] // key.shape[1]
    if forest is None:
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        causal = attention_mask is None and query.shape[2] > 1
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scale, is_causal=causal
        )
        return out.transpose(1, 2).contiguous(), None
    sizes = [part.keys for part in forest.parts]
    keys = key[0].index_select(1, forest.gather).float().split_with_sizes(sizes, dim=1)
    values = value[0].index_select(1, forest.gather).float().split_with_sizes(sizes, dim=1)
    queries = (query[0].float() * scale).view(-1, groups, *query.shape[2:])
    outs = [
        _attend(queries[:, :, part.first : part.last], k, v, bias=part.bias)
        for part, k, v in zip(forest.parts, keys, values, strict=True)
    ]
    return torch.cat(outs, dim=2).flatten(0, 1).transpose(0, 1)[None].to(query.dtype), None


def _attend(query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor) -> Tensor:
    """Attend within one block: query [H / g, g, n, D] (scaled), key and value [H / g, k, D] -> [H / g, g, n, D]."""
    heads, groups, nodes, width = query.shape
    if nodes * key.shape[1] > SMALL_SCORES:
        many = (heads, groups, *key.shape[1:])
        return functional.scaled_dot_product_attention(
            query, key[:, None].expand(many), value[:, None].expand(many), attn_mask=bias, scale=1.0
        )
    scores = (query.reshape(heads, groups * nodes, width) @ key.mT).view(heads, groups, nodes, -1) + bias
    weights = scores.softmax(-1).view(heads, groups * nodes, -1)
    return (weights @ value).view(query.shape)
