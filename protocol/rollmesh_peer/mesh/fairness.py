"""Turns: a bounded number of requests is worked on at one time, and peers that wait are served one after the other.

A peer with a hundred requests waiting and a peer with one are served alternately, and no peer holds more than its share
of the places. It bounds work, not memory: what is received before a turn is bounded elsewhere.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class Turns:
    """``places`` in all, ``per_peer`` of them for one peer at most."""

    def __init__(self, *, places: int, per_peer: int) -> None:
        self._free = places
        self._per_peer = per_peer
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[trio.Event]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[None]:
        """Wait for the peer's turn, and hold its place for the block."""
        mine = trio.Event()
        self._waiting.setdefault(peer, deque()).append(mine)
        self._hand_out()
        try:
            await mine.wait()
            yield
        finally:
            if mine.is_set():
                self._give_back(peer)
            else:
                self._leave(peer, mine)

    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    def _hand_out(self) -> None:
        while self._free > 0:
            peer = next((p for p in self._waiting if self._held[p] < self._per_peer), None)
            if peer is None:
                return
            queue = self._waiting.pop(peer)
            queue.popleft().set()
            if queue:
                self._waiting[peer] = queue
            self._held[peer] += 1
            self._free -= 1

    def _give_back(self, peer: str) -> None:
        self._free += 1
        self._held[peer] -= 1
        if self._held[peer] <= 0:
            del self._held[peer]
        self._hand_out()

    def _leave(self, peer: str, mine: trio.Event) -> None:
        queue = self._waiting[peer]
        queue.remove(mine)
        if not queue:
            del self._waiting[peer]
