"""The door through which streams of others come in, one at a time: peers that matter first, and each in its turn.

Until a stream goes through it costs a few microseconds; behind the door begins what costs milliseconds: a task, the
negotiation, a request. So a flood queues up in front of it, where it is cheap, and whoever has few streams waits for
few. Invariant: a peer of a higher rank never waits for the queue of a lower one, but for every ``_LOW_SHARE``-th
stream, with which nobody waits for ever; peers of one rank take turns; who waited ``limits.DOOR_S`` is turned away. How
many streams a peer may have at all is decided by its connection.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from rollmesh_protocol import limits

Rank = Callable[[str], int]
"""Peer id -> how much it matters: 0 for strangers, ``TOP_RANK`` for those whose work was accepted."""
TOP_RANK: Final = 2
_LOW_SHARE: Final = 8
"""Of so many streams that come in one is of the lowest rank that waits."""
_TICKS: Final = 8
"""Rounds of the scheduler between two streams below the top rank. A request takes some twenty, so only a few of these
are under way at any time, and whoever else runs finds the rounds short; an idle program makes them in 0.2 ms."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """A stream in front of the door."""

    since: float
    is_wanted: Callable[[], bool]
    """False once the other side has given it up: it costs nothing then."""
    come_in: Callable[[], None]
    turn_away: Callable[[], None]


class Queue:
    """Who is next. Pure."""

    def __init__(self) -> None:
        self._waiting: tuple[OrderedDict[str, deque[Visitor]], ...] = tuple(OrderedDict() for _ in range(TOP_RANK + 1))
        self._num_taken = 0

    def put(self, peer: str, visitor: Visitor, *, rank: int) -> None:
        """To the end of the peer's own queue."""
        self._waiting[max(0, min(rank, TOP_RANK))].setdefault(peer, deque()).append(visitor)

    def take(self) -> tuple[Visitor, int] | None:
        """The next one and its rank, or None."""
        ranks = [rank for rank, queues in enumerate(self._waiting) if queues]
        if not ranks:
            return None
        self._num_taken += 1
        rank = ranks[0] if self._num_taken % _LOW_SHARE == 0 else ranks[-1]
        queues = self._waiting[rank]
        peer, queue = next(iter(queues.items()))
        visitor = queue.popleft()
        del queues[peer]
        if queue:
            queues[peer] = queue
        return visitor, rank


class Doorway:
    """The door of one host. ``await run()`` for as long as it lives."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._queue = Queue()
        self._arrived = trio.Event()

    def knock(self, peer: str, visitor: Visitor) -> None:
        """Wait for the turn of ``peer``; one of the visitor's three functions is called with it."""
        self._queue.put(peer, visitor, rank=self._rank(peer))
        self._arrived.set()

    async def run(self) -> None:
        """Let one in after the other. Never returns."""
        while True:
            found = self._queue.take()
            if found is None:
                self._arrived = trio.Event()
                await self._arrived.wait()
                continue
            visitor, rank = found
            if not visitor.is_wanted():
                continue
            if trio.current_time() - visitor.since > limits.DOOR_S:
                visitor.turn_away()
                continue
            visitor.come_in()
            for _ in range(1 if rank >= TOP_RANK else _TICKS):
                await trio.lowlevel.checkpoint()


def nobody_matters(_peer: str) -> int:
    """The rank of everybody where all are equal."""
    return 0
