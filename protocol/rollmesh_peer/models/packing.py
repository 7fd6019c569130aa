"""How given completions are laid out for one forward pass: samples of one prompt share its tokens.

A row is ``prompt, completion 1, completion 2, ...`` (each completion without its last token, which predicts nothing).
Invariant: a token attends to its prompt and to its own completion alone, at the positions it had when it was sampled,
so packed and unpacked rows give the same numbers up to the rounding of the kernels. With 8 samples of 12 tokens on a
prompt of 44, a row holds 132 tokens instead of 440.

Padding is on the right, where causal attention never looks; rows without siblings need no mask at all.

Not here: the model, and anything about probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer]
"""1-D token ids of any integer type."""

ROW_TOKENS: Final = 1024
"""A shared row grows no longer than this: its attention is computed for all pairs, siblings included."""
BATCH_TOKENS: Final = 8192
"""Tokens, padding included, of one forward pass: bounds the memory of activations and masks."""
_WORTH: Final = 8
"""Sharing must save at least one token in so many, or the plain causal kernel is quicker."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One forward pass over B padded rows of T tokens."""

    ids: NDArray[np.int64]
    """[B, T], 0 where padded."""
    positions: NDArray[np.int64]
    """[B, T]: the position of each token in its own sequence."""
    visible: NDArray[np.bool_] | None
    """[B, 1, T, T]: whether query (third axis) sees key (last); None for plain causal attention."""
    where: NDArray[np.int64]
    """[n]: index into the flattened [B * T] states of the state that predicts each completion token."""
    order: NDArray[np.int64]
    """[n]: index of each of those tokens in the concatenation of all completions, as they were given."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    prompt: Ids
    members: tuple[int, ...]
    """Indices of the samples that continue the prompt, in the order of the row."""
    tokens: int


def batches(prompts: Sequence[Ids], completions: Sequence[Ids], *, batch_tokens: int = BATCH_TOKENS) -> Iterator[Batch]:
    """Yield forward passes that together predict every completion token once, similar lengths together.

    Raises ValueError when a prompt or a completion is empty, or their numbers differ.
    """
    if len(prompts) != len(completions) or not all(map(len, prompts)) or not all(map(len, completions)):
        raise ValueError("each prompt needs one completion, and none may be empty")
    starts = np.concatenate([[0], np.cumsum([len(c) for c in completions])])
    rows = sorted(_rows(prompts, completions), key=lambda row: row.tokens)
    first = 0
    while first < len(rows):
        last = first + 1
        while last < len(rows) and rows[last].tokens * (last + 1 - first) <= batch_tokens:
            last += 1
        yield _batch(rows[first:last], completions, starts)
        first = last


def _rows(prompts: Sequence[Ids], completions: Sequence[Ids]) -> Iterator[_Row]:
    groups: dict[bytes, list[int]] = {}
    for sample, prompt in enumerate(prompts):
        groups.setdefault(np.asarray(prompt, dtype=np.int64).tobytes(), []).append(sample)
    for samples in groups.values():
        prompt = prompts[samples[0]]
        extra = {sample: len(completions[sample]) - 1 for sample in samples}
        row: list[int] = []
        tokens = len(prompt)
        for sample in sorted(samples, key=extra.__getitem__):
            longer = tokens + extra[sample]
            worth = len(prompt) * len(row) * _WORTH >= len(prompt) * (len(row) + 1) + longer - len(prompt)
            if row and (longer > ROW_TOKENS or not worth):
                yield _Row(prompt=prompt, members=tuple(row), tokens=tokens)
                row, longer = [], len(prompt) + extra[sample]
            row.append(sample)
            tokens = longer
        yield _Row(prompt=prompt, members=tuple(row), tokens=tokens)


def _batch(rows: Sequence[_Row], completions: Sequence[Ids], starts: NDArray[np.int64]) -> Batch:
    width = max(row.tokens for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.broadcast_to(np.arange(width), ids.shape).copy()
    part = np.zeros_like(ids)  # 0: the prompt, then 1 for the first completion, ...; padding counts as the last part
    where, order = [], []
    for index, row in enumerate(rows):
        at = len(row.prompt)
        ids[index, :at] = row.prompt
        for number, sample in enumerate(row.members, start=1):
            completion = completions[sample]
            end = at + len(completion) - 1
            ids[index, at:end] = completion[:-1]
            positions[index, at:end] = np.arange(len(row.prompt), len(row.prompt) + len(completion) - 1)
            part[index, at:] = number
            where.append(index * width + np.concatenate([[len(row.prompt) - 1], np.arange(at, end)]))
            order.append(starts[sample] + np.arange(len(completion)))
            at = end
    visible = None
    if any(len(row.members) > 1 for row in rows):
        own = (part[:, None, :] == part[:, :, None]) | (part[:, None, :] == 0)
        visible = (own & np.tri(width, dtype=np.bool_))[:, None]
    return Batch(
        ids=ids, positions=positions, visible=visible, where=np.concatenate(where), order=np.concatenate(order)
    )
