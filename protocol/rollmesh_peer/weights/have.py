"""Have streams: two peers keep each other told which chunks of one payload they hold, for as long as either needs any.

Either side may open one, so a node that nobody can dial is a source as well: its chunks are asked for over the
connection that it opened itself. Opening one also shows our pass, so each side opens one the first time they meet;
after that one is enough. The other side is told at once of what it lacks, and only now and then of what it holds
itself, which is half of all there is to tell. Invariant: at most ``limits.MAX_HAVE_STREAMS_PER_PEER`` streams of one
peer; an update at least every ``HAVE_ALIVE_S``, so that silence means that the other side is gone. Chunks travel
elsewhere (:mod:`~rollmesh_peer.weights.seeding`).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import numpy as np
import trio

from rollmesh_peer.mesh.requests import StreamRoute, closed_answer, opened_answer
from rollmesh_peer.mesh.seam import Mesh, MeshStream
from rollmesh_peer.weights.board import Board, Pulse, held_bits, to_bytes
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.offers import Offers
from rollmesh_peer.weights.passes import PassBook
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.identity import short
from rollmesh_protocol.manifest import Manifest
from rollmesh_protocol.messages import HaveRequest, HaveUpdate
from rollmesh_protocol.streams import HAVE

log = logging.getLogger("rollmesh.swarm")

_FRAME_BYTES = limits.HAVE_BYTES + limits.SMALL_BYTES
_IDLE_S = 300.0
"""A stream on which nobody has learned anything for this long is closed, unless we are fetching."""
_RETRY_S = 5.0
"""How long a peer that broke off or refused is not asked again."""
_LIFE_S = 3600.0
"""A stream is opened anew after this long."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One end of a have stream. The side that answers marks its frames as answers: the first may be a refusal."""

    stream: MeshStream
    answers: bool

    async def tell(self, bitmap: bytes) -> None:
        message = HaveUpdate(bitmap=bitmap).encode()
        await self.stream.send(closed_answer(message) if self.answers else message)

    async def hear(self) -> bytes:
        frame = await self.stream.receive(_FRAME_BYTES)
        message = frame if self.answers else opened_answer(frame, answer_bytes=_FRAME_BYTES)
        return HaveUpdate.decode(message, limit=_FRAME_BYTES).bitmap


