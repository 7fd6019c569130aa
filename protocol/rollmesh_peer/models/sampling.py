"""Seeded sampling in torch: the draws of :mod:`rollmesh_protocol.sampling`, batched, and only where they can matter.

Invariant: ``draw`` chooses exactly the token that the numpy reference chooses for the same float32 logits, seed and
position; pruning skips only tokens that cannot win. The noise has a largest value G_MAX, so once some token reaches
the sum z*, a token with ``logit < z* - G_MAX`` is out without a look at its noise; of those whose noise words are
computed, only the few with ``v <= exp(logit - z*)`` (a necessary condition, since -log1p(-v) >= v) get logarithms.
Everything that decides is float64.

Not here: temperature, top-k or top-p (rollouts are drawn from the model as it is), and the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh_protocol import sampling as reference
from rollmesh_protocol.errors import HostError

FIRST_LOOK: Final = 3.0
"""Nats below the largest logit within which noise is computed first, to get a good z*: a few tokens a row."""
SLACK: Final = 1e-3
"""Nats by which both pruning bounds are widened against float32 rounding of logits and exponentials (about 1e-6)."""
ROWS_AT_ONCE: Final = 8
"""Rows whose float32 logits are worked on together on a CPU: 8 x 49,152 x 4 bytes stay in the cache."""
_WORD: Final = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Draws:
    """One draw per row, in the order of the logits' rows."""

    tokens: Tensor
    """int64 [B]: argmax of logits + noise."""
    best: Tensor
    """float64 [B]: that largest sum, z*."""
    normalizer: Tensor
    """float32 [B]: logsumexp of the logits."""
    logprobs: Tensor
    """float32 [B]: log softmax(logits)[token], before any noise."""


def draw(logits: Tensor, *, seeds: Sequence[int], positions: Sequence[int]) -> Draws:
    """Draw one token per row of ``logits`` [B, V] (bf16, fp16 or fp32) with seeds[b] at completion position positions[b].

    Raises ``HostError`` when a row has no finite largest logit: the model is broken, and any token would be a lie.
    """
    if not len(logits) == len(seeds) == len(positions):
        raise ValueError(f"{len(logits)} rows, {len(seeds)} seeds, {len(positions)} positions")
    keys = _keys(seeds, positions)
    at_once = ROWS_AT_ONCE if logits.device.type == "cpu" else max(len(logits), 1)
    parts = [
        _draw_rows(logits[start : start + at_once], keys[start : start + at_once])
        for start in range(0, len(logits), at_once)
    ]
    return Draws(
        tokens=torch.cat([part.tokens for part in parts]),
        best=torch.cat([part.best for part in parts]),
        normalizer=torch.cat([part.normalizer for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]),
    )


