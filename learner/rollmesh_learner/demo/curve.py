"""A curve out of block characters: the reward in a terminal. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"


def curve(values: Sequence[float], *, height: int, columns: int) -> list[str]:
    """``values`` between 0 and 1 as ``height`` lines of columns, the top line first; the last ``columns`` at most.

    Anything above 0 shows at least the lowest eighth of a line.
    """
    rows = []
    for row in reversed(range(height)):
        cells = []
        for value in values[-columns:]:
            eighths = math.ceil(min(1.0, max(0.0, value)) * height * 8 - 1e-9)
            cells.append(_EIGHTHS[min(8, max(0, eighths - 8 * row))])
        rows.append("".join(cells))
    return rows
