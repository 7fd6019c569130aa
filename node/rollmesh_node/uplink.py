"""The node's conversation with its learner: one typed method for each request stream.

It keeps the newest head that any answer named. Every request has a deadline and raises ``LinkLost`` or ``Refused``;
whether to try again is the caller's decision. Requests are paced: a node whose engines end many leases a second keeps
below the rate from which on the learner takes it for a flood. Nothing is believed here beyond the form of an answer:
what is signed stays sealed for its reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import trio

from rollmesh_peer.mesh.keeping import LinkKeeper
from rollmesh_peer.mesh.requests import ask
from rollmesh_peer.mesh.seam import Mesh
from rollmesh_protocol import limits, streams
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.messages import (
    Head,
    Hello,
    LeaseAnswer,
    LeaseRequest,
    Receipt,
    ReturnAnswer,
    ReturnRequest,
    Welcome,
)
from rollmesh_protocol.record import Record

R = TypeVar("R", bound=Record)


class Uplink:
    """Requests to the learner behind ``link``."""

    def __init__(self, mesh: Mesh, link: LinkKeeper) -> None:
        self._mesh = mesh
        self._link = link
        self._listeners: list[Callable[[Head], None]] = []
        self._turn_at = -math.inf
        self.head: Head | None = None
        """The newest version that the learner has named; None before its first answer."""

    def listen(self, on_head: Callable[[Head], None]) -> None:
        """Call ``on_head`` with the newest head, now and whenever there is a newer one."""
        self._listeners.append(on_head)
        if self.head is not None:
            on_head(self.head)

    @property
    def learner(self) -> str:
        """The learner's peer id."""
        return self._link.peer

    @property
    def is_linked(self) -> bool:
        """True while the connection is up."""
        return self._link.is_linked

    @property
    def waiting_for(self) -> str:
        """What the link waits for; empty while it is up."""
        return self._link.waiting_for

    async def wait_linked(self) -> None:
        """Return when the connection is up."""
        await self._link.wait_linked()

    async def wait_lost(self) -> None:
        """Return when no connection is left."""
        await self._mesh.wait_link_lost(self.learner)

    async def hello(self, hello: Hello) -> Welcome:
        """Introduce ourselves."""
        answer = await self._ask(
            streams.HELLO, hello, answer=Welcome, answer_bytes=limits.CARD_BYTES, deadline_s=limits.TRANSFER_S
        )
        self._note(answer.head)
        return answer

    async def lease(self, request: LeaseRequest) -> LeaseAnswer:
        """Ask for work, or say that we are alive."""
        answer = await self._ask(
            streams.LEASE, request, answer=LeaseAnswer, answer_bytes=limits.LEASES_BYTES, deadline_s=limits.REQUEST_S
        )
        self._note(answer.head)
        return answer

    async def submit(self, sealed: bytes) -> Receipt:
        """Send a sealed result; the same bytes may be sent any number of times."""
        await self._turn()
        raw = await ask(
            self._mesh,
            self.learner,
            streams.SUBMIT,
            sealed,
            answer_bytes=limits.RECEIPT_BYTES,
            deadline_s=limits.TRANSFER_S,
        )
        receipt = _read(Receipt, raw, limit=limits.RECEIPT_BYTES)
        self._note(receipt.head)
        return receipt

    async def give_back(self, request: ReturnRequest) -> ReturnAnswer:
        """Return leases."""
        answer = await self._ask(
            streams.RETURN, request, answer=ReturnAnswer, answer_bytes=limits.SMALL_BYTES, deadline_s=limits.REQUEST_S
        )
        self._note(answer.head)
        return answer

    async def _ask(self, protocol: str, request: Record, *, answer: type[R], answer_bytes: int, deadline_s: float) -> R:
        await self._turn()
        raw = await ask(
            self._mesh, self.learner, protocol, request.encode(), answer_bytes=answer_bytes, deadline_s=deadline_s
        )
        return _read(answer, raw, limit=answer_bytes)

    async def _turn(self) -> None:
        """Return when one more request keeps to our own rate."""
        unused_s = limits.OWN_REQUEST_BURST / limits.OWN_REQUESTS_PER_S
        self._turn_at = max(self._turn_at, trio.current_time() - unused_s) + 1 / limits.OWN_REQUESTS_PER_S
        await trio.sleep_until(self._turn_at)

    def _note(self, head: Head) -> None:
        if self.head is None or head.version > self.head.version:
            self.head = head
            for on_head in self._listeners:
                on_head(head)


def _read(answer: type[R], raw: bytes, *, limit: int) -> R:
    """An answer that is not well formed is the learner's fault: worth another try, never a refusal of ours."""
    try:
        return answer.decode(raw, limit=limit)
    except Refused as error:
        raise LinkLost(f"the learner's answer makes no sense: {error.detail}") from error
