"""Have streams: two peers keep each other told which chunks of one payload they hold, for as long as either needs any.

Either side may open one, so a node that nobody can dial is a source as well: its chunks are asked for over the
connection that it opened itself. Opening one also shows our pass. Invariant: at most
``limits.MAX_HAVE_STREAMS_PER_PEER`` streams of one peer; an update at least every ``HAVE_ALIVE_S``, so that silence
means that the other side is gone. Chunks travel elsewhere (:mod:`~rollmesh_peer.weights.seeding`).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable

import trio

from rollmesh_peer.mesh.requests import receive_answer, send_answer
from rollmesh_peer.mesh.seam import Mesh, MeshStream
from rollmesh_peer.weights.board import Board, held_bits
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.passes import PassBook
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.identity import short
from rollmesh_protocol.messages import HaveRequest, HaveUpdate
from rollmesh_protocol.streams import HAVE

log = logging.getLogger("rollmesh.swarm")

_FRAME_BYTES = limits.HAVE_BYTES + limits.SMALL_BYTES
_IDLE_S = 300.0
"""A stream on which nobody has learned anything for this long is closed, unless we are fetching."""
_RETRY_S = 5.0
"""How long a peer that broke off or refused is not asked again."""


class HaveExchange:
    """The boards of all payloads, and the streams that fill them. ``await run()`` beside the rest of the peer.

    Args:
        admission: our own pass as the learner sealed it; None before we have one (and always on the learner).
    """

    def __init__(
        self, mesh: Mesh, *, store: EdgeStore, passes: PassBook, admission: Callable[[], bytes | None]
    ) -> None:
        self._mesh = mesh
        self._store = store
        self._passes = passes
        self._admission = admission
        self._boards: dict[bytes, Board] = {}
        self._inbound: Counter[str] = Counter()
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Keep the streams that we open, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def board(self, name: bytes) -> Board:
        """The board of a payload, filled from the store when the store knows the manifest."""
        board = self._boards.setdefault(name, Board(name))
        await self.refresh(board)
        return board

    async def refresh(self, board: Board) -> None:
        """Look the manifest up, if it was not known before."""
        manifest = self._store.manifest(board.name)
        if manifest is not None and not board.is_known:
            held = await trio.to_thread.run_sync(self._store.held, board.name)
            board.learn(held_bits(held, chunk_count=manifest.chunk_count))

    def join(self, board: Board, peer: str) -> None:
        """See to it that there is a stream with ``peer``, soon."""
        now = trio.current_time()
        sealed = self._admission()
        if self._nursery is None or sealed is None or peer in board.talking or now < board.retry_at.get(peer, now):
            return
        self._enter(board, peer)
        self._nursery.start_soon(self._open, board, peer, sealed)

    def drop(self, board: Board) -> None:
        """Forget a board that nobody uses."""
        if not board.talking and not board.is_fetching:
            self._boards.pop(board.name, None)

    # --- streams -----------------------------------------------------------------------------------------------------
    async def serve(self, stream: MeshStream, message: bytes) -> None:
        """Answer one have stream that ``stream.peer`` opened with the request ``message``.

        Raises:
            Refused: the request is malformed, the peer not admitted, or there are too many streams.
        """
        peer = stream.peer
        request = HaveRequest.decode(message, limit=_FRAME_BYTES)
        self._passes.present(peer, request.admission)
        if self._inbound[peer] >= limits.MAX_HAVE_STREAMS_PER_PEER or self._inbound.total() >= limits.MAX_HAVE_STREAMS:
            raise Refused("request.busy", "too many have streams")
        self._inbound[peer] += 1
        board = self._boards.setdefault(request.manifest, Board(request.manifest))
        self._enter(board, peer)
        try:
            await self.refresh(board)
            board.hear(peer, request.bitmap)
            await self._converse(board, peer, stream)
        finally:
            self._inbound[peer] -= 1
            self._inbound += Counter()
            self._exit(board, peer)

    async def _open(self, board: Board, peer: str, sealed: bytes) -> None:
        stream: MeshStream | None = None
        try:
            with trio.fail_after(limits.REQUEST_S):
                stream = await self._mesh.open_stream(peer, HAVE)
                request = HaveRequest(admission=sealed, manifest=board.name, bitmap=board.own_bitmap())
                await stream.send(request.encode())
                first = HaveUpdate.decode(await receive_answer(stream, limit=_FRAME_BYTES), limit=_FRAME_BYTES)
            board.hear(peer, first.bitmap)
            await self._converse(board, peer, stream)
        except (LinkLost, Refused, trio.TooSlowError) as error:
            log.debug("no have stream with %s: %s", short(peer), error)
        finally:
            if stream is not None:
                await stream.reset()
            board.retry_at[peer] = trio.current_time() + _RETRY_S
            self._exit(board, peer)

    async def _converse(self, board: Board, peer: str, stream: MeshStream) -> None:
        """Tell and listen until neither side needs the other any more, or one of them goes."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, board, stream, nursery.cancel_scope)
            await self._tell(board, peer, stream)
            nursery.cancel_scope.cancel()

    async def _tell(self, board: Board, peer: str, stream: MeshStream) -> None:
        told = -1
        while not self._is_over(board, peer):
            if board.own_serial != told or True:
                told = board.own_serial
                try:
                    await send_answer(stream, HaveUpdate(bitmap=board.own_bitmap()).encode())
                except LinkLost:
                    return
            await trio.sleep(board.update_every_s)
            with trio.move_on_after(limits.HAVE_ALIVE_S):
                while board.own_serial == told and not self._is_over(board, peer):
                    await board.changed.wait()

    async def _listen(self, board: Board, stream: MeshStream, talk: trio.CancelScope) -> None:
        try:
            while True:
                with trio.fail_after(limits.HAVE_SILENCE_S):
                    message = await receive_answer(stream, limit=_FRAME_BYTES)
                board.hear(stream.peer, HaveUpdate.decode(message, limit=_FRAME_BYTES).bitmap)
                await trio.sleep(limits.HAVE_EVERY_S / 2)
        except (LinkLost, Refused, trio.TooSlowError) as error:
            log.debug("the have stream with %s ended: %s", short(stream.peer), error)
            talk.cancel()
