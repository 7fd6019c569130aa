"""One batch from prompts to finished rollouts: a shared prefill, then one seeded draw per row and step.

Invariants: what a row attends to, and at which positions, is its own prompt and completion, whatever it is batched
with, so the batch changes logits by kernel rounding only. A rollout is yielded at the step that ends it. Rows that
ended leave the batch once an eighth of it is dead (moving a row costs about as much as attending to it once).

The prefill computes a prompt once per group and what all prompts of the batch begin with (a system prompt, a template)
once per batch; the rest is padded on the left, so that every row's next token is in the last column.

Not here: which groups make a batch, and loading (:mod:`.transformers_backend`).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh_node.engine.backend import Finish, GroupRequest, Partial, Rollout, SampleRequest, Stats
from rollmesh_node.engine.kv_cache import GrowingCache
from rollmesh_peer.models.logprobs import additive_mask, output_head
from rollmesh_peer.models.sampling import draw

MIN_SHARED_PREFIX: Final = 16
"""Tokens; below that, one more forward pass costs more than it saves."""
MASK_ELEMENTS: Final = 1 << 26
"""Of one prefill mask (128 MiB in bf16): longer prompts are prefilled in pieces."""
FIRST_COLUMNS: Final = 128
"""Completion tokens for which the cache has room at once."""
DEAD_SHARE: Final = 8
"""Rows are dropped when one in so many is dead."""


@dataclass(kw_only=True)
class _Row:
    """One sample on its way."""

    group: GroupRequest
    sample: SampleRequest
    source: int
    """Index of its prompt in the prefill."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the next token in the completion."""
        return len(self.sample.begun) + len(self.tokens)

    def finish(self) -> Finish | None:
        if self.tokens[-1] in self.group.stop:
            return "stop"
        return "length" if len(self.tokens) >= self.group.max_new_tokens else None


