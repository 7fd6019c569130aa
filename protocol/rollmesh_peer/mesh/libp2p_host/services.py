"""Runs the library's services so that no error of one of their tasks ends the host.

The library's own manager ends the whole service on any error of any task, walks over all tasks to start one, and
refuses the 1,001st child: a learner with more peers than that would stop. Ours starts tasks in one nursery, logs what a
task raises, and starts daemon tasks again.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio
from libp2p.tools.anyio_service import Service

log = logging.getLogger("rollmesh.mesh.services")

_RESTART_S: Final = 1.0
"""Before a daemon task that failed is started again."""


class ServiceTasks:
    """What a service calls its manager: starts tasks, and says when to stop."""

    def __init__(self, nursery: trio.Nursery, *, name: str) -> None:
        self._nursery = nursery
        self._name = name
        self._finished = trio.Event()

    @property
    def is_started(self) -> bool:
        """Always: it exists only inside :func:`running`."""
        return True

    @property
    def is_running(self) -> bool:
        """True until the service is asked to stop."""
        return not self._finished.is_set()

    @property
    def is_cancelled(self) -> bool:
        """True once the service was asked to stop."""
        return self._finished.is_set()

    @property
    def is_finished(self) -> bool:
        """True once the service was asked to stop."""
        return self._finished.is_set()

    @property
    def did_error(self) -> bool:
        """Never: errors are logged."""
        return False

    async def wait_started(self) -> None:
        """Returns at once."""
        await trio.lowlevel.checkpoint()

    async def wait_finished(self) -> None:
        """Returns when the service was asked to stop."""
        await self._finished.wait()

    def cancel(self) -> None:
        """Ask the service to stop."""
        self._finished.set()
        self._nursery.cancel_scope.cancel()

    async def stop(self) -> None:
        """Ask the service to stop."""
        self.cancel()
        await trio.lowlevel.checkpoint()

    def run_task(
        self,
        async_fn: Callable[..., Awaitable[object]],
        *args: object,
        daemon: bool = False,
        name: str | None = None,  # noqa: ARG002 - the library's signature
    ) -> None:
        """Start a task of the service."""
        if self.is_running:
            self._nursery.start_soon(self._guarded, async_fn, args, daemon)

    def run_daemon_task(
        self, async_fn: Callable[..., Awaitable[object]], *args: object, name: str | None = None
    ) -> None:
        """Start a task that is started again when it ends."""
        self.run_task(async_fn, *args, daemon=True, name=name)

    async def _guarded(
        self,
        async_fn: Callable[..., Awaitable[object]],
        args: tuple[object, ...],
        daemon: bool,  # noqa: FBT001
    ) -> None:
        while True:
            try:
                await async_fn(*args)
            except Exception:
                log.exception("a task of %s failed", self._name)
            if not daemon:
                return
            await trio.sleep(_RESTART_S)


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[None]:
    """Run ``service`` in the background of the block."""
    async with trio.open_nursery() as nursery:
        tasks = ServiceTasks(nursery, name=type(service).__name__)
        service._manager = tasks  # type: ignore[assignment]
        tasks.run_task(service.run)
        try:
            yield
        finally:
            tasks.cancel()
