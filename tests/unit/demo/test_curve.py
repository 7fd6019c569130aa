"""A curve of block characters stands as high as its values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmesh_learner.demo.curve import curve

EIGHTHS = " ▁▂▃▄▅▆▇█"


def test_values_stand_on_the_last_line() -> None:
    assert curve([0.0, 0.25, 0.5, 0.75, 1.0], height=2, columns=9) == ["   ▄█", " ▄███"]


def test_a_little_is_not_nothing_and_too_much_is_all() -> None:
    assert curve([0.001, 1.7, -3.0], height=1, columns=9) == ["▁█ "]


def test_only_the_newest_columns_are_shown() -> None:
    assert curve([1.0, 0.0, 1.0], height=1, columns=2) == [" █"]


@given(st.lists(st.floats(-1, 2), max_size=20), st.integers(1, 8))
def test_every_column_is_filled_from_below_to_its_value(values: list[float], height: int) -> None:
    lines = curve(values, height=height, columns=50)
    assert len(lines) == height and {len(line) for line in lines} <= {len(values)}
    for index, value in enumerate(values):
        column = [EIGHTHS.index(line[index]) for line in lines]
        assert column == sorted(column)
        filled = [eighths for eighths in column if eighths]
        assert all(eighths == 8 for eighths in filled[1:])
        assert abs(sum(column) / (8 * height) - min(1, max(0, value))) <= 1 / (8 * height) + 1e-6