def noise(*, seeds: Sequence[int], positions: Sequence[int], token_ids: Tensor) -> Tensor:
    """Return g(seeds[b], positions[b], token_ids[b, ...]) as float64 in the shape of ``token_ids`` [B, ...]."""
    ids = token_ids.reshape(len(seeds), -1)
    rows = torch.arange(len(seeds), device=ids.device)[:, None].expand_as(ids).reshape(-1)
    k = _k_of_counters(_keys(seeds, positions), rows, ids.reshape(-1) // reference.TOKENS_PER_COUNTER)
    k = k.gather(1, (ids.reshape(-1, 1) % reference.TOKENS_PER_COUNTER))
    return _gumbel(k).reshape(token_ids.shape)


def _draw_rows(logits: Tensor, keys: NDArray[np.uint64]) -> Draws:
    values = logits.detach().float()
    vocabulary = values.shape[-1]
    if vocabulary % reference.TOKENS_PER_COUNTER:
        short = reference.TOKENS_PER_COUNTER - vocabulary % reference.TOKENS_PER_COUNTER
        values = torch.nn.functional.pad(values, (0, short), value=-math.inf)
    largest = values.amax(-1)
    if not bool(torch.isfinite(largest).all()):
        raise HostError("the model's logits are not finite; the weights or the engine are broken", code="node.engine")
    weights = (values - largest[:, None]).exp_()
    rows = _Rows(values=values, weights=weights, largest=largest, keys=keys)
    _, best = rows.best_of(torch.full_like(largest, math.exp(-FIRST_LOOK)), largest.double() + reference.G_MIN)
    floor = (best - reference.G_MAX - SLACK - largest).exp().float()
    tokens, best = rows.best_of(floor, best)
    normalizer = largest + weights.sum(-1).log()
    chosen = values.gather(-1, tokens[:, None])[:, 0]
    return Draws(tokens=tokens, best=best, normalizer=normalizer, logprobs=chosen - normalizer)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Some rows of logits on their way to a draw. V is a multiple of the tokens per counter here."""

    values: Tensor
    """float32 [B, V]: the logits."""
    weights: Tensor
    """float32 [B, V]: exp(logits - largest)."""
    largest: Tensor
    """float32 [B]."""
    keys: NDArray[np.uint64]
    """[B, 3]: position and the two key words."""

    def best_of(self, floor: Tensor, reached: Tensor) -> tuple[Tensor, Tensor]:
        """Return token and sum of the best token among those with ``weight >= floor`` [B].

        ``reached`` (float64 [B]) is a sum that the best is known not to fall below. Of equal sums the lowest id wins.
        """
        width = reference.TOKENS_PER_COUNTER
        few = (self.weights >= floor[:, None]).view(torch.int32)  # 4 bools in one word: any of a counter's tokens
        rows, groups = few.nonzero().unbind(1)
        k = _k_of_counters(self.keys, rows, groups)
        reach = (self.largest - reached + SLACK).exp().float()
        weights = self.weights.view(len(floor), -1, width)[rows, groups]
        at, column = ((k + 0.5) * 2.0**-reference.K_BITS <= weights * reach[rows, None]).nonzero().unbind(1)
        rows, tokens = rows[at], groups[at] * width + column
        sums = self.values[rows, tokens].double() + _gumbel(k[at, column])
        best = torch.full_like(reached, -math.inf).scatter_reduce(0, rows, sums, "amax")
        winners = sums == best[rows]
        first = torch.full_like(reached, self.values.shape[1], dtype=torch.int64)
        return first.scatter_reduce(0, rows[winners], tokens[winners], "amin"), best


def _gumbel(k: Tensor) -> Tensor:
    return -torch.log(-torch.log1p(-(k.double() + 0.5) * 2.0**-reference.K_BITS))


def _keys(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint64]:
    return np.array([(p, *reference.split_seed(s)) for s, p in zip(seeds, positions, strict=True)], dtype=np.uint64)


def _k_of_counters(keys: NDArray[np.uint64], rows: Tensor, groups: Tensor) -> Tensor:
    """Return the 24-bit numbers of counters ``groups`` [n] under the keys of ``rows`` [n]: int32 [n, 4]."""
    shift = 32 - reference.K_BITS
    if rows.device.type == "cpu":  # numpy's uint64 arithmetic is 1.6 times as fast as torch's int64 here
        position, low, high = keys.T[:, rows.numpy()]
        words = reference.philox4x32((groups.numpy().astype(np.uint64), position, 0, 0), (low, high))
        return torch.from_numpy((words >> np.uint32(shift)).view(np.int32))
    table = torch.from_numpy(keys.view(np.int64)).to(rows.device)
    position, low, high = table[rows].unbind(1)
    return (philox(groups, position, low, high) >> shift).int()


def philox(c0: Tensor, c1: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    """Return Philox4x32-10 of counters (c0, c1, 0, 0) and keys (k0, k1): int64 [n] in, int64 [n, 4] out, 32 bits each.

    A 32-bit product may wrap into int64's sign; the bits are right, and the mask after the shift drops the copies.
    """
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    (m0, m1), (w0, w1) = reference.MULTIPLIERS, reference.WEYL
    for round_ in range(reference.ROUNDS):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1 = ((p1 >> 32) ^ c1 ^ (k0 + round_ * w0)) & _WORD, p1
        c2, c3 = ((p0 >> 32) ^ c3 ^ (k1 + round_ * w1)) & _WORD, p0
    return torch.stack([c0, c1 & _WORD, c2, c3 & _WORD], dim=-1)
