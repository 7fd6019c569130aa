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
    """Keys and values of one layer: two buffers [rows, heads, columns, head size]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0
        self.rows = 0
        self._reserved = 0
        self._buffers: tuple[Tensor, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the buffers are, once there are any."""
        return self._buffers[0].device

    def reserve(self, columns: int) -> None:
        """Make the next buffers at least so long."""
        self._reserved = columns

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers for the rows of the first keys and values."""
        self.rows = key_states.shape[0]
        self._buffers = tuple(_empty_like(states, columns=self._reserved) for states in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append columns to every live row and return views of all live keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        self._grow(self.length)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[: self.rows, :, start : self.length] = states
        keys, values = (buffer[: self.rows, :, : self.length] for buffer in self._buffers)
        return keys, values

    def take(self, rows: Tensor) -> None:
        """Make new buffers whose row i is the old row ``rows[i]``; rows may repeat."""
        taken = [buffer[rows, :, : self.length] for buffer in self._buffers]
        self.rows = len(rows)
        self._buffers = tuple(self._widened(part, columns=self._reserved) for part in taken)

    def drop(self, moves: Tensor, *, rows: int) -> None:
        """Copy row ``moves[0, i]`` over row ``moves[1, i]``, then keep the first ``rows`` rows."""
        for buffer in self._buffers:
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
        held = self._buffers[0].shape[2]
        if columns > held:
            size = max(columns, int(held * GROWTH))
            self._buffers = tuple(self._widened(buffer[: self.rows], columns=size) for buffer in self._buffers)

    @staticmethod
    def _widened(buffer: Tensor, *, columns: int) -> Tensor:
        if buffer.shape[2] >= columns:
            return buffer
        wider = _empty_like(buffer, columns=columns)
        wider[:, :, : buffer.shape[2]] = buffer
        return wider


def _empty_like(states: Tensor, *, columns: int) -> Tensor:
    rows, heads, length, size = states.shape
    return states.new_empty(rows, heads, max(length, columns), size)


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
            layer.take(torch.tensor(rows, device=layer.device))

    def drop(self, moves: list[tuple[int, int]], *, rows: int) -> None:
        """Move rows (from, to) into gaps, then keep the first ``rows`` rows."""
        for layer in self.growing:
            layer.drop(torch.tensor(moves, dtype=torch.int64, device=layer.device).reshape(-1, 2).T, rows=rows)
