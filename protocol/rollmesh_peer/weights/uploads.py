"""What our uplink is spent on: a few chunks at a time, at a rate that the owner may cap, rare chunks and peers that
have little first.

Invariant: at most ``slots`` holders of a slot, and no more bytes than the cap allows over any second beyond a burst of
one chunk. Requests, leases and results never pass through here, so they are never behind a chunk. Which peers may ask
at all is decided elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused


@dataclass(slots=True, eq=False)
class _Waiter:
    peer: str
    sent: int
    num_held: int
    arrival: int
    turn: trio.Event = field(default_factory=trio.Event)


class UploadSlots:
    """Hands out slots. Of those who wait, chunks never sent before go first, then peers that hold few chunks, then few
    slots.

    Args:
        slots: chunks being sent at one time; one peer holds at most half of them (but at least one).
    """

    def __init__(self, slots: int = limits.UPLOAD_SLOTS) -> None:
        self._slots = slots
        self._per_peer = max(1, slots // 2)
        self._holders: Counter[str] = Counter()
        self._waiters: list[_Waiter] = []
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def slot(self, peer: str, *, sent: int, num_held: int = 0) -> AsyncIterator[None]:
        """Hold a slot for a chunk that was ``sent`` so many times before, for a peer that holds ``num_held`` chunks.

        Raises:
            Refused: ``request.busy`` when there was none within ``limits.UPLOAD_WAIT_S``, or too many wait.
        """
        if len(self._waiters) >= limits.MAX_UPLOAD_QUEUE:
            raise Refused("request.busy", "too many peers wait for this node's uplink")
        waiter = _Waiter(peer, sent, num_held, next(self._arrivals))
        self._waiters.append(waiter)
        self._admit()
        try:
            with trio.move_on_after(limits.UPLOAD_WAIT_S):
                await waiter.turn.wait()
            if not waiter.turn.is_set():
                raise Refused("request.busy", "this node's uplink is busy")
            yield
        finally:
            if waiter.turn.is_set():
                self._holders[peer] -= 1
            else:
                self._waiters.remove(waiter)
            self._admit()

    def _admit(self) -> None:
        while self._holders.total() < self._slots:
            able = [waiter for waiter in self._waiters if self._holders[waiter.peer] < self._per_peer]
            if not able:
                break
            chosen = min(
                able, key=lambda waiter: (waiter.sent > 0, waiter.num_held, self._holders[waiter.peer], waiter.arrival)
            )
            self._waiters.remove(chosen)
            self._holders[chosen.peer] += 1
            chosen.turn.set()
        self._holders += Counter()  # forget peers that hold nothing


class UploadRate:
    """A cap in bytes a second, kept by waiting before each chunk. Fair in the order of asking.

    Args:
        bytes_per_s: the cap; None for no cap.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = -math.inf

    async def spend(self, num_bytes: int) -> None:
        """Return when ``num_bytes`` may be sent.

        Raises:
            Refused: ``request.busy`` when that would take longer than ``limits.UPLOAD_WAIT_S``.
        """
        if self._bytes_per_s is None:
            return
        now = trio.current_time()
        start = max(now, self._free_at)
        if start - now > limits.UPLOAD_WAIT_S:
            raise Refused("request.busy", "this node's uplink is capped and busy")
        self._free_at = start + num_bytes / self._bytes_per_s
        await trio.sleep_until(start)
