"""Keys and values of the rows of a decode: column t of a row is the token at position t of its own sequence.

Invariants: a row's columns say nothing about other rows, so rows come, go and move without any shift of columns, and
the cache is never wider than its longest row needs. All that a pass sees is finite from the start (a masked key weighs
zero, and zero times NaN is NaN). A pass writes where :meth:`RowCache.aim` said, in place, and sees views of the first
rows and columns. (The library's own cache copies everything at every step, which costs more than the model itself once
completions are a thousand tokens long.)

Not here: which key a query may see (the mask), and how many columns are worth having (:mod:`.decoding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class Aim:
    """Where the next pass writes, and what it sees."""

    columns: Tensor
    """int64 [rows, n] on the CPU: the column of each new token."""
    window: int
    """So many first columns are seen."""
    _known: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def lines(self, buffer: Tensor) -> Tensor:
        """Return the index of each new token's head in a buffer [rows, heads, columns, size] seen as [lines, size]."""
        heads, columns = buffer.shape[1:3]
        if (heads, columns) not in self._known:
            rows = len(self.columns)
            lines = torch.arange(rows * heads).reshape(rows, heads, 1) * columns + self.columns[:, None]
            self._known[heads, columns] = lines.reshape(-1).to(buffer.device)
        return self._known[heads, columns]


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer: two buffers [rows, heads, columns, head size]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = (0, 0)
        self.buffers: list[Tensor] = []
        self._aim = Aim(torch.empty(0, 0, dtype=torch.int64), 0)
        self._lines: Tensor | None = None
        self._seen: tuple[Tensor, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for heads like these."""
        rows, columns = self.size
        self.buffers = [x.new_zeros(rows, x.shape[1], columns, x.shape[3]) for x in (key_states, value_states)]
        self.is_initialized = True

    def resize(self, rows: int, columns: int) -> None:
        """Make the buffers so large; what fits stays."""
        self.size, self._seen = (rows, columns), ()
        for index, old in enumerate(self.buffers):
            new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
            new[: old.shape[0], :, : old.shape[2]] = old[:rows, :, :columns]
            self.buffers[index] = new

    def copy(self, other: RowLayer, *, rows: Tensor, into: Tensor, columns: int) -> None:
        """Row ``into[i]`` gets the first columns of row ``rows[i]`` of ``other``."""
        if not self.is_initialized:
            self.lazy_initialization(*other.buffers)
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine[into, :, :columns] = theirs[rows, :, :columns]

    def aim(self, aim: Aim) -> None:
        """See :meth:`RowCache.aim`."""
        self._aim = aim
        if self.is_initialized:
            self._lines = aim.lines(self.buffers[0])
            self._seen = tuple(buffer[: len(aim.columns), :, : aim.window] for buffer in self.buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write the new tokens of every row, and return views of all that is seen."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.aim(self._aim)
        assert self._lines is not None
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            flat, new = buffer.view(-1, buffer.shape[-1]), states.reshape(-1, states.shape[-1])
            if flat.device.type == "mps":  # which has no index_copy_ in every version
                flat[self._lines] = new
            else:
                flat.index_copy_(0, self._lines, new)
        keys, values = self._seen
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - the library's signature
        """Return (columns that are seen, offset), as the library asks."""
        return self._aim.window, 0

    def get_seq_length(self) -> int:
        """Return the columns that are seen."""
        return self._aim.window

    def get_max_length(self) -> int:
        """Return -1: no limit."""
        return -1


class RowCache(Cache):
    """One :class:`RowLayer` per layer of the model."""

    def __init__(self, *, layers: int, rows: int = 0, columns: int = 0) -> None:
        """The buffers come with the first keys and values; nothing is held before."""
        self.parts = [RowLayer() for _ in range(layers)]
        super().__init__(layers=list(self.parts))
        self.resize(rows=rows, columns=columns)

    @property
    def rows(self) -> int:
        """Rows that there is room for."""
        return self.parts[0].size[0]

    @property
    def columns(self) -> int:
        """Columns that there is room for."""
        return self.parts[0].size[1]

    @property
    def window(self) -> int:
        """Columns that the next pass sees."""
        return self.parts[0].get_seq_length()

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for part in self.parts for buffer in part.buffers)

    def resize(self, *, rows: int, columns: int) -> None:
        """Make room for so much, a layer at a time; what fits stays."""
        for part in self.parts:
            part.resize(rows, columns)

    def aim(self, columns: Tensor) -> None:
        """Before a pass over the first rows: write to ``columns`` (int64 [rows, n], CPU), see up to the last of them.

        No column of a row may come twice.
        """
        aim = Aim(columns, int(columns.max()) + 1)
        for part in self.parts:
            part.aim(aim)

    def copy(self, pairs: Sequence[tuple[int, int]], *, columns: int, source: RowCache | None = None) -> None:
        """For each (from, to): row ``to`` gets the first ``columns`` of row ``from`` of ``source``, or of this cache.

        No row may be both read and written.
        """
        rows, into = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
        for part, other in zip(self.parts, (source or self).parts, strict=True):
            part.copy(other, rows=rows, into=into, columns=columns)
