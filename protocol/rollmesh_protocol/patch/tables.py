"""The probabilities of a patch: for each class of each dtype how its gaps and its steps are distributed.

The encoder counts every symbol of the whole patch first, then merges neighbouring classes whose distributions are
alike until more merging would cost more than the tables it saves; what is left is sent once, in the head of the patch.
A table is 256 frequencies that add up to 4096.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from rollmesh_protocol.errors import Refused
from rollmesh_protocol.patch.kernels import CLASSES, RAW_BITS, STEP_MODE, SYMBOLS, TOTAL, VALUE_MODE

_TABLE_BITS_PER_SYMBOL: Final = 10.0
"""About what one frequency costs in the compressed head."""
_MOST_ROWS: Final = 120
"""Of gaps, of steps and of values; a row's number must fit a byte."""

Counts = NDArray[np.int64]
Frequencies = NDArray[np.uint32]


@dataclass(frozen=True)
class Histograms:
    """Symbols of one dtype by class: int64 [CLASSES, SYMBOLS] each; ``values`` is the alternative to ``steps``."""

    gaps: Counts
    steps: Counts
    values: Counts

    @classmethod
    def empty(cls) -> Self:
        """Nothing counted yet."""
        return cls(*(np.zeros((CLASSES, SYMBOLS), dtype=np.int64) for _ in range(3)))

    def add(self, other: Histograms) -> None:
        """Count what ``other`` counted as well."""
        self.gaps.__iadd__(other.gaps)
        self.steps.__iadd__(other.steps)
        self.values.__iadd__(other.values)


@dataclass(frozen=True)
class Tables:
    """How one dtype of a patch is coded. A class has a gap table and a change table, or neither: it never changes."""

    modes: NDArray[np.uint8]
    """STEP_MODE or VALUE_MODE by class."""
    gap_tables: NDArray[np.int32]
    """The row of ``frequencies`` for a class's gaps; -1 where it never changes."""
    step_tables: NDArray[np.int32]
    """The row of ``frequencies`` for its steps or values; -1 likewise."""
    frequencies: Frequencies
    """[tables, SYMBOLS]; each row adds up to TOTAL."""

    @classmethod
    def fit(cls, counted: Histograms, *, width: int) -> Self:
        """The tables for what was counted."""
        changing = np.flatnonzero(counted.steps.any(axis=1))
        modes = np.zeros(CLASSES, dtype=np.uint8)
        for kind in changing:
            number_bits = float(RAW_BITS @ counted.steps[kind]) + _cost(counted.steps[kind])
            value_bits = float(width - 8) * int(counted.values[kind].sum()) + _cost(counted.values[kind])
            modes[kind] = VALUE_MODE if value_bits < number_bits else STEP_MODE
        changes = np.where(modes[:, None] == VALUE_MODE, counted.values, counted.steps)
        rows: list[Counts] = []
        gap_tables, step_tables = (np.full(CLASSES, -1, dtype=np.int32) for _ in range(2))
        _merge(counted.gaps, [int(kind) for kind in changing], gap_tables, rows)
        for mode in (STEP_MODE, VALUE_MODE):
            _merge(changes, [int(kind) for kind in changing if modes[kind] == mode], step_tables, rows)
        frequencies = np.array([_normalise(row) for row in rows], dtype=np.uint32).reshape(-1, SYMBOLS)
        return cls(modes, gap_tables, step_tables, frequencies)

    @property
    def cumulated(self) -> Frequencies:
        """The frequencies of all smaller symbols, [tables, SYMBOLS]."""
        return (np.cumsum(self.frequencies, axis=1) - self.frequencies).astype(np.uint32)

    def lookup(self) -> NDArray[np.uint32]:
        """What the decoder reads: for each slot the symbol, its frequency less one, and the place within the symbol."""
        symbols = np.arange(SYMBOLS, dtype=np.uint32)
        table = np.empty((len(self.frequencies), TOTAL), dtype=np.uint32)
        for row, (frequency, low) in enumerate(zip(self.frequencies, self.cumulated, strict=True)):
            place = np.arange(TOTAL, dtype=np.uint32) - np.repeat(low, frequency)
            table[row] = np.repeat(symbols | ((frequency - 1) << 8), frequency) | (place << 20)
        return table

    def pack(self) -> bytes:
        """For the head of a patch: modes, table numbers plus one (255 at most of each), and the rows in two planes."""
        gap_rows = int(self.gap_tables.max(initial=-1)) + 1
        step_rows = len(self.frequencies) - gap_rows
        step_tables = np.where(self.step_tables < 0, 0, self.step_tables - gap_rows + 1)
        planes = self.frequencies.astype("<u2").view(np.uint8).reshape(-1, 2)
        return b"".join(
            [
                bytes([gap_rows, step_rows]),
                self.modes.tobytes(),
                (self.gap_tables + 1).astype(np.uint8).tobytes(),
                step_tables.astype(np.uint8).tobytes(),
                planes[:, 0].tobytes(),
                planes[:, 1].tobytes(),
            ]
        )

    @classmethod
    def unpack(cls, data: memoryview) -> tuple[Self, memoryview]:
        """Read what :meth:`pack` made, and return what follows it. Refused ``patch.invalid``."""
        fixed = 2 + 3 * CLASSES
        if len(data) < fixed:
            raise Refused("patch.invalid", "the tables of the patch are cut short")
        gap_rows, step_rows = data[0], data[1]
        size = (gap_rows + step_rows) * SYMBOLS
        if len(data) < fixed + 2 * size:
            raise Refused("patch.invalid", "the tables of the patch are cut short")
        modes, gap_tables, step_tables = np.frombuffer(data, np.uint8, 3 * CLASSES, 2).reshape(3, CLASSES)
        low, high = np.frombuffer(data, np.uint8, 2 * size, fixed).reshape(2, -1, SYMBOLS)
        frequencies = low.astype(np.uint32) | (high.astype(np.uint32) << 8)
        is_sound = (
            modes.max() <= VALUE_MODE
            and gap_tables.max() <= gap_rows
            and step_tables.max() <= step_rows
            and np.array_equal(gap_tables == 0, step_tables == 0)
            and bool((frequencies.sum(axis=1) == TOTAL).all())
        )
        if not is_sound:
            raise Refused("patch.invalid", "the tables of the patch contradict themselves")
        return (
            cls(
                modes.copy(),
                gap_tables.astype(np.int32) - 1,
                np.where(step_tables == 0, -1, step_tables.astype(np.int32) - 1 + gap_rows).astype(np.int32),
                frequencies.astype(np.uint32),
            ),
            data[fixed + 2 * size :],
        )


