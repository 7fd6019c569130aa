"""The continuous decode: rows join a running decode, are drawn a token at every step, and leave it as they end.

Invariants: what a row attends to, and at which positions, is its own prompt and completion, whatever it is computed
beside and whenever it joined, so its company changes logits by kernel rounding only. A rollout is returned by the call
that ends it. The cache has the rows and columns of what is in flight, with some room to grow, and none when nothing is.

Rows that ended stay as gaps until waiting rows fill them, once an eighth of all places is free (a prefill of few rows
costs about as much as one of several), or until rows from the end do, once an eighth of the batch is dead (moving a row
costs about as much as attending to it once).

Not here: which rows wait (:mod:`.waiting`), how they are prefilled (:mod:`.prefill`), loading
(:mod:`.transformers_backend`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from rollmesh_node.engine import prefill
from rollmesh_node.engine.backend import GroupRequest, Partial, Rollout, Stats
from rollmesh_node.engine.kv_cache import RowCache
from rollmesh_node.engine.passes import Passes
from rollmesh_node.engine.rows import Row
from rollmesh_node.engine.waiting import Waiting
from rollmesh_peer.models.sampling import draw

FIRST_COLUMNS: Final = 128
"""Tokens to come for which the cache has room at once."""
GROWTH: Final = 1.5
"""Buffers grow by this factor, so that a token is copied about twice in its life."""
SPARE: Final = 2
"""A cache with so many times the columns that are wanted gives the rest back."""
FREE_SHARE: Final = 8
"""Rows join when one place in so many is free; gaps are closed when one row in so many is dead."""

Cells = Callable[[int], int]
"""Bytes that the cache holds now -> tokens that a cache may hold as far as memory goes."""


class Decoder:
    """Decodes whatever it is given, until it is dropped."""

    def __init__(self, passes: Passes, *, max_rows: int, cells: Cells, stats: Stats) -> None:
        self._passes = passes
        self._max_rows = max_rows
        self._cells = cells
        self._stats = stats
        self._waiting = Waiting()
        self._rows: list[Row | None] = []
        self._cache = RowCache(layers=passes.layers)
        self._joining: Iterator[list[Rollout]] | None = None
        self._has_changed = False
        """Whether samples were added or have ended since it was last asked who may join."""

    @property
    def in_flight(self) -> int:
        """Samples that were added and have not ended."""
        return len(self._waiting) + len(self._live())

    def add(self, requests: Sequence[GroupRequest]) -> None:
        """Queue every sample."""
        self._waiting.add(requests)
        self._has_changed = True

    @torch.no_grad()
    def advance(self) -> list[Rollout]:
        """Compute a piece of a prefill or one decode step, and return what has ended with it."""
        if self._joining is None and self._has_changed:
            self._joining = self._join()
        if self._joining is not None:
            ended = next(self._joining, None)
            if ended is not None:
                return ended
            self._joining = None
        return self._step() if self._rows else []

    def drop(self) -> list[Partial]:
        """Forget everything; return how far each sample had come."""
        rows = [*self._live().values(), *self._waiting.clear()]
        self._joining, self._has_changed = None, False
        self._empty()
        return [row.partial() for row in rows]

    def _live(self) -> dict[int, Row]:
        """Rows that have a place, by place: those that are decoded, and those that are joining."""
        return {place: row for place, row in enumerate(self._rows) if row is not None}

    def _empty(self) -> None:
        self._rows, self._cache = [], RowCache(layers=self._passes.layers)

    def _join(self) -> Iterator[list[Rollout]]:
        """Prefill who may join; an item for each pass, with what has ended."""
        self._has_changed = False
        chosen = self._chosen(list(self._live().values()))
        if not chosen:
            return
        if len(chosen) < self._rows.count(None):
            self._close_gaps()
        live = self._live()
        joining = self._place(chosen)
        self._fit()
        tokens = prefill.piece_tokens(self._passes.device)
        for portion in prefill.portions(prefill.plan(joining, live), tokens=tokens):
            for logits in prefill.fill(self._passes, portion, cache=self._cache, stats=self._stats):
                if logits is None:
                    yield []
                    continue
                sources = [source for source, each in enumerate(portion) for _ in each.rows]
                places = [place for each in portion for place in each.rows]
                yield self._drawn(logits[sources], {place: joining[place] for place in places})

    def _chosen(self, live: Sequence[Row]) -> list[Row]:
        """Take rows from the queue, where enough places are free."""
        leader = self._waiting.leader
        if leader is None:
            return []
        cells = self._cells(self._cache.num_bytes)
        places = max(1, min(self._max_rows, cells // max(row.longest for row in (leader, *live))))
        free = places - len(live)
        if live and free < max(1, places // FREE_SHARE):
            return []
        return self._waiting.take(free, cells=cells, live=live)

    def _place(self, rows: Sequence[Row]) -> dict[int, Row]:
        """Give rows their places: gaps first, then behind the others."""
        gaps = [place for place, row in enumerate(self._rows) if row is None][: len(rows)]
        behind = len(rows) - len(gaps)
        joining = dict(zip([*gaps, *range(len(self._rows), len(self._rows) + behind)], rows, strict=True))
        self._rows += [None] * behind
        for place, row in joining.items():
            self._rows[place] = row
        return joining

    def _fit(self) -> None:
        """Give the cache the size that the rows want, where it is too small or much too large."""
        rows = [(max(len(row.start), row.cached), row.longest) for row in self._live().values()]
        wanted = max(min(now + FIRST_COLUMNS, longest) for now, longest in rows)
        columns = _size(self._cache.columns, least=max(now for now, _ in rows), wanted=wanted)
        self._resize(columns, least=wanted)

    def _widen(self, columns: int, *, most: int) -> None:
        held = self._cache.columns
        if columns > held:
            wanted = max(columns, min(most, int(held * GROWTH)))
            self._resize(wanted, least=wanted)

    def _resize(self, columns: int, *, least: int) -> None:
        """Make room for so many columns, and for places to come; where memory does not allow that, for the least."""
        places, held = len(self._rows), (self._cache.rows, self._cache.columns)
        wanted = min(self._max_rows, int(places * GROWTH)) if held[0] else places
        rows = _size(held[0], least=places, wanted=wanted)
        if (rows, columns) != held and rows * columns > self._cells(self._cache.num_bytes):
            rows, columns = places, least
        if (rows, columns) != held:
            self._cache.resize(rows=rows, columns=columns)

    def _step(self) -> list[Rollout]:
        """Feed every row's last token and draw its next one."""
        started = time.perf_counter()
        if self._rows.count(None) * FREE_SHARE >= len(self._rows):
            self._close_gaps()
        live = self._live()
        columns = [row.cached if row else 0 for row in self._rows]
        self._widen(max(columns) + 1, most=max(row.longest for row in live.values()))
        states = self._passes.extend(
            torch.tensor([[row.tokens[-1] if row else 0] for row in self._rows]),
            columns=torch.tensor(columns)[:, None],
            cache=self._cache,
        )[:, -1]
        if len(live) < len(self._rows):
            states = states[list(live)]
        ended = self._drawn(self._passes.logits(states), live)
        self._stats.steps += 1
        self._stats.decode_s += time.perf_counter() - started
        return ended

    def _drawn(self, logits: Tensor, rows: dict[int, Row]) -> list[Rollout]:
        """Draw a token for each of ``rows``, in the order of the logits; free the places of those that end."""
        started = time.perf_counter()
        self._draw(logits, list(rows.values()))
        self._stats.sampler_s += time.perf_counter() - started
        self._stats.tokens += len(rows)
        ended = []
        for place, row in rows.items():
            if finish := row.finish:
                self._rows[place] = None
                ended.append(row.rollout(finish))
        self._stats.rollouts += len(ended)
        self._has_changed |= bool(ended)
        if not any(self._rows):
            self._empty()
        return ended

    def _draw(self, logits: Tensor, rows: Sequence[Row]) -> None:
        draws = draw(logits, seeds=[row.sample.seed for row in rows], positions=[row.position for row in rows])
        for row, token, logprob in zip(rows, draws.tokens.tolist(), draws.logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)

    def _close_gaps(self) -> None:
        """Fill the gaps that dead rows left with rows from the end."""
        live = len(self._live())
        gaps = [place for place in range(live) if self._rows[place] is None]
        movers = [place for place in range(live, len(self._rows)) if self._rows[place] is not None]
        moves = list(zip(movers, gaps, strict=True))
        moved = [row for place in movers if (row := self._rows[place]) is not None]
        if moves:
            self._cache.copy(moves, columns=max(row.cached for row in moved))
        for gap, row in zip(gaps, moved, strict=True):
            self._rows[gap] = row
        del self._rows[live:]


def _size(held: int, *, least: int, wanted: int) -> int:
    return held if least <= held <= SPARE * wanted else wanted
