"""What follows an offence: the record changes and is written down, and a node in quarantine loses its open work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import trio

from rollmesh_learner.members.nodes import Nodes
from rollmesh_learner.records import rows
from rollmesh_learner.records.ledger import Ledger, Statement
from rollmesh_learner.work.book import Book
from rollmesh_protocol.identity import short

_log = logging.getLogger("rollmesh.learner.standing")


class Discipline:
    """Applies :mod:`rollmesh_learner.members.standing` to the book and the ledger."""

    def __init__(self, *, book: Book, nodes: Nodes, ledger: Ledger, on_quarantine: Callable[[str], None]) -> None:
        self._book = book
        self._nodes = nodes
        self._ledger = ledger
        self._on_quarantine = on_quarantine

    async def offend(
        self, peer: str, code: str, *, detail: str, rollouts: int, along: Sequence[Statement] = ()
    ) -> None:
        """``peer`` did something wrong; ``rollouts`` of its samples were refused for it.

        What follows holds before anything is waited for, and is written down with ``along`` in one transaction: no
        work of a node that was put out can be consumed meanwhile, and a crash leaves no verdict without it.
        """
        before = self._nodes.record_of(peer)
        wall_time = time.time()
        record = before.offend(
            code, rollouts=rollouts, detail=detail, now=wall_time, half_life_s=self._nodes.rules.soft_half_life_s
        )
        if record == before:  # nothing to hold against it: a flood of these must cost neither disk nor log
            _log.debug("%s: %s (%s)", short(peer), code, detail)
            if along:
                await self._ledger.commit(*along)
            return
        self._nodes.set_record(peer, record)
        statements = [
            *along,
            rows.put_node(peer, name=self._nodes.name_of(peer), record=record, wall_time=wall_time),
            rows.insert_offence(peer, code=code, detail=detail, wall_time=wall_time),
        ]
        _log.info("%s: %s (%s)", short(peer), code, detail)
        if record.is_quarantined:  # also when it was before: a result may have been on its way through the intake
            statements += self._book.void_node(peer, now=trio.current_time())
        if record.is_quarantined and not before.is_quarantined:
            _log.warning("%s is out of the run: %s", short(peer), record.quarantined_for)
            self._on_quarantine(peer)
        await self._ledger.commit(*statements)
