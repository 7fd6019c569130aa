"""When a patch is decoded ahead: beside its fetch, whenever enough new chunks have come, one short call after another.

It never holds anything up: the fetch does not wait for it, the keeper turns it away while it is at work, and with the
last chunk it ends. What it has not got to, and what goes wrong here, is done by the apply.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

from rollmesh_peer.weights.board import Pulse
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.lineage import Link
from rollmesh_peer.weights.worker_calls import AheadAnswer
from rollmesh_protocol.errors import RollmeshError

log = logging.getLogger("rollmesh.weights")

_CALLS: Final = 32
"""Calls that new chunks give rise to, at most, for one payload: each carries the digests of all chunks."""


class Prepares(Protocol):
    """What it needs of the keeper."""

    async def prepare(self, link: Link) -> AheadAnswer | None: ...


async def prepare_while_fetched(link: Link, *, keeper: Prepares, store: EdgeStore, gained: Pulse) -> None:
    """Return when nothing more can be decoded of the patch ``link``. ``gained`` fires with every chunk of it."""
    name, manifest = link
    if manifest.parent is None:
        return
    least = max(1, manifest.chunk_count // _CALLS)
    seen = 0
    while not store.is_complete(name):
        held = len(store.held(name))
        if held < seen + least:
            await gained.wait()
            continue
        try:
            answer = await keeper.prepare(link)
        except RollmeshError as error:
            log.debug("version %d is not decoded ahead: %s", manifest.version, error)
            return
        if answer is not None and answer.is_over:
            return
        if answer is None or not answer.is_more:
            seen = held
