"""The chunk swarm of one peer: fetches manifests and payloads from neighbours and the learner, and keeps count.

The invariant between its parts: the exchange says who has what, the picker decides, a fetch carries out, the store
verifies. Serving others is :mod:`~rollmesh_peer.weights.seeding`; which payload is wanted is decided by
:mod:`~rollmesh_peer.weights.follower`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Final

import trio

from rollmesh_peer.mesh.requests import ask
from rollmesh_peer.weights.board import Board, Pulse
from rollmesh_peer.weights.fetch import Around, Fetch, Tally
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.identity import short
from rollmesh_protocol.manifest import Manifest, manifest_name
from rollmesh_protocol.messages import ManifestRequest
from rollmesh_protocol.streams import MANIFEST

log = logging.getLogger("rollmesh.swarm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the swarm has done since the start, and what it waits for now."""

    bytes_from_learner: int = 0
    bytes_from_peers: int = 0
    chunks_from_learner: int = 0
    chunks_from_peers: int = 0
    fetches: int = 0
    """Payloads completed."""
    seconds: float = 0.0
    """Time spent fetching."""
    waiting_for: str = ""
    """One clause; empty while nothing is fetched."""


class Swarm:
    """Fetches what it is asked for.

    Args:
        around: the parts of the peer that a fetch works with.
        fetch_ended: called with the peers that gave chunks, after each fetch.
    """

    def __init__(
        self, around: Around, *, random: Random, fetch_ended: Callable[[frozenset[str]], None] | None = None
    ) -> None:
        self.gained: Final = Pulse()
        """Fires with every chunk that is stored."""
        self._around = around
        self._fetch_ended = fetch_ended
        self._random = random
        self._totals = Progress()
        self._current: Fetch | None = None
        self._waiting_for = ""

    @property
    def progress(self) -> Progress:
        """Counters since the start, the running fetch included."""
        fetch = self._current
        if fetch is None:
            return replace(self._totals, waiting_for=self._waiting_for)
        return replace(self._added(fetch.tally), waiting_for=fetch.waiting_for)

    async def manifest(self, name: bytes, *, max_bytes: int) -> Manifest:
        """The verified manifest called ``name``: from disk, from the learner, or from a neighbour that has it.

        Raises:
            Refused: it does not say what a manifest of this run must say (``manifest.*``, ``envelope.*``), or its
                payload does not fit on the disk (``manifest.limits``).
            LinkLost: nobody gave it within ``limits.TRANSFER_S``.
        """
        store = self._around.store
        known = await trio.to_thread.run_sync(store.manifest, name)
        if known is not None:
            return known
        async with self._around.exchange.fetching(name) as board:
            self._waiting_for = "a manifest"
            try:
                envelope = await self._find_envelope(board, min(max_bytes, limits.MANIFEST_BYTES))
            finally:
                self._waiting_for = ""
        return await trio.to_thread.run_sync(store.add_manifest, name, envelope)

    async def fetch(self, name: bytes) -> Tally:
        """Complete the payload of a manifest that the store holds, from where an earlier attempt ended.

        Goes on until it is done, however long that takes; cancel it to give up. Returns who gave what.

        Raises:
            HostError: the disk is full or fails.
            Refused: ``request.unknown`` when the store does not hold the manifest (any more).
        """
        store = self._around.store
        tally = Tally()
        started = trio.current_time()
        async with self._around.exchange.fetching(name) as board:
            manifest = await trio.to_thread.run_sync(store.manifest, name)
            if manifest is None:
                raise Refused("request.unknown", "the manifest is not held")
            while not await trio.to_thread.run_sync(store.is_complete, name):
                await self._around.exchange.refresh(board)
                held = await trio.to_thread.run_sync(store.held, name)
                fetch = Fetch(
                    self._around, board=board, manifest=manifest, held=held, random=self._random, gained=self.gained
                )
                self._current = fetch
                try:
                    await fetch.run()
                finally:
                    self._current = None
                    self._totals = self._added(fetch.tally)
                    tally.chunks.update(fetch.tally.chunks)
                    tally.num_bytes.update(fetch.tally.num_bytes)
        took_s = trio.current_time() - started
        self._totals = replace(self._totals, fetches=self._totals.fetches + 1, seconds=self._totals.seconds + took_s)
        if self._fetch_ended:
            self._fetch_ended(frozenset(tally.chunks))
        log.debug(
            "fetched version %d: %d bytes in %.2f s, %d of %d chunks from peers",
            manifest.version, manifest.payload_bytes, took_s,
            tally.chunks.total() - tally.chunks[self._around.learner], tally.chunks.total(),
        )  # fmt: skip
        return tally

    async def _find_envelope(self, board: Board, max_bytes: int) -> bytes:
        around = self._around
        tried: set[str] = set()
        request = ManifestRequest(name=board.name).encode()
        with trio.move_on_after(limits.TRANSFER_S) as search:
            while True:
                now = trio.current_time()
                linked = around.mesh.links()
                for neighbour in (around.learner, *around.neighbours()):
                    if around.conduct.is_free(neighbour, now=now):
                        around.exchange.join(board, neighbour)
                able = [around.learner, *board.knowers()]
                peer = next((peer for peer in able if peer in linked and peer not in tried), None)
                if peer is None:
                    with trio.move_on_after(limits.REST_S) as nothing_new:
                        await board.changed.wait()
                    if nothing_new.cancelled_caught:
                        tried.clear()
                    continue
                tried.add(peer)
                envelope = await self._ask_for_envelope(peer, board.name, request, max_bytes)
                if envelope is not None:
                    return envelope
                if peer == around.learner:
                    # It knows what is on offer: give the neighbours a moment, and let the caller plan again.
                    search.deadline = min(search.deadline, trio.current_time() + limits.CHUNK_S)
        raise LinkLost("nobody who is connected has the manifest")

    async def _ask_for_envelope(self, peer: str, name: bytes, request: bytes, max_bytes: int) -> bytes | None:
        try:
            envelope = await ask(
                self._around.mesh, peer, MANIFEST, request, answer_bytes=max_bytes, deadline_s=limits.REQUEST_S
            )
        except (LinkLost, Refused) as error:
            log.debug("no manifest from %s: %s", short(peer), error)
            return None
        if manifest_name(envelope) == name:
            return envelope
        log.warning("%s sent something else for a manifest", short(peer))
        if peer != self._around.learner:
            self._around.conduct.shun(peer, now=trio.current_time())
        return None

    def _added(self, tally: Tally) -> Progress:
        learner = self._around.learner
        totals = self._totals
        return replace(
            totals,
            bytes_from_learner=totals.bytes_from_learner + tally.num_bytes[learner],
            bytes_from_peers=totals.bytes_from_peers + tally.num_bytes.total() - tally.num_bytes[learner],
            chunks_from_learner=totals.chunks_from_learner + tally.chunks[learner],
            chunks_from_peers=totals.chunks_from_peers + tally.chunks.total() - tally.chunks[learner],
        )