class HaveExchange:
    """The boards of all payloads, and the streams that fill them. ``await run()`` beside the rest of the peer.

    Args:
        admission: our own pass as the learner sealed it; None before we have one (and always on the learner).
        origin: chance, for a peer that is the first to have everything: it offers chunks so that others fetch
            different ones (:mod:`~rollmesh_peer.weights.offers`). None for a peer that just says what it holds.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        store: EdgeStore,
        passes: PassBook,
        admission: Callable[[], bytes | None],
        origin: Random | None = None,
    ) -> None:
        self._mesh = mesh
        self._store = store
        self._passes = passes
        self._admission = admission
        self._origin = origin
        self._boards: dict[bytes, Board] = {}
        self._inbound: Counter[str] = Counter()
        self._shown: set[str] = set()
        """Peers that have seen our pass."""
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Keep the streams that we open, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    @asynccontextmanager
    async def fetching(self, name: bytes) -> AsyncIterator[Board]:
        """The board of a payload that we are after; its streams stay open for the block, and its files are pinned."""
        board = self._board(name)
        board.is_fetching += 1
        try:
            with self._store.pin(name):
                await self.refresh(board)
                yield board
        finally:
            board.is_fetching -= 1
            for talk in board.talks:
                talk.fire()
            self._drop(board)

    async def notice(self, name: bytes) -> None:
        """Something was put into the store: tell those who asked about it before."""
        if name in self._boards:
            await self.refresh(self._boards[name])

    async def refresh(self, board: Board) -> None:
        """Look up what the store holds."""
        manifest, held = await trio.to_thread.run_sync(self._held, board.name)
        if manifest is not None:
            board.learn(held_bits(held, chunk_count=manifest.chunk_count))

    def join(self, board: Board, peer: str) -> None:
        """See to it that there is a stream with ``peer``, and that it has seen our pass, soon."""
        now = trio.current_time()
        sealed = self._admission()
        is_talking = peer in board.opened or (peer in board.talking and peer in self._shown)
        if self._nursery is None or sealed is None or is_talking or now < board.retry_at.get(peer, now):
            return
        self._enter(board, peer)
        board.opened.add(peer)
        self._nursery.start_soon(self._open, board, peer, sealed)

    def may_ask(self, peer: str) -> bool:
        """True when ``peer`` has seen our pass."""
        return peer in self._shown

    def show_again(self, peer: str) -> None:
        """``peer`` does not know our pass (any more)."""
        self._shown.discard(peer)

    def num_held(self, name: bytes, peer: str) -> int:
        """How many chunks ``peer`` has told us that it holds."""
        board = self._boards.get(name)
        return 0 if board is None else board.num_held(peer)

    def _board(self, name: bytes) -> Board:
        board = self._boards.get(name)
        if board is None:
            board = self._boards[name] = Board(name)
        return board

    def _drop(self, board: Board) -> None:
        if not board.talking and not board.is_fetching:
            self._boards.pop(board.name, None)

    def _held(self, name: bytes) -> tuple[Manifest | None, frozenset[int]]:
        return self._store.manifest(name), self._store.held(name)

    # --- streams -----------------------------------------------------------------------------------------------------
    def route(self) -> StreamRoute:
        """What the router serves."""
        return StreamRoute(protocol=HAVE, handle=self.serve, deadline_s=_LIFE_S)

    async def serve(self, stream: MeshStream) -> None:
        """Answer one have stream that ``stream.peer`` opened.

        Raises:
            Refused: the request is malformed, the peer not admitted, or there are too many streams.
        """
        message: bytes | None = None
        with trio.move_on_after(limits.REQUEST_S):
            message = await stream.receive(_FRAME_BYTES)
        if message is None:
            raise Refused("request.timeout")
        peer = stream.peer
        request = HaveRequest.decode(message, limit=_FRAME_BYTES)
        self._passes.present(peer, request.admission)
        if self._inbound[peer] >= limits.MAX_HAVE_STREAMS_PER_PEER or self._inbound.total() >= limits.MAX_HAVE_STREAMS:
            raise Refused("request.busy", "too many have streams")
        if self._mesh.peer_id < peer and peer in self._board(request.manifest).opened:
            raise Refused("request.busy", "we have just opened one ourselves")
        self._inbound[peer] += 1
        board = self._board(request.manifest)
        self._enter(board, peer)
        try:
            if not board.is_known:
                await self.refresh(board)
            board.hear(peer, request.bitmap)
            await self._converse(board, _Side(stream, answers=True), told=None)
            await stream.reset()
        finally:
            self._inbound[peer] -= 1
            self._inbound += Counter()
            self._exit(board, peer)

    async def _open(self, board: Board, peer: str, sealed: bytes) -> None:
        stream: MeshStream | None = None
        try:
            with trio.fail_after(limits.REQUEST_S):
                stream = await self._mesh.open_stream(peer, HAVE)
                told = self._bitmap_for(board, peer)
                request = HaveRequest(admission=sealed, manifest=board.name, bitmap=told)
                await stream.send(request.encode())
                side = _Side(stream, answers=False)
                first = await side.hear()
                self._shown.add(peer)
                board.hear(peer, first)
            await self._converse(board, side, told=told)
        except (LinkLost, Refused, trio.TooSlowError) as error:
            log.debug("no have stream with %s: %s", short(peer), error)
            if isinstance(error, Refused) and error.code == "request.busy":
                self._shown.add(peer)  # a pass is looked at first
                board.note()
        finally:
            if stream is not None:
                await stream.reset()
            board.retry_at[peer] = trio.current_time() + _RETRY_S
            board.opened.discard(peer)
            self._exit(board, peer)

    async def _converse(self, board: Board, side: _Side, *, told: bytes | None) -> None:
        """Tell and listen until neither side needs the other any more, or one of them goes.

        ``told`` is the bitmap of ours that the other side knows already.
        """
        pulse = Pulse()
        board.talks.add(pulse)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, board, side, pulse, nursery.cancel_scope)
                await self._tell(board, side, pulse, told)
                nursery.cancel_scope.cancel()
        finally:
            board.talks.discard(pulse)

    async def _tell(self, board: Board, side: _Side, pulse: Pulse, told: bytes | None) -> None:
        peer = side.stream.peer
        try:
            while told is None or not await self._is_over(board, peer):
                with trio.move_on_after(limits.HAVE_ALIVE_S) as waiting:
                    await self._wait_for_news(board, peer, pulse, told)
                if waiting.cancelled_caught and not board.is_fetching:
                    await self.refresh(board)
                told = self._bitmap_for(board, peer)
                await side.tell(told)
                await trio.sleep(board.update_every_s)
        except LinkLost as error:
            log.debug("the have stream with %s ended: %s", short(peer), error)

    async def _wait_for_news(self, board: Board, peer: str, pulse: Pulse, told: bytes | None) -> None:
        """Return when there is something to tell ``peer``, or nothing any more."""
        give_up_at = math.inf
        while not self._is_served(board, peer) and trio.current_time() < give_up_at:
            bitmap = self._bitmap_for(board, peer)
            if bitmap != told:
                if self._is_wanted(board, peer, told):
                    return
                give_up_at = min(give_up_at, trio.current_time() + limits.HAVE_LAZY_S)
            with trio.move_on_at(give_up_at):
                await pulse.wait()

    def _is_wanted(self, board: Board, peer: str, told: bytes | None) -> bool:
        """True when ``peer`` goes by what has changed: it lacks a chunk that is new here, or counts ours.

        The learner counts what its offers have led to; and that a peer has everything ends a stream.
        """
        has = board.raw_of(peer)
        if not told or has is None or board.is_complete or self._passes.learner == peer:
            return True
        own, known, theirs = (int.from_bytes(raw, "little") for raw in (board.own_bitmap(), told, has))
        return bool(own & ~known & ~theirs)

    def _bitmap_for(self, board: Board, peer: str) -> bytes:
        """What we tell ``peer``: what we hold, or, as an origin, what we would have it fetch."""
        if self._origin is None or not board.is_complete:
            return board.own_bitmap()
        if board.offers is None:
            board.offers = Offers(board.chunk_count, random=self._origin)
        has = board.heard_of(peer)
        return to_bytes(board.offers.update(peer, np.zeros(board.chunk_count, np.bool_) if has is None else has))

    async def _listen(self, board: Board, side: _Side, pulse: Pulse, talk: trio.CancelScope) -> None:
        peer = side.stream.peer
        try:
            while True:
                with trio.fail_after(limits.HAVE_SILENCE_S):
                    bitmap = await side.hear()
                board.hear(peer, bitmap)
                pulse.fire()
                await trio.sleep(limits.HAVE_EVERY_S / 2)
        except (LinkLost, Refused, trio.TooSlowError) as error:
            log.debug("the have stream with %s ended: %s", short(peer), error)
            talk.cancel()

    def _is_served(self, board: Board, peer: str) -> bool:
        """True when neither side will ask the other for anything."""
        return board.has_everything(peer) and (board.is_complete or not board.is_fetching)

    async def _is_over(self, board: Board, peer: str) -> bool:
        if self._is_served(board, peer):
            return True
        if board.is_fetching:
            return False
        if trio.current_time() - board.last_change > _IDLE_S:
            return True
        return board.is_known and await trio.to_thread.run_sync(self._store.manifest, board.name) is None

    def _enter(self, board: Board, peer: str) -> None:
        board.talking[peer] += 1

    def _exit(self, board: Board, peer: str) -> None:
        board.talking[peer] -= 1
        if board.talking[peer] <= 0:
            del board.talking[peer]
            board.leave(peer)
        if peer not in self._mesh.links():
            self._shown.discard(peer)
        self._drop(board)
