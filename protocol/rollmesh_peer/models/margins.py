"""Was this completion drawn from these weights with this seed? The measurement, without a verdict.

For every token: ``margin = max_j z_j - z_claimed`` with ``z = logits + noise`` under the weights at hand. An honest
draw has margin 0, or a little more where two sums nearly tie and kernels round differently; any other way of choosing
tokens shows as margins of several nats (trust.md).

Not here: thresholds and verdicts (the learner's audit), and which weights (the caller loads the exact root).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from rollmesh_peer.models.logprobs import CHUNK_TOKENS, all_tokens, completion_states, output_head
from rollmesh_peer.models.packing import Ids
from rollmesh_peer.models.sampling import draw, noise


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One completion as it was reported, or a piece of one: then ``prompt`` ends with the tokens before it."""

    prompt: Ids
    completion: Ids
    seed: int
    first: int = 0
    """The position of the first of ``completion``: 0 is the first token after the prompt that was asked."""


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """What the weights say about one claim, per completion token."""

    margins: NDArray[np.float32]
    """>= 0; exactly 0 where the claimed token is the one that these kernels draw."""
    logprobs: NDArray[np.float32]
    """log softmax(logits)[claimed token]: the exact mu."""


@torch.no_grad()
def recompute(model: PreTrainedModel, claims: Sequence[Claim], *, chunk_tokens: int = CHUNK_TOKENS) -> list[Recomputed]:
    """Return the recomputation of every claim, in the given order. Claims of one prompt share its prefill."""
    completions = [claim.completion for claim in claims]
    tokens = all_tokens(completions)
    seeds = [claim.seed for claim in claims for _ in claim.completion]
    positions = [claim.first + position for claim in claims for position in range(len(claim.completion))]
    margins = np.empty(len(tokens), dtype=np.float32)
    logprobs = np.empty(len(tokens), dtype=np.float32)
    head = output_head(model)
    for hidden, indices in completion_states(model, [claim.prompt for claim in claims], completions):
        chunks = zip(torch.split(hidden, chunk_tokens), torch.split(indices.cpu(), chunk_tokens), strict=True)
        for piece, some in chunks:
            logits = head(piece)
            where = some.tolist()
            chunk = [seeds[i] for i in where], [positions[i] for i in where]
            drawn = draw(logits, seeds=chunk[0], positions=chunk[1])
            claimed = tokens[some].to(logits.device)
            values = logits.gather(-1, claimed[:, None])[:, 0].float()
            sums = values.double() + noise(seeds=chunk[0], positions=chunk[1], token_ids=claimed)
            rows = some.numpy()  # an array of one: as a tensor, numpy would take it for a plain number
            margins[rows] = (drawn.best - sums).float().cpu().numpy()
            logprobs[rows] = (values - drawn.normalizer).cpu().numpy()
    ends = np.cumsum([len(completion) for completion in completions])[:-1]
    return [
        Recomputed(margins=m, logprobs=p)
        for m, p in zip(np.split(margins, ends), np.split(logprobs, ends), strict=True)
    ]
