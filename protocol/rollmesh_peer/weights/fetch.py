"""One fetch of one payload: carries out what the picker decides, over chunk streams that stay open between requests.

Invariant: nothing is kept that does not have its digest (the store checks), and every wait has a deadline. It goes on
for as long as it takes, with whoever is there; giving it up is the caller's decision and loses no chunk.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

import trio

from rollmesh_peer.mesh.requests import opened_answer
from rollmesh_peer.mesh.seam import Mesh, MeshStream
from rollmesh_peer.weights.board import Board, Pulse
from rollmesh_peer.weights.conduct import ConductBook
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.have import HaveExchange
from rollmesh_peer.weights.picker import Ask, Picker
from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError, LinkLost, Refused
from rollmesh_protocol.identity import short
from rollmesh_protocol.manifest import Manifest
from rollmesh_protocol.messages import ChunkRequest
from rollmesh_protocol.streams import CHUNK

log = logging.getLogger("rollmesh.swarm")

_LOOK_S = 1.0
"""How often new neighbours are looked for when nothing else happens."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Chunks and bytes that arrived and were good, by peer."""

    chunks: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What a fetch needs of the peer it runs in."""

    mesh: Mesh
    learner: str
    store: EdgeStore
    exchange: HaveExchange
    conduct: ConductBook
    neighbours: Callable[[], Iterable[str]]


class Fetch:
    """Fetches the payload of ``manifest``; ``await run()`` once. ``gained`` fires with every chunk that is stored."""

    def __init__(
        self, around: Around, *, board: Board, manifest: Manifest, held: Iterable[int], random: Random, gained: Pulse
    ) -> None:
        self._around = around
        self._board = board
        self._manifest = manifest
        self._picker = Picker(
            chunk_count=manifest.chunk_count,
            chunk_bytes=manifest.chunk_bytes,
            held=frozenset(held),
            learner=around.learner,
            random=random,
        )
        self._gained = gained
        self._offered: dict[str, bytes] = {}
        self._idle: dict[str, list[MeshStream]] = {}
        self._scopes: dict[Ask, trio.CancelScope] = {}
        self._fault: HostError | Refused | None = None
        self.tally = Tally()

    async def run(self) -> None:
        """Return when every chunk is stored.

        Raises:
            HostError: the disk is full or fails.
            Refused: ``request.unknown`` when the store has dropped the manifest.
        """
        try:
            async with trio.open_nursery() as nursery:
                while self._picker.missing_count and self._fault is None:
                    self._step(nursery)
                    await self._wait()
                nursery.cancel_scope.cancel()
        finally:
            for streams in self._idle.values():
                for stream in streams:
                    await stream.reset()
        if self._fault is not None:
            raise self._fault

    @property
    def waiting_for(self) -> str:
        """One clause for status pages."""
        missing, count = self._picker.missing_count, self._manifest.chunk_count
        text = f"{count - missing} of {count} chunks of version {self._manifest.version}"
        sources = self._picker.live_sources
        if not sources:
            return f"{text}; no peer that has any of it is connected"
        peers = len(sources - {self._around.learner})
        names = [f"{peers} peer{'s' if peers != 1 else ''}"] if peers else []
        names += ["the learner"] if self._around.learner in sources else []
        unheld = self._picker.unheld_count
        rest = f"; nobody connected has {unheld} of them" if unheld else ""
        return f"{text}, from {' and '.join(names)}{rest}"

    # --- the loop ----------------------------------------------------------------------------------------------------
    def _step(self, nursery: trio.Nursery) -> None:
        now = trio.current_time()
        for peer in self._picker.overdue(now):
            self._struck_out(peer, now)
        self._look_around(now)
        for ask in self._picker.asks(now):
            if ask.instead_of is not None:
                self._withdraw(ask.instead_of)
            nursery.start_soon(self._get, ask)

    async def _wait(self) -> None:
        now = trio.current_time()
        release = self._around.conduct.next_release(now=now)
        times = [self._picker.next_event(now), now + _LOOK_S, *([] if release is None else [release])]
        with trio.move_on_at(min(times)):
            await self._board.changed.wait()

    def _look_around(self, now: float) -> None:
        """Bring the picker's sources in step with who is connected, in good standing, and has something."""
        around = self._around
        linked = around.mesh.links()
        for peer in (around.learner, *around.neighbours()):
            if peer in linked and around.conduct.is_free(peer, now=now):
                around.exchange.join(self._board, peer)
        others = self._board.others()
        for peer in [peer for peer in self._offered if peer not in others or peer not in linked]:
            del self._offered[peer]
            self._picker.lose(peer)
            self._stop(peer)
        for peer, bitmap in others.items():
            if peer not in linked or self._offered.get(peer) == bitmap or not around.exchange.may_ask(peer):
                continue
            if not around.conduct.is_free(peer, now=now):
                continue
            if peer in self._offered or len(self._offered) <= 2 * limits.MAX_NEIGHBOURS or peer == around.learner:
                self._offered[peer] = bitmap
                self._picker.offer(peer, self._board.bits(bitmap))

    def _struck_out(self, peer: str, now: float) -> None:
        until = self._around.conduct.penalise(peer, now=now)
        log.info("%s is too slow or silent: not asked for chunks for %.0f s", short(peer), until - now)
        self._leave_alone(peer)

    def _leave_alone(self, peer: str) -> None:
        self._picker.end(peer)
        self._offered.pop(peer, None)
        self._stop(peer)

    def _stop(self, peer: str) -> None:
        for ask, scope in self._scopes.items():
            if ask.peer == peer:
                scope.cancel()

    def _withdraw(self, ask: Ask) -> None:
        """Its answer is of no use any more; the peer learns that from the reset of the stream."""
        if ask in self._scopes:
            self._scopes[ask].cancel()

    # --- one request -------------------------------------------------------------------------------------------------
    async def _get(self, ask: Ask) -> None:
        chunk: bytes | None = None
        refusal: Refused | None = None
        with trio.CancelScope(deadline=ask.give_up) as scope:
            self._scopes[ask] = scope
            try:
                chunk = await self._request(ask)
            except Refused as error:
                refusal = error
            except LinkLost as error:
                log.debug("chunk %d from %s: %s", ask.index, short(ask.peer), error)
        del self._scopes[ask]
        if chunk is not None:
            await self._keep(ask, chunk)
        elif refusal is not None:
            self._refused(ask, refusal)
        else:
            self._failed(ask)
        self._board.changed.fire()

    async def _request(self, ask: Ask) -> bytes:
        """The bytes that come for ``ask``, over an idle chunk stream or a new one."""
        request = ChunkRequest(manifest=self._board.name, indices=(ask.index,)).encode()
        idle = self._idle.setdefault(ask.peer, [])
        while idle:
            try:
                return await self._exchange(idle.pop(), ask, request)
            except LinkLost:
                continue  # closed by the other side while it was idle
        return await self._exchange(await self._around.mesh.open_stream(ask.peer, CHUNK), ask, request)

    async def _exchange(self, stream: MeshStream, ask: Ask, request: bytes) -> bytes:
        is_whole = False
        try:
            await stream.send(request)
            length = self._manifest.chunk_length(ask.index)
            frame = await stream.receive(max(length, limits.REFUSAL_BYTES) + 1)
            chunk = opened_answer(frame, answer_bytes=length)
            is_whole = True
        finally:
            if not is_whole:
                await stream.reset()
        self._idle.setdefault(ask.peer, []).append(stream)
        return chunk

    async def _keep(self, ask: Ask, chunk: bytes) -> None:
        if not self._picker.received(ask, now=trio.current_time()):
            return
        store, name = self._around.store, self._board.name
        try:
            await trio.to_thread.run_sync(store.write_chunk, name, ask.index, chunk)
        except Refused as error:
            self._picker.corrupt(ask)
            if error.code == "chunk.digest":
                self._lied(ask.peer)
            else:
                self._fault = error
            return
        except HostError as error:
            self._picker.corrupt(ask)
            self._fault = error
            return
        for second in self._picker.stored(ask):
            self._withdraw(second)
        self._board.gain(ask.index)
        self._gained.fire()
        self.tally.chunks[ask.peer] += 1
        self.tally.num_bytes[ask.peer] += len(chunk)

    def _lied(self, peer: str) -> None:
        now = trio.current_time()
        log.warning("%s sent a chunk with a wrong digest", short(peer))
        if peer == self._around.learner:
            self._around.conduct.penalise(peer, now=now)
        else:
            self._around.conduct.shun(peer, now=now)
        self._leave_alone(peer)

    def _refused(self, ask: Ask, refusal: Refused) -> None:
        log.debug("%s refused chunk %d: %s", short(ask.peer), ask.index, refusal)
        match refusal.code:
            case "request.busy":
                self._picker.busy(ask, now=trio.current_time())
            case "request.unknown":
                self._picker.lacks(ask)
            case "node.not_admitted":
                self._around.exchange.show_again(ask.peer)
                self._failed(ask)
            case "node.quarantined" | "chunk.served" | "version.unsupported":
                if ask.peer in self._picker.live_sources:
                    self._struck_out(ask.peer, trio.current_time())
            case _:
                self._failed(ask)

    def _failed(self, ask: Ask) -> None:
        now = trio.current_time()
        for peer in self._picker.failed(ask, now=now):
            self._struck_out(peer, now)
