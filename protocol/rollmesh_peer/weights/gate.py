"""Many readers or one writer, with deadlines on both sides: who may look at the working copy, and when it may change.

A waiting writer goes before readers that come after it, so a stream of engine loads cannot hold up new weights; a
writer that gives up lets them in. Nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from rollmesh_protocol.errors import HostError


class Gate:
    """Use :meth:`reading` and :meth:`writing` as async context managers. Not re-entrant."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._readers = 0
        self._writers_waiting = 0
        self._is_written = False
        self._changed = trio.Event()

    @asynccontextmanager
    async def reading(self, *, deadline_s: float) -> AsyncIterator[None]:
        """What is behind the gate does not change inside the block. HostError when it is not let in in time."""
        await self._wait(lambda: not self._is_written and not self._writers_waiting, deadline_s, "being changed")
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            self._notify()

    @asynccontextmanager
    async def writing(self, *, deadline_s: float) -> AsyncIterator[None]:
        """Nobody else is behind the gate inside the block. HostError when readers do not leave in time."""
        self._writers_waiting += 1
        try:
            await self._wait(lambda: not self._is_written and not self._readers, deadline_s, "being read")
            self._is_written = True
        finally:
            self._writers_waiting -= 1
            self._notify()
        try:
            yield
        finally:
            self._is_written = False
            self._notify()

    async def _wait(self, condition: Callable[[], bool], deadline_s: float, doing: str) -> None:
        with trio.move_on_after(deadline_s):
            while not condition():
                await self._changed.wait()
            return
        raise HostError(f"{self._what} are still {doing} after {deadline_s:g} s")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
