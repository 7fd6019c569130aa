"""The key/value cache of one decode batch: written in place, rows dropped by moving only the rows that fill the gaps.

Invariant: live rows are ``0 .. rows-1`` and live columns ``0 .. length-1`` of every layer's buffers; the model sees
views of them. (The library's own cache copies everything at every step, which costs more than the model itself once
completions are a thousand tokens long.)

Not here: which key a query may see (the mask of :mod:`.decoding`).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH: Final = 1.5
"""Buffers grow by this factor, so that a token is copied about twice in its life."""


class GrowingLayer(CacheLayerMixin):
    """Keys and values of one layer: [rows, heads, columns, head size]."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.rows = 0
        self._reserve = 0

    def reserve(self, columns: int) -> None:
        """Make the first buffer at least so long."""
        self._reserve = columns

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers for the rows of the first keys and values."""
        rows, heads, columns, _ = key_states.shape
        size = max(columns, self._reserve)
        self.keys = key_states.new_empty(rows, heads, size, key_states.shape[-1])
        self.values = value_states.new_empty(rows, heads, size, value_states.shape[-1])
        self.rows = rows
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns to every live row and return views of all live keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        self._grow(self.length)
        self.keys[: self.rows, :, start : self.length] = key_states
        self.values[: self.rows, :, start : self.length] = value_states
        return self.keys[: self.rows, :, : self.length], self.values[: self.rows, :, : self.length]

    def take(self, rows: Tensor) -> None:
        """Make new buffers whose row i is the old row ``rows[i]``; rows may repeat."""
        self.keys, self.values = self._taken(self.keys, rows), self._taken(self.values, rows)
        self.rows = len(rows)

    def drop(self, moves: Tensor, *, rows: int) -> None:
        """Copy row ``moves[0, i]`` over row ``moves[1, i]``, then keep the first ``rows`` rows."""
        for buffer in (self.keys, self.values):
            buffer[moves[1], :, : self.length] = buffer[moves[0], :, : self.length]
        self.rows = rows

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (key length after this query, offset), as the library asks."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the live columns."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: no limit."""
        return -1

    def _grow(self, columns: int) -> None:
        if columns > self.keys.shape[2]:
            size = max(columns, int(self.keys.shape[2] * GROWTH))
            self.keys, self.values = self._resized(self.keys, size), self._resized(self.values, size)

    def _resized(self, buffer: Tensor, columns: int) -> Tensor:
        wider = buffer.new_empty(self.rows, buffer.shape[1], columns, buffer.shape[3])
        wider[:, :, : buffer.shape[2]] = buffer[: self.rows]
        return wider

    def _taken(self, buffer: Tensor, rows: Tensor) -> Tensor:
        wider = buffer.new_empty(len(rows), buffer.shape[1], max(buffer.shape[2], self._reserve), buffer.shape[3])
        wider[:, :, : self.length] = buffer[rows, :, : self.length]
        return wider


class GrowingCache(Cache):
    """One :class:`GrowingLayer` per layer of the model."""

    def __init__(self, *, layers: int) -> None:
        self.growing = [GrowingLayer() for _ in range(layers)]
        super().__init__(layers=list(self.growing))

    def reserve(self, columns: int) -> None:
        """Ask for room for so many columns at the next allocation."""
        for layer in self.growing:
            layer.reserve(columns)

    def take(self, rows: list[int]) -> None:
        """Rearrange: row i becomes the old row ``rows[i]`` (repeats share a prefill among samples)."""
        for layer in self.growing:
            layer.take(torch.tensor(rows, device=layer.keys.device))

    def drop(self, moves: list[tuple[int, int]], *, rows: int) -> None:
        """Move rows (from, to) into gaps, then keep the first ``rows`` rows."""
        for layer in self.growing:
            layer.drop(torch.tensor(moves, device=layer.keys.device).reshape(-1, 2).T, rows=rows)
