"""Requests and answers over streams: a table of routes on one side, one function on the other.

A request is one frame, an answer one frame: a zero byte and the body, or a one and a refusal (code, sentence). Every
route has a bound on both and a deadline; an error in a handler is logged with its traceback, answered with
``request.internal``, and ends nothing else. Invariant: a handler runs only for a peer that is within its rate and its
share, and only on a request that arrived whole; of a peer that may not ask at all nothing is read. What the bytes mean
is the handler's business. A refusal that its sender could have foreseen is passed on to the mesh, which counts them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from rollmesh_peer.mesh.fairness import Turns
from rollmesh_peer.mesh.rates import TokenBucket
from rollmesh_peer.mesh.seam import Mesh, MeshStream
from rollmesh_protocol import codec, limits
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.identity import short

log = logging.getLogger("rollmesh.mesh.requests")

_ANSWER: Final = b"\x00"
_REFUSAL: Final = b"\x01"
TIRESOME: Final = frozenset({"node.rate", "node.not_admitted", "node.quarantined"})
"""Codes of refusals that a peer which keeps to the rules gets now and then, and others in a flood."""
_MAX_REMEMBERED: Final = 4096
"""Peers whose rate is remembered before idle ones are forgotten."""

Handle = Callable[[str, bytes], Awaitable[bytes]]
"""(peer id, request) -> answer; raises Refused to say no."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """One kind of request."""

    protocol: str
    request_bytes: int
    answer_bytes: int
    handle: Handle
    deadline_s: float = limits.REQUEST_S
    """From the opened stream to the last byte of the answer."""
    admit: Callable[[str], object] | None = None
    """Raises Refused for a peer that may not ask; called before anything of the request is read."""


@dataclass(frozen=True, kw_only=True)
class StreamRoute:
    """A kind of stream that its handler keeps: it reads and writes frames as it likes until the deadline."""

    protocol: str
    handle: Callable[[MeshStream], Awaitable[None]]
    deadline_s: float
    """Of the whole stream."""


class Router:
    """Answers the requests of all peers on one mesh."""

    def __init__(
        self, *, places: int = limits.MAX_HANDLERS, places_per_peer: int = limits.MAX_HANDLERS_PER_PEER
    ) -> None:
        self._turns = Turns(places=places, per_peer=places_per_peer)
        self._guests: dict[str, _Guest] = {}

    def register(self, mesh: Mesh, *routes: Route | StreamRoute) -> None:
        """Serve ``routes`` on ``mesh``."""
        for route in routes:
            if isinstance(route, Route):
                mesh.serve(route.protocol, self._answering(route))
            else:
                mesh.serve(route.protocol, self._streaming(route))

    # --- request and answer ------------------------------------------------------------------------------------------
    def _answering(self, route: Route) -> Callable[[MeshStream], Awaitable[None]]:
        async def serve(stream: MeshStream) -> None:
            until = trio.current_time() + route.deadline_s
            try:
                with trio.move_on_at(until) as deadline, self._guest(stream.peer):
                    if route.admit is not None:
                        route.admit(stream.peer)
                    answer = await self._work(route, stream)
                if deadline.cancelled_caught:
                    raise Refused("request.timeout", f"not done within {route.deadline_s:g} s")
            except Refused as refusal:
                log.debug("refusing %s of %s: %s", route.protocol, short(stream.peer), refusal.code)
                await _refuse(stream, refusal)
                if refusal.code in TIRESOME:
                    raise
                return
            with trio.move_on_at(until) as deadline:
                await stream.send(closed_answer(answer))
            if deadline.cancelled_caught:
                await stream.reset()

        return serve

    async def _work(self, route: Route, stream: MeshStream) -> bytes:
        request = await stream.receive(route.request_bytes)
        try:
            async with self._turns.turn(stream.peer):
                answer = await route.handle(stream.peer, request)
        except Refused:
            raise
        except Exception as error:
            log.exception("%s of %s failed", route.protocol, short(stream.peer))
            raise Refused("request.internal") from error
        if len(answer) > route.answer_bytes:
            log.error("an answer to %s has %d bytes, more than its route allows", route.protocol, len(answer))
            raise Refused("request.internal")
        return answer

    # --- streams that are kept ---------------------------------------------------------------------------------------
    def _streaming(self, route: StreamRoute) -> Callable[[MeshStream], Awaitable[None]]:
        async def serve(stream: MeshStream) -> None:
            try:
                with trio.move_on_after(route.deadline_s) as deadline, self._guest(stream.peer):
                    await route.handle(stream)
                if deadline.cancelled_caught:
                    await stream.reset()
            except Refused as refusal:
                await _refuse(stream, refusal)
                if refusal.code in TIRESOME:
                    raise
            except LinkLost:
                raise
            except Exception:
                log.exception("%s of %s failed", route.protocol, short(stream.peer))
                await _refuse(stream, Refused("request.internal"))

        return serve

    def _guest(self, peer: str) -> _Guest:
        now = trio.current_time()
        if len(self._guests) > _MAX_REMEMBERED:
            self._guests = {name: guest for name, guest in self._guests.items() if not guest.is_idle(now)}
        guest = self._guests.get(peer)
        if guest is None:
            guest = self._guests[peer] = _Guest(now)
        return guest


class _Guest:
    """What one peer is doing here: entered once for each of its streams."""

    def __init__(self, now: float) -> None:
        self._pace = TokenBucket(rate=limits.MAX_REQUESTS_PER_S, burst=limits.REQUEST_BURST, now=now)
        self._num_streams = 0

    def __enter__(self) -> None:
        if self._num_streams >= limits.MAX_STREAMS_PER_PEER:
            raise Refused("request.busy")
        if not self._pace.take(trio.current_time()):
            raise Refused("node.rate")
        self._num_streams += 1

    def __exit__(self, *_error: object) -> None:
        self._num_streams -= 1

    def is_idle(self, now: float) -> bool:
        return self._num_streams == 0 and self._pace.is_full(now)


async def ask(mesh: Mesh, peer: str, protocol: str, request: bytes, *, answer_bytes: int, deadline_s: float) -> bytes:
    """Send ``request`` to a connected peer and return the body of its answer, of at most ``answer_bytes``.

    Raises:
        Refused: the peer said no; its code and sentence. ``version.unsupported`` when it does not know ``protocol``.
        LinkLost: no connection, a broken one, an answer that breaks the protocol, or none within ``deadline_s``.
    """
    with trio.move_on_after(deadline_s) as deadline:
        stream = await mesh.open_stream(peer, protocol)
        try:
            answer = await _exchange(stream, request, limit=max(answer_bytes, limits.REFUSAL_BYTES) + 1)
        finally:
            await stream.reset()
    if deadline.cancelled_caught:
        raise LinkLost(f"no answer to {protocol} within {deadline_s:g} s")
    return opened_answer(answer, answer_bytes=answer_bytes)


def opened_answer(frame: bytes, *, answer_bytes: int) -> bytes:
    """The body of an answer frame; also for streams that are kept.

    Raises:
        Refused: the frame is a refusal.
        LinkLost: it is neither, or larger than ``answer_bytes``.
    """
    kind, body = frame[:1], frame[1:]
    if kind == _ANSWER and len(body) <= answer_bytes:
        return body
    if kind == _REFUSAL:
        raise _opened_refusal(body)
    raise LinkLost("the answer breaks the protocol")


def closed_answer(body: bytes) -> bytes:
    """The frame of an answer; for handlers that keep their stream."""
    return _ANSWER + body


async def _exchange(stream: MeshStream, request: bytes, *, limit: int) -> bytes:
    """Read while writing: a refusal may come before the request is through."""
    outcome: bytes | LinkLost
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_send_whole, stream, request)
        try:
            outcome = await stream.receive(limit)
        except LinkLost as error:
            outcome = error
        except Refused as error:
            outcome = LinkLost(f"the answer breaks the protocol: {error}")
        nursery.cancel_scope.cancel()
    if isinstance(outcome, LinkLost):
        raise outcome
    return outcome


async def _send_whole(stream: MeshStream, request: bytes) -> None:
    try:
        await stream.send(request)
    except LinkLost as error:
        log.debug("the request did not get through: %s", error)
    else:
        await stream.close()


async def _refuse(stream: MeshStream, refusal: Refused) -> None:
    """Say no. The mesh then closes our side and lets the rest of the request arrive before it gives the stream up."""
    body = codec.pack({"code": refusal.code[:64], "detail": refusal.detail[: limits.MAX_TEXT_CHARS]})
    with trio.move_on_after(limits.LINGER_S):
        await stream.send(_REFUSAL + body)


def _opened_refusal(body: bytes) -> Refused | LinkLost:
    try:
        refusal = codec.unpack(body, limit=limits.REFUSAL_BYTES)
    except Refused:
        return LinkLost("the answer breaks the protocol")
    code, detail = refusal.get("code"), refusal.get("detail")
    if not isinstance(code, str) or not isinstance(detail, str) or not 0 < len(code) <= 64:
        return LinkLost("the answer breaks the protocol")
    return Refused(code, detail[: limits.MAX_TEXT_CHARS])
