"""Keeps one child alive: starts it, prepares it, starts it again with back-off when it ends, and pauses it on demand.

The invariants: ``use()`` hands out a child that ``prepare`` has accepted and that was alive a moment ago; at most one
child exists at a time; ``stop()`` returns when the child and its memory are gone; ``state`` is always a sentence that
says what is being waited for. A call that fails because the child died raises ``ChildFailed`` in its caller: whether
to repeat it is the caller's decision.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

import trio

from rollmesh_peer.children.process import Child, ChildSpec, open_child
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed, RollmeshError

log = logging.getLogger("rollmesh.children")

HEALTHY_S: Final = 60.0
"""A child that has lived this long after being prepared starts the back-off afresh."""
USE_S: Final = 300.0
"""Default wait of ``use()``: a large model is loaded from a cold disk in less."""
MOST_DOUBLINGS: Final = 30
"""Exponents beyond this only overflow; the longest delay is reached long before."""

Prepare = Callable[[Child], Awaitable[None]]
Opener = Callable[[ChildSpec], AbstractAsyncContextManager[Child]]


def restart_delay_s(failures: int, jitter: float) -> float:
    """Seconds to wait before start number ``failures`` + 1 after ``failures`` failures in a row; ``jitter`` in [0, 1).

    Doubles from ``BACKOFF_FIRST_S`` up to ``BACKOFF_MOST_S``; of each delay, half is fixed and half random, so that
    children that were killed together do not come back together.
    """
    if failures <= 0:
        return 0.0
    longest = limits.BACKOFF_FIRST_S * 2.0 ** min(failures - 1, MOST_DOUBLINGS)
    return min(limits.BACKOFF_MOST_S, longest) * (0.5 + 0.5 * jitter)


class Supervisor:
    """Owns at most one child of ``spec``. Run :meth:`run` in a nursery; the rest may be called from any task."""

    def __init__(
        self,
        spec: ChildSpec,
        prepare: Prepare,
        *,
        opener: Opener = open_child,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.spec = spec
        self.restarts: int = 0
        """How often a child had to be started again after a failure."""
        self._prepare = prepare
        self._open = opener
        self._jitter = jitter
        self._wanted = True
        self._is_proven = False
        self._state = "not started"
        self._child: Child | None = None
        self._refusal: RollmeshError | None = None
        self._attempt: trio.CancelScope | None = None
        self._changed = trio.Event()

    @property
    def state(self) -> str:
        """What the child is doing, for a status page: "running, pid 123", "restarting in 4 s: ..."."""
        return self._state

    @property
    def child(self) -> Child | None:
        """The prepared child, or None while there is none."""
        return self._child if self._child is not None and self._child.is_alive else None

    @contextlib.asynccontextmanager
    async def use(self, *, deadline_s: float = USE_S) -> AsyncIterator[Child]:
        """A prepared, live child; several users may hold it at once.

        Raises ``ChildFailed`` with :attr:`state` in it when there is none within ``deadline_s``.
        """
        with trio.move_on_after(deadline_s):
            await self._wait_until(lambda: self.child is not None)
        child = self.child
        if child is None:
            raise self._none_within(deadline_s)
        yield child

    async def wait_accepted(self, *, deadline_s: float = USE_S) -> None:
        """Wait for the first child, as :meth:`use` does, but not for one that says itself that it cannot begin.

        A child that dies is started again; one that lives and refuses what ``prepare`` asks of it (a setting that is
        wrong, a device that is not there) would refuse it for ever.

        Raises:
            UsageError, Refused, HostError, ChildFailed: what the child said.
        """
        with trio.move_on_after(deadline_s):
            await self._wait_until(lambda: self.child is not None or self._refusal is not None)
        if self.child is None:
            raise self._refusal or self._none_within(deadline_s)

    def prove(self) -> None:
        """Note that the child has done what it is for: should it end, the back-off starts afresh."""
        self._is_proven = True

    async def stop(self) -> None:
        """End the child and keep it ended until :meth:`start`; returns when its memory is free."""
        self._wanted = False
        if self._attempt is not None:
            self._attempt.cancel()
        await self._wait_until(lambda: self._attempt is None)

    def start(self) -> None:
        """Undo :meth:`stop`; the child is started at once, without the delay of earlier failures."""
        self._wanted = True
        self._tell(self._state)

    async def run(self) -> None:
        """Keep the child alive until cancelled. Exceptions of ``prepare`` outside the error tree come out: our bugs."""
        try:
            while True:
                if not self._wanted:
                    self._tell("stopped")
                    await self._wait_until(lambda: self._wanted)
                with trio.CancelScope() as self._attempt:
                    await self._lives()
                self._attempt = None
                self._tell("stopped")
        finally:
            self._attempt = None
            self._tell("ended")

    async def _lives(self) -> None:
        """One life of a child after another, until cancelled."""
        failures = 0
        while True:
            healthy, reason = await self._one_life()
            failures = 1 if healthy else failures + 1
            delay_s = restart_delay_s(failures, self._jitter())
            log.warning("%s; restarting in %.1f s", reason, delay_s)
            self._tell(f"restarting in {delay_s:.0f} s: {reason}" if delay_s >= 1 else f"restarting: {reason}")
            await trio.sleep(delay_s)
            self.restarts += 1

    async def _one_life(self) -> tuple[bool, str]:
        """Start, prepare and keep one child; returns when it has ended: was it healthy, and why did it end."""
        prepared_at: float | None = None
        self._is_proven = False
        try:
            self._tell("starting")
            async with self._open(self.spec) as child:
                self._tell(f"preparing, pid {child.pid}")
                await self._prepare_or_note(child)
                prepared_at = trio.current_time()
                self._child = child
                self._tell(f"running, pid {child.pid}")
                raise await child.wait_dead()
        except RollmeshError as error:
            healthy = prepared_at is not None and trio.current_time() - prepared_at >= HEALTHY_S
            return healthy or self._is_proven, error.detail
        finally:
            self._child = None

    async def _prepare_or_note(self, child: Child) -> None:
        self._refusal = None
        try:
            await self._prepare(child)
        except RollmeshError as error:
            if child.is_alive:
                self._refusal = error
            raise

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _none_within(self, deadline_s: float) -> ChildFailed:
        return ChildFailed(f"no {self.spec.name} process within {deadline_s:g} s: {self._state}")

    def _tell(self, state: str) -> None:
        self._state = state
        self._changed.set()
        self._changed = trio.Event()
