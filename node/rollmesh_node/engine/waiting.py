"""Samples that wait for a row of the running decode, and which of them go next. No torch.

Rows that are about equally long belong together: every step computes as many columns as the longest row has.
Invariant: nobody starves. Each choice is led by the oldest work (by its shortest row, where much came at once), and
what is nearest to it in length goes along; when the leader does not fit, nobody overtakes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollmesh_node.engine.backend import GroupRequest
from rollmesh_node.engine.rows import Row


class Waiting:
    """The queue before the decoder."""

    def __init__(self) -> None:
        self._batches: list[list[Row]] = []
        """One for each :meth:`add`, oldest first; shortest rows first, samples of a group beside each other."""

    def __len__(self) -> int:
        return sum(map(len, self._batches))

    def __iter__(self) -> Iterator[Row]:
        return (row for batch in self._batches for row in batch)

    @property
    def leader(self) -> Row | None:
        """The row that goes before all others."""
        return self._batches[0][0] if self._batches else None

    def add(self, requests: Sequence[GroupRequest]) -> None:
        """Queue every sample of every request."""
        rows = [Row(group=request, sample=sample) for request in requests for sample in request.samples]
        if rows:
            self._batches.append(sorted(rows, key=lambda row: (row.longest, len(row.start))))

    def take(self, most: int, *, cells: int, live: Sequence[Row]) -> list[Row]:
        """Remove and return up to ``most`` rows that fit beside ``live``: rows times the longest at most ``cells``.

        Where nothing is live, one row is always returned: less than that cannot be computed.
        """
        leader = self.leader
        if leader is None or most < 1:
            return []
        taken: list[Row] = []
        columns = max((row.longest for row in live), default=0)
        for row in sorted(self, key=lambda row: abs(row.longest - leader.longest)):
            columns = max(columns, row.longest)
            rows = len(live) + len(taken) + 1
            if len(taken) == most or (rows * columns > cells and rows > 1):
                break
            taken.append(row)
        gone = set(map(id, taken))
        self._batches = [kept for batch in self._batches if (kept := [row for row in batch if id(row) not in gone])]
        return taken

    def clear(self) -> list[Row]:
        """Remove and return everything."""
        rows, self._batches = list(self), []
        return rows