class Decoder:
    """Decodes one batch of groups. Make a new one for every batch; it is spent when :meth:`run` ends."""

    def __init__(self, model: PreTrainedModel, groups: Sequence[GroupRequest], *, stats: Stats) -> None:
        self._model = model
        self._head = output_head(model)
        self._groups = groups
        self._stats = stats
        self._cache = GrowingCache(layers=model.config.num_hidden_layers)
        self._cache_name = cache_argument(model)
        self._rows: list[_Row | None] = [
            _Row(group=group, sample=sample, source=source)
            for source, group in enumerate(groups)
            for sample in group.samples
        ]

    @torch.no_grad()
    def run(self) -> Iterator[Rollout]:
        """Yield every sample's rollout at the step that ends it."""
        started = time.perf_counter()
        logits, padding = self._prefill()
        sources = [row.source for row in self._live()]
        longest = max(len(group.prompt) for group in self._groups)
        self._cache.reserve(longest + min(FIRST_COLUMNS, max(group.max_new_tokens for group in self._groups)))
        self._cache.take(sources)
        padding = padding[sources]
        logits = logits[sources]
        self._stats.prefill_s += time.perf_counter() - started
        while True:
            started = time.perf_counter()
            self._draw(logits)
            self._stats.sampler_s += time.perf_counter() - started
            yield from self._finished()
            padding = self._drop_dead(padding)
            if not self._rows:
                return
            before = time.perf_counter()
            logits = self._step(padding)
            self._stats.steps += 1
            self._stats.decode_s += time.perf_counter() - before

    def partials(self) -> list[Partial]:
        """How far the rows have come that were not yielded; of one that has ended, the last token is left out."""
        partials = []
        for row in self._live():
            drawn = len(row.tokens) - (bool(row.tokens) and row.finish() is not None)
            partials.append(
                Partial(
                    key=row.group.key,
                    index=row.sample.index,
                    tokens=np.array(row.tokens[:drawn], dtype=np.uint32),
                    logprobs=np.array(row.logprobs[:drawn], dtype=np.float32),
                )
            )
        return partials

    def _live(self) -> list[_Row]:
        return [row for row in self._rows if row is not None]

    def _prefill(self) -> tuple[Tensor, Tensor]:
        """Return the logits after each prompt [U, V] and the invisible columns at the left of each cache row [U]...

        ... as an additive mask [U, 1, 1, columns], 0 or -inf.
        """
        prompts = [group.prompt.astype(np.int64) for group in self._groups]
        shared = _common_prefix(prompts)
        if len(prompts) == 1 or shared < MIN_SHARED_PREFIX:
            shared = 0
        if shared:
            self._feed(prompts[0][None, :shared], padding=np.zeros(1, dtype=np.int64), shared=0)
            self._cache.take([0] * len(prompts))
        width = max(map(len, prompts)) - shared
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        padding = np.array([width + shared - len(prompt) for prompt in prompts])
        for row, prompt in enumerate(prompts):
            ids[row, padding[row] :] = prompt[shared:]
        states = self._feed(ids, padding=padding, shared=shared)
        columns = np.arange(shared + width)
        hidden = (columns >= shared) & (columns < shared + padding[:, None])
        mask = additive_mask(self._on(~hidden), dtype=self._model.dtype)[:, None, None]
        self._stats.prompt_tokens += shared + sum(len(prompt) - shared for prompt in prompts)
        return self._head(states[:, -1]), mask

    def _feed(self, ids: np.ndarray, *, padding: np.ndarray, shared: int) -> Tensor:
        """Prefill ids [U, R] behind ``shared`` cached columns; return the states of the last piece [U, <= R, H]."""
        rows, width = ids.shape
        piece = max(1, MASK_ELEMENTS // (rows * (shared + width)))
        states = torch.empty(0)
        for start in range(0, width, piece):
            queries = np.arange(start, min(start + piece, width))
            keys = np.arange(shared + queries[-1] + 1)
            own = keys[None, None, :] - shared  # column within the rest; negative in the shared beginning
            real = (own < 0) | (own >= padding[:, None, None])
            # A padded query sees itself: a row of -inf alone would be NaN, and NaN values leak through a zero weight.
            visible = (own <= queries[None, :, None]) & (real | (own == queries[None, :, None]))
            positions = np.maximum(shared + queries[None, :] - padding[:, None], 0)
            states = self._forward(
                self._on(ids[:, queries]),
                positions=self._on(positions),
                mask=additive_mask(self._on(visible[:, None]), dtype=self._model.dtype),
            )
        return states

    def _step(self, padding: Tensor) -> Tensor:
        """Feed every row's last token; return the logits of the live rows [live, V]."""
        tokens = [[row.tokens[-1] if row else 0] for row in self._rows]
        positions = [[len(row.group.prompt) + len(row.tokens) - 1 if row else 0] for row in self._rows]
        mask = torch.nn.functional.pad(padding, (0, self._cache.get_seq_length() + 1 - padding.shape[-1]))
        states = self._forward(self._on(np.array(tokens)), positions=self._on(np.array(positions)), mask=mask)[:, -1]
        if None in self._rows:
            states = states[[index for index, row in enumerate(self._rows) if row is not None]]
        logits: Tensor = self._head(states)
        return logits

    def _draw(self, logits: Tensor) -> None:
        rows = self._live()
        draws = draw(logits, seeds=[row.sample.seed for row in rows], positions=[row.position for row in rows])
        for row, token, logprob in zip(rows, draws.tokens.tolist(), draws.logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)

    def _finished(self) -> Iterator[Rollout]:
        for index, row in enumerate(self._rows):
            finish = row.finish() if row is not None else None
            if row is None or finish is None:
                continue
            self._rows[index] = None
            self._stats.rollouts += 1
            self._stats.tokens += len(row.tokens)
            yield Rollout(
                key=row.group.key,
                index=row.sample.index,
                tokens=np.array(row.tokens, dtype=np.uint32),
                logprobs=np.array(row.logprobs, dtype=np.float32),
                finish=finish,
            )

    def _drop_dead(self, padding: Tensor) -> Tensor:
        """Close the gaps that dead rows left with rows from the end, when enough are dead."""
        live = len(self._live())
        dead = len(self._rows) - live
        if not live:
            self._rows = []
        if not live or dead * DEAD_SHARE < len(self._rows):
            return padding
        gaps = [index for index in range(live) if self._rows[index] is None]
        movers = [index for index in range(live, len(self._rows)) if self._rows[index] is not None]
        moves = list(zip(movers, gaps, strict=True))
        self._cache.drop(moves, rows=live)
        for source, target in moves:
            self._rows[target] = self._rows[source]
            padding[target] = padding[source]
        del self._rows[live:]
        return padding[:live]

    def _forward(self, ids: Tensor, *, positions: Tensor, mask: Tensor) -> Tensor:
        states: Tensor = self._model.base_model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_name: self._cache},
        ).last_hidden_state
        return states

    def _on(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)


def cache_argument(model: PreTrainedModel) -> str:
    """Return what this version of the library calls the cache: ``cache``, or ``past_key_values`` before 5.20."""
    return "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"


def _common_prefix(prompts: Sequence[np.ndarray]) -> int:
    """Return how many first tokens all prompts share, leaving each at least one of its own."""
    shortest = min(map(len, prompts)) - 1
    table = np.stack([prompt[:shortest] for prompt in prompts])
    differs = (table != table[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else shortest
