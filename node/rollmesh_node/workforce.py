"""Several workers of one node, each with an engine of its own; to the rest of the node they are one worker.

Every lease belongs to one worker, so what ``decisions`` promises of a lease holds as it does with one engine: an engine
that ends takes its own leases with it and nobody else's. With one engine nothing is added here.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from rollmesh_node.worker import Engine, Worker
from rollmesh_protocol.messages import Notice, Standing


class Workforce:
    """``workers``: at least one. Notices and the owner's wishes reach all of them."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = tuple(workers)

    async def run(self, engines: Sequence[Engine]) -> None:
        """Work, each worker with its engine, until all have stopped, or cancelled."""
        async with trio.open_nursery() as nursery:
            for worker, engine in zip(self._workers, engines, strict=True):
                nursery.start_soon(worker.run, engine)

    # --- what others see ---------------------------------------------------------------------------------------------
    @property
    def leases_open(self) -> int:
        """Leases in hand."""
        return sum(worker.leases_open for worker in self._workers)

    @property
    def tokens_per_s(self) -> float:
        """Of all engines together."""
        return sum(worker.tokens_per_s for worker in self._workers)

    @property
    def waiting_for(self) -> str:
        """What keeps every engine from generating; empty while any does."""
        waits = [worker.waiting_for for worker in self._workers]
        return waits[0] if all(waits) else ""

    @property
    def standing(self) -> Standing | None:
        """As of the learner's last answer to any of them."""
        return max(self._workers, key=lambda worker: worker.standing_at).standing

    # --- what they are told ------------------------------------------------------------------------------------------
    def stop(self, *, grace_s: float) -> None:
        """See :meth:`.worker.Worker.stop`."""
        for worker in self._workers:
            worker.stop(grace_s=grace_s)

    def notice(self, notice: Notice) -> None:
        """See :meth:`.worker.Worker.notice`."""
        for worker in self._workers:
            worker.notice(notice)

    def receipt_came(self) -> None:
        """A result was answered for."""
        for worker in self._workers:
            worker.receipt_came()

    def pause(self, why: str) -> None:
        """See :meth:`.worker.Worker.pause`."""
        for worker in self._workers:
            worker.pause(why)
