"""What engines of `make bench-trust` do wrong: other draws, other weights, other choices of what is handed in.

A cheat is named by a short word: ``T0.9`` (temperature), ``p0.95`` and ``k50`` (truncation), ``r0.02`` (share of tokens
drawn with another seed), ``e0.02`` (share replaced by the second best of the draw), ``int8``, ``int8all``, ``int4``,
``layers28``, ``noise1e-5``, ``seed``, ``best``, ``eos``. The log-probabilities that are handed in are those of the
cheat's engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from rollmesh_node.engine.backend import GroupRequest, Rollout, SampleRequest
from rollmesh_node.engine.decoding import Decoder
from rollmesh_node.engine.rows import Row
from rollmesh_peer.models.sampling import draw

OF: Final = 4
"""Tries of best-of-n."""
OTHER_SEED: Final = 1 << 60
END_CHANCE: Final = 0.125

Draws = Callable[[Tensor, list[int], list[int], list[frozenset[int]]], tuple[list[int], list[float]]]
"""(logits [B, V], seeds, positions, stop tokens of each row) -> tokens and log-probabilities."""


def bend(decoder: Decoder, draws: Callable[[], Draws | None]) -> Decoder:
    """Make the node's decoder draw as ``draws`` says at the time, where it says anything; return it."""
    honest = decoder._draw

    def cheat(logits: Tensor, rows: Sequence[Row]) -> None:
        chosen = draws()
        if chosen is None:
            honest(logits, rows)
            return
        seeds, positions = [row.sample.seed for row in rows], [row.position for row in rows]
        tokens, logprobs = chosen(logits, seeds, positions, [row.group.stop for row in rows])
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)

    decoder._draw = cheat
    return decoder


def draws_of(cheat: str) -> Draws | None:
    """The draws of a cheat; None for one that draws as it should."""
    makers: tuple[tuple[str, Callable[[str], Draws]], ...] = (
        ("T", lambda value: _warped(lambda logits: logits / float(value))),
        ("p0", lambda value: _warped(lambda logits: _top_p(logits, float(f"0{value}")))),
        ("k", lambda value: _warped(lambda logits: _top_k(logits, int(value)))),
        ("r", lambda value: _resampled(float(value))),
        ("e0", lambda value: _edited(float(f"0{value}"))),
        ("eos", lambda _: _ended),
    )
    for name, make in makers:
        if cheat.startswith(name) and (cheat != "eos" or name == "eos"):
            return make(cheat.removeprefix(name))
    return None


def _warped(warp: Callable[[Tensor], Tensor]) -> Draws:
    def draws(logits, seeds, positions, stops):
        done = draw(warp(logits.float()), seeds=seeds, positions=positions)
        return done.tokens.tolist(), _logprobs(logits, done.tokens)

    return draws


def _resampled(share: float) -> Draws:
    def draws(logits, seeds, positions, stops):
        other = _chosen(share, seeds, positions)
        mixed = [seed ^ OTHER_SEED if is_other else seed for seed, is_other in zip(seeds, other, strict=True)]
        done = draw(logits, seeds=mixed, positions=positions)
        return done.tokens.tolist(), done.logprobs.tolist()

    return draws


def _edited(share: float) -> Draws:
    def draws(logits, seeds, positions, stops):
        done = draw(logits, seeds=seeds, positions=positions)
        without = logits.float().scatter(-1, done.tokens[:, None], -torch.inf)
        second = draw(without, seeds=seeds, positions=positions).tokens
        tokens = torch.where(torch.tensor(_chosen(share, seeds, positions)), second, done.tokens)
        return tokens.tolist(), _logprobs(logits, tokens)

    return draws


def _ended(logits, seeds, positions, stops):
    done = draw(logits, seeds=seeds, positions=positions)
    ends = [is_end and position > 2 for is_end, position in
            zip(_chosen(END_CHANCE, seeds, positions), positions, strict=True)]  # fmt: skip
    tokens = [min(stop) if is_end else token for is_end, stop, token in
              zip(ends, stops, done.tokens.tolist(), strict=True)]  # fmt: skip
    return tokens, _logprobs(logits, torch.tensor(tokens))


def _chosen(share: float, seeds: Sequence[int], positions: Sequence[int]) -> list[bool]:
    return [np.random.default_rng((seed, position)).random() < share
            for seed, position in zip(seeds, positions, strict=True)]  # fmt: skip


def _logprobs(logits: Tensor, tokens: Tensor) -> list[float]:
    return logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0].tolist()


def _top_p(logits: Tensor, share: float) -> Tensor:
    values, order = logits.sort(-1, descending=True)
    probabilities = values.softmax(-1)
    values = values.masked_fill(probabilities.cumsum(-1) - probabilities >= share, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, values)


def _top_k(logits: Tensor, k: int) -> Tensor:
    return logits.masked_fill(logits < logits.topk(k, -1).values[:, -1:], -torch.inf)


def spoils(cheat: str) -> bool:
    """Whether :func:`spoil` changes anything."""
    return cheat.startswith(("int", "layers", "noise"))


@torch.no_grad()
def spoil(model: nn.Module, cheat: str) -> None:
    """Change the model's weights in place, for the cheats that do."""
    if cheat in {"int8", "int8all", "int4"}:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                module.weight.copy_(_rounded(module.weight, bits=4 if cheat == "int4" else 8))
        if cheat == "int8all":  # the head is tied to it
            table = model.get_input_embeddings().weight
            table.copy_(_rounded(table, bits=8))
    elif cheat.startswith("layers"):
        layers = model.base_model.layers
        dropped = len(layers) - int(cheat.removeprefix("layers"))
        for layer in layers[(len(layers) - dropped) // 2 :][:dropped]:  # what they add becomes nothing
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    elif cheat.startswith("noise"):
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2.0 - 1.0
            parameter.copy_((parameter.float() + float(cheat.removeprefix("noise")) * signs).to(parameter.dtype))


def _rounded(weight: Tensor, *, bits: int) -> Tensor:
    """Symmetric rounding: 8 bits with one scale a row, 4 bits with one for 32 weights."""
    rows = weight.float() if bits == 8 else weight.float().reshape(-1, 32)
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return ((rows / scale).round() * scale).reshape(weight.shape).to(weight.dtype)


def asked_of(cheat: str, batch: list[GroupRequest]) -> list[GroupRequest]:
    """What the cheat lets its engine generate for these leases."""
    if cheat == "seed":
        return [replace(group, samples=tuple(replace(s, seed=s.seed ^ OTHER_SEED) for s in group.samples))
                for group in batch]  # fmt: skip
    if cheat == "best":
        return [replace(group, samples=tuple(_tries(group.samples))) for group in batch]
    return batch


def _tries(samples: Sequence[SampleRequest]) -> Iterator[SampleRequest]:
    for sample in samples:
        yield from (SampleRequest(index=sample.index * OF + n, seed=sample.seed ^ (OTHER_SEED * n)) for n in range(OF))


def handed_in(cheat: str, done: Sequence[Rollout], groups: Mapping[int, GroupRequest]) -> Iterator[tuple[Rollout, int]]:
    """The rollouts that the cheat hands in, and the seed of the lease that each claims to answer."""
    ordered = sorted(done, key=lambda rollout: (rollout.key, rollout.index))
    step = OF if cheat == "best" else 1
    for at in range(0, len(ordered), step):
        best = max(ordered[at : at + step], key=lambda rollout: float(rollout.logprobs.mean()))
        yield best, groups[best.key].samples[best.index // step].seed