MOST_PACKED_BYTES: Final = 2 + 3 * CLASSES + 2 * 255 * 2 * SYMBOLS
"""No packed tables of one dtype are longer."""


def _cost(counts: Counts) -> float:
    """Bits of the symbols under their own distribution, and of its table."""
    present = counts[counts > 0].astype(float)
    return float((present * np.log2(present.sum() / present)).sum()) + _TABLE_BITS_PER_SYMBOL * len(present)


def _merge(counts: Counts, kinds: list[int], tables: NDArray[np.int32], rows: list[Counts]) -> None:
    """Give each of ``kinds`` (ascending) a row; neighbours share one where that is cheaper. Greedy, best pair first."""
    members = [[kind] for kind in kinds]
    sums = [counts[kind] for kind in kinds]
    costs = [_cost(row) for row in sums]
    joint = [_cost(left + right) for left, right in itertools.pairwise(sums)]
    while joint:
        gains = [costs[i] + costs[i + 1] - both for i, both in enumerate(joint)]
        best = int(np.argmax(gains))
        if gains[best] <= 0 and len(members) <= _MOST_ROWS:
            break
        members[best] += members.pop(best + 1)
        sums[best] = sums[best] + sums.pop(best + 1)
        costs[best] = joint.pop(best)
        costs.pop(best + 1)
        for i in (best - 1, best):
            if 0 <= i < len(joint):
                joint[i] = _cost(sums[i] + sums[i + 1])
    for group, row in zip(members, sums, strict=True):
        tables[group] = len(rows)
        rows.append(row)


def _normalise(counts: Counts) -> Frequencies:
    """Frequencies that add up to TOTAL, at least one for every symbol that occurs."""
    share = counts * (TOTAL / counts.sum())
    frequencies = np.where(counts > 0, np.maximum(1, np.floor(share)), 0).astype(np.int64)
    missing = TOTAL - int(frequencies.sum())
    while missing:
        # Give to, or take from, the symbols for which it matters most: d(bits) is about count / frequency.
        weight = np.where(frequencies > (0 if missing > 0 else 1), counts / np.maximum(frequencies, 1), 0.0)
        if missing > 0:
            chosen = np.argsort(-weight)[: min(missing, int((weight > 0).sum()))]
            frequencies[chosen] += 1
            missing -= len(chosen)
        else:
            weight = np.where(frequencies > 1, counts / np.maximum(frequencies - 1, 1), np.inf)
            frequencies[int(np.argmin(weight))] -= 1
            missing += 1
    return frequencies.astype(np.uint32)
