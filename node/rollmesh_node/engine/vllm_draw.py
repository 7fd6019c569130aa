"""The seeded draw as one Triton kernel: what rollmesh_peer.models.sampling computes, without a word to the host.

Invariant: the same token as the reference for the same float32 logits, key and position: noise and sums are float64
here too. ``draw`` in torch asks the device how many candidates there are, which makes the host wait for each step and
undoes vLLM's scheduling ahead; here every size is known beforehand. The price is noise for every token that could win
at all, those within G_MAX - G_MIN = 20.2 of the row's largest logit; pieces of the vocabulary without one are skipped.

A row without a finite largest logit gets log-prob NaN, which the backend refuses. Not here: who draws when. This module
imports triton, so only a process with a CUDA device imports it (a test runs the kernel in Triton's interpreter).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

from rollmesh_protocol import sampling as reference

REACH: Final = reference.G_MAX - reference.G_MIN + 1e-3
"""Nats below the largest logit beyond which no token can win; the rest is for float32 rounding."""
PIECE: Final = 4096
"""Tokens that one program looks at."""
_NO_TOKEN: Final = 1 << 40


def draw_without_waiting(logits: Tensor, *, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens int64 [B], log-probs float32 [B]) for float32 ``logits`` [B, V].

    ``keys`` int64 [B, 3] on the same device: position, and the low and high 32 bits of the seed.
    """
    rows, vocabulary = logits.shape
    pieces = triton.cdiv(vocabulary, PIECE)
    best = torch.empty((rows, pieces), dtype=torch.float64, device=logits.device)
    token = torch.empty((rows, pieces), dtype=torch.int64, device=logits.device)
    weight = torch.empty((rows, pieces), dtype=torch.float32, device=logits.device)
    largest = logits.amax(-1)
    _scan[(rows, pieces)](
        logits, logits.stride(0), vocabulary, largest, keys, best, token, weight, REACH=REACH, PIECE=PIECE
    )
    winning = torch.where(best == best.amax(-1, keepdim=True), token, _NO_TOKEN).amin(-1)  # of equal sums the lowest id
    tokens = winning.clamp(max=vocabulary - 1)
    logprobs = logits.gather(-1, tokens[:, None])[:, 0] - (largest + weight.sum(-1).log())
    return tokens, torch.where(torch.isfinite(largest), logprobs, torch.nan)


@triton.jit  # type: ignore[untyped-decorator]
def _scan(  # type: ignore[no-untyped-def] # noqa: ANN202, PLR0917
    logits,  # noqa: ANN001
    stride,  # noqa: ANN001
    vocabulary,  # noqa: ANN001
    largest,  # noqa: ANN001
    keys,  # noqa: ANN001
    best,  # noqa: ANN001
    token,  # noqa: ANN001
    weight,  # noqa: ANN001
    REACH: tl.constexpr,  # noqa: N803
    PIECE: tl.constexpr,  # noqa: N803
):
    """Write one piece's best sum, its token and its sum of exp(logit - largest)."""
    row = tl.program_id(0)
    piece = tl.program_id(1)
    pieces = tl.num_programs(1)
    counter = piece * (PIECE // 4) + tl.arange(0, PIECE // 4)
    ids = counter[:, None] * 4 + tl.arange(0, 4)[None, :]
    values = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocabulary, other=float("-inf"))
    top = tl.load(largest + row)
    tl.store(weight + row * pieces + piece, tl.sum(tl.exp(values - top)))
    sums = tl.full((PIECE // 4, 4), float("-inf"), tl.float64)
    if tl.max(values) >= top - REACH:
        position = tl.load(keys + row * 3).to(tl.uint32)
        low = tl.load(keys + row * 3 + 1).to(tl.uint32)
        high = tl.load(keys + row * 3 + 2).to(tl.uint32)
        zero = counter.to(tl.uint32) * 0
        first, second, third, fourth = philox_impl(
            counter.to(tl.uint32), zero + position, zero, zero, zero + low, zero + high
        )
        column = tl.arange(0, 4)[None, :]
        words = tl.where(
            column < 2,
            tl.where(column == 0, first[:, None], second[:, None]),
            tl.where(column == 2, third[:, None], fourth[:, None]),
        )
        v = ((words >> 8).to(tl.float64) + 0.5) * 0.000000059604644775390625  # 2^-24
        noise = -tl.log(-tl.log(1.0 - v))  # 1 - v is exact
        sums = tl.where(values >= top - REACH, values.to(tl.float64) + noise, sums)
    most = tl.max(sums)
    tl.store(best + row * pieces + piece, most)
    tl.store(token + row * pieces + piece, tl.min(tl.where(sums == most, ids, 2147483647)).to(tl.int64))
