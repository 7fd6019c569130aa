"""The engines of one node and their workers, made and run together: one pair for each engine, one workforce of all.

Invariant: the owner's pause reaches a worker before its engine, so that leases go back with the right code and no
result of theirs is sent any more. Not here: which engines there are (``engine_setting``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from rollmesh_node.capacity import Capacity
from rollmesh_node.engine_log import ENGINE_LOG
from rollmesh_node.generator import EngineSetting, Generator
from rollmesh_node.joining import Membership
from rollmesh_node.journal import Journal
from rollmesh_node.own_limits import OwnLimits
from rollmesh_node.pausing import WHY, OwnersPause
from rollmesh_node.spool import Spool
from rollmesh_node.uplink import Uplink
from rollmesh_node.worker import Worker
from rollmesh_node.workforce import Workforce
from rollmesh_peer.logging_setup import event
from rollmesh_peer.weights.keeper import Keeper
from rollmesh_protocol.identity import Identity

_log = logging.getLogger(__name__)


class Engines:
    """``settings``: of each engine, at least one. ``folder`` takes their logs."""

    def __init__(
        self,
        settings: Sequence[EngineSetting],
        capacity: Capacity,
        *,
        identity: Identity,
        own: OwnLimits,
        uplink: Uplink,
        membership: Membership,
        keeper: Keeper,
        spool: Spool,
        journal: Journal,
        folder: Path,
        pause: OwnersPause,
        on_result: Callable[[bytes], None],
        on_ended: Callable[[str], None],
    ) -> None:
        self._pause = pause
        self._workers = [
            Worker(
                capacity,
                node=identity.peer,
                own=own,
                uplink=uplink,
                membership=membership,
                keeper=keeper,
                on_ended=on_ended,
                is_elsewhere=self._elsewhere(number),
            )
            for number, _ in enumerate(settings)
        ]
        self.workforce = Workforce(self._workers)
        self.generators = tuple(
            Generator(
                setting,
                card=membership.card,
                identity=identity,
                keeper=keeper,
                spool=spool,
                journal=journal,
                feed=worker.feed,
                on_result=on_result,
                log=folder / _log_name(setting.name),
            )
            for setting, worker in zip(settings, self._workers, strict=True)
        )

    async def run(self) -> None:
        """Generate until the workers have stopped, or cancelled."""
        async with trio.open_nursery() as nursery:
            if self._pause.is_on:
                await self._stop()
            for generator in self.generators:
                nursery.start_soon(generator.run)
            nursery.start_soon(lambda: self._pause.carry_out(stop=self._stop, start=self._start))
            await self.workforce.run(self.generators)
            nursery.cancel_scope.cancel()

    async def _stop(self) -> None:
        began = trio.current_time()
        self.workforce.pause(WHY)
        async with trio.open_nursery() as nursery:
            for generator in self.generators:
                nursery.start_soon(generator.stop)
        event(_log, "the engine's memory is free", took_s=round(trio.current_time() - began, 2))

    def _start(self) -> None:
        self.workforce.pause("")
        for generator in self.generators:
            generator.start()

    def _elsewhere(self, number: int) -> Callable[[bytes], bool]:
        """Whether a worker other than this one has a lease in hand."""
        return lambda lease_id: any(w.has(lease_id) for other, w in enumerate(self._workers) if other != number)


def _log_name(engine: str) -> str:
    """``engine.log``, or ``engine-gpu-1.log`` for one of several."""
    stem, _, ending = ENGINE_LOG.partition(".")
    return f"{stem}-{engine.lower().replace(' ', '-')}.{ending}" if engine else ENGINE_LOG
