"""Seeded sampling in torch: the draws of :mod:`rollmesh_protocol.sampling`, batched, and only where they can matter.

Invariant: ``draw`` chooses exactly the token that the numpy reference chooses for the same float32 logits, seed and
position; pruning skips only tokens that cannot win. The noise has a largest value G_MAX, so once some token reaches
the sum z*, a token with ``logit < z* - G_MAX`` is out without a look at its noise; of those whose noise words are
computed, only the few with ``v <= exp(logit - z*)`` (a necessary condition, since -log1p(-v) >= v) get logarithms.
Everything that decides is float64. On a CPU the search is a compiled loop (:mod:`.sampling_kernel`), elsewhere torch.

Not here: temperature, top-k or top-p (rollouts are drawn from the model as it is), and the model itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh_protocol import sampling as reference
from rollmesh_protocol.errors import HostError

FIRST_LOOK: Final = 5.0
"""Nats below the largest logit within which noise is computed first, to get a good z*: a few tokens a row."""
SLACK: Final = 1e-3
"""Nats by which both pruning bounds are widened against float32 rounding of logits and exponentials (about 1e-6)."""
ROWS_AT_ONCE: Final = 16
"""Rows whose float32 logits are worked on together on a CPU: 3 MB of a 49k vocabulary stay in the last-level cache."""
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
    """Draw one token per row of ``logits`` [B, V] (bf16, fp16 or fp32), with seeds[b] at position positions[b].

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
    position, low, high = torch.from_numpy(_keys(seeds, positions).view(np.int64)).to(ids.device)[rows].unbind(1)
    words = philox(ids.reshape(-1) // reference.TOKENS_PER_COUNTER, position, low, high)
    word = words.gather(1, (ids.reshape(-1, 1) % reference.TOKENS_PER_COUNTER))
    return _gumbel(word >> (32 - reference.K_BITS)).reshape(token_ids.shape)


def _draw_rows(logits: Tensor, keys: NDArray[np.uint64]) -> Draws:
    values = logits.detach().float()
    if short := -values.shape[-1] % reference.TOKENS_PER_COUNTER:
        values = torch.nn.functional.pad(values, (0, short), value=-math.inf)
    largest = values.amax(-1)
    if not bool(torch.isfinite(largest).all()):
        raise HostError("the model's logits are not finite; the weights or the engine are broken")
    weights = (values - largest[:, None]).exp_()
    search = _winners_here if _is_here(values) else _winners_there
    tokens, best = search(values, weights, largest, keys)
    normalizer = largest + weights.sum(-1).log()
    chosen = values.gather(-1, tokens[:, None])[:, 0]
    return Draws(tokens=tokens, best=best, normalizer=normalizer, logprobs=chosen - normalizer)


def _is_here(values: Tensor) -> bool:
    return values.device.type == "cpu"


def _winners_here(values: Tensor, weights: Tensor, largest: Tensor, keys: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
    """Return (int64 [B], float64 [B]), each row's winner and its sum, by the compiled loop, rows side by side."""
    from rollmesh_peer.models.sampling_kernel import draw_rows  # loads the compiler, for which a GPU has no use

    tokens, best = torch.empty(len(values), dtype=torch.int64), torch.empty(len(values), dtype=torch.float64)
    first_look = math.exp(-FIRST_LOOK)
    heavy: NDArray[np.int32] = (weights >= first_look).view(torch.int32).numpy()  # four bools in one word
    plain: NDArray[np.float32] = values.contiguous().numpy()
    peaks: NDArray[np.float32] = largest.numpy()
    words = keys.astype(np.uint32)

    def draw_some(start: int, end: int) -> None:
        rows = slice(start, end)
        draw_rows(
            plain[rows], heavy[rows], peaks[rows], words[rows], first_look, SLACK, tokens.numpy()[rows],
            best.numpy()[rows],
        )  # fmt: skip

    threads = min(torch.get_num_threads(), len(values))
    cuts = pairwise(len(values) * part // threads for part in range(threads + 1))
    if threads == 1:
        draw_some(0, len(values))
    else:
        deque(_threads(threads).map(lambda cut: draw_some(*cut), cuts), maxlen=0)
    return tokens, best


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="draw")


def _winners_there(values: Tensor, weights: Tensor, largest: Tensor, keys: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
    """Do the same in torch, on the device of ``values``."""
    heavy = math.exp(-FIRST_LOOK)
    tokens, best = _best(
        values, _survivors(weights, torch.full_like(largest, heavy), torch.full_like(largest, 1.0), keys)
    )
    # What has not been looked at weighs less than `heavy`, so it wins with v <= heavy * exp(largest - best) only.
    floor = (best - reference.G_MAX - SLACK - largest).exp().float()
    ceiling = (largest - best + SLACK).exp().float() * heavy
    more, better = _best(values, _survivors(weights, floor, ceiling, keys))
    tokens = torch.where((better > best) | ((better == best) & (more < tokens)), more, tokens)
    return tokens, torch.maximum(best, better)


def _best(values: Tensor, candidates: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return per row (int64 [B], float64 [B]) the best of candidates (rows, tokens, k) and its sum; -inf for none."""
    rows, tokens, k = candidates
    sums = values[rows, tokens].double() + _gumbel(k)
    best = torch.full((len(values),), -math.inf, dtype=torch.float64, device=values.device)
    best = best.scatter_reduce(0, rows, sums, "amax")
    ties = sums == best[rows]  # of equal sums the lowest id wins
    first = torch.full((len(values),), values.shape[1], device=values.device)
    return first.scatter_reduce(0, rows[ties], tokens[ties], "amin"), best


def _survivors(
    weights: Tensor, floor: Tensor, ceiling: Tensor, keys: NDArray[np.uint64]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rows, tokens, k), 1-D, of the tokens with ``v <= ceiling`` among counters with a ``weight >= floor``.

    ``weights`` [B, V] float32; ``floor`` and ``ceiling`` [B] float32; V is a multiple of the tokens per counter.
    """
    width = reference.TOKENS_PER_COUNTER
    any_of_four = (weights >= floor[:, None]).view(torch.int32)  # four bools in one word
    most = (ceiling.double() * 2.0**reference.K_BITS).clamp(max=2.0**reference.K_BITS).long()  # a larger k has v above
    rows, groups = any_of_four.nonzero().unbind(1)
    position, low, high = torch.from_numpy(keys.view(np.int64)).to(rows.device)[rows].unbind(1)
    k = philox(groups, position, low, high) >> (32 - reference.K_BITS)
    at, column = (k <= most[rows, None]).nonzero().unbind(1)
    return rows[at], groups[at] * width + column, k[at, column]


def _gumbel(k: Tensor) -> Tensor:
    return -torch.log(-torch.log1p(-(k.double() + 0.5) * 2.0**-reference.K_BITS))


def _keys(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint64]:
    return np.array([(p, *reference.split_seed(s)) for s, p in zip(seeds, positions, strict=True)], dtype=np.uint64)


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
