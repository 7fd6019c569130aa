"""The cache against a table of what each row should hold."""

from __future__ import annotations

import pytest
import torch

from rollmesh_node.engine.kv_cache import RowCache

LAYERS = 2


class Table:
    """A cache, and beside it every row's keys as a list of columns."""

    def __init__(self, *, rows: int, columns: int) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.cache = RowCache(layers=LAYERS, rows=rows, columns=columns)
        self.rows: list[list[torch.Tensor]] = [[] for _ in range(rows)]

    def write(self, columns: list[list[int]]) -> None:
        """One pass over the first rows: check that all of each row is seen as it was written."""
        rows, width = len(columns), len(columns[0])
        self.cache.aim(torch.tensor(columns))
        fresh = torch.randn(rows, 3, width, 8, generator=self.generator)
        for row, places in enumerate(columns):
            for at, column in enumerate(places):
                self.rows[row][column:] = [fresh[row, :, at]]
        for layer in range(LAYERS):
            keys, values = self.cache.update(fresh + layer, -fresh, layer)
            assert keys.shape == values.shape == (rows, 3, self.cache.window, 8)
            assert torch.isfinite(keys).all()
            for row, held in enumerate(self.rows[:rows]):
                expected = torch.stack(held, dim=1)
                assert torch.equal(keys[row, :, : len(held)], expected + layer)
                assert torch.equal(values[row, :, : len(held)], -expected)


def test_rows_of_different_lengths_hold_what_was_written():
    table = Table(rows=4, columns=6)
    table.write([[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]])
    table.write([[3, 4], [1, 2], [2, 3], [0, 1]])  # rows 1 to 3 were shorter than the padding
    table.write([[5], [3], [4], [2]])
    assert table.cache.window == 6


def test_rows_move_and_come_from_another_cache():
    table, other = Table(rows=3, columns=8), Table(rows=2, columns=4)
    table.write([[0, 1], [0, 1], [0, 1]])
    other.write([[0, 1, 2], [0, 1, 2]])
    table.cache.copy([(2, 0)], columns=2)
    table.rows[0] = list(table.rows[2])
    table.cache.copy([(1, 1), (1, 2)], columns=3, source=other.cache)
    table.rows[1], table.rows[2] = list(other.rows[1]), list(other.rows[1])
    table.write([[2], [3], [3]])


def test_an_empty_cache_takes_rows_of_another():
    table, other = Table(rows=2, columns=5), Table(rows=1, columns=2)
    other.write([[0, 1]])
    table.cache.copy([(0, 0), (0, 1)], columns=2, source=other.cache)
    table.rows = [list(other.rows[0]), list(other.rows[0])]
    table.write([[2], [2]])


@pytest.mark.parametrize("size", [(3, 9), (2, 9), (3, 4), (2, 4), (5, 4)])
def test_another_size_keeps_what_fits(size):
    table = Table(rows=3, columns=6)
    table.write([[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    table.cache.resize(rows=size[0], columns=size[1])
    assert (table.cache.rows, table.cache.columns) == size
    assert table.cache.num_bytes == 2 * LAYERS * size[0] * size[1] * 3 * 8 * 4
    table.write([[3], [3]])


def test_nothing_is_held_before_the_first_keys():
    assert RowCache(layers=LAYERS, rows=1000, columns=1000).num_bytes == 0
