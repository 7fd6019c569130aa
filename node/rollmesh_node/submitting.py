"""Sends finished results until each has its receipt, over lost links, restarts of either side and refusals to wait.

The invariant: a result leaves the spool only after the learner has answered for it, with a receipt or with a refusal
that sending again cannot change; and what is sent is always the same bytes. What the answers come to is kept for the
status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from rollmesh_node.joining import Membership
from rollmesh_node.journal import Journal
from rollmesh_node.spool import Spool
from rollmesh_node.uplink import Uplink
from rollmesh_peer.faults import fault_point
from rollmesh_peer.logging_setup import event
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.errors import CODES, HostError, LinkLost, Refused
from rollmesh_protocol.messages import Receipt, Standing
from rollmesh_protocol.rollout import Result

AT_ONCE: Final = 4
"""Results on their way at a time: a link of 100 ms then carries 40 receipts a second."""
RETRY_S: Final = 2.0
"""Between two rounds while something could not be sent."""
TELL_S: Final = 10.0
"""Accepted work is told at most this often."""
AGAIN: Final = frozenset({"request.timeout", "request.busy", "request.internal", "node.rate", "node.not_admitted"})
"""Refusals after which the same bytes are sent again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What became of the results sent since the start."""

    accepted: int = 0
    rejected: int = 0
    last_accepted_at: float | None = None
    """On trio's clock."""
    last_refusal: str = ""
    standing: Standing | None = None


@dataclass(kw_only=True)
class Submitter:
    """Run :meth:`run` in a nursery; :meth:`notify` it of every new result. ``on_receipt`` is called for each answer."""

    uplink: Uplink
    membership: Membership
    spool: Spool
    on_receipt: Callable[[], None]
    journal: Journal | None = None
    tally: Tally = field(default_factory=Tally)
    _news: trio.Event = field(default_factory=trio.Event)
    _empty: trio.Event = field(default_factory=trio.Event)
    _unsent: set[bytes] = field(default_factory=set)
    _untold: int = 0
    _tell_at: float = 0.0

    @property
    def unsent(self) -> int:
        """Results that wait for a receipt."""
        return len(self._unsent)

    def notify(self, lease_id: bytes) -> None:
        """There is a new result in the spool."""
        self._unsent.add(lease_id)
        if self._empty.is_set():
            self._empty = trio.Event()
        self._news.set()

    async def wait_empty(self) -> None:
        """Return when nothing in the spool waits for a receipt."""
        while self._unsent:
            await self._empty.wait()

    async def run(self) -> None:
        """Send what is there and what comes, until cancelled."""
        while True:
            self._news = trio.Event()
            waiting = await trio.to_thread.run_sync(self.spool.pending)
            self._unsent = self._unsent.union(waiting) if self._news.is_set() else set(waiting)
            if not waiting:
                if not self._unsent:
                    self._empty.set()
                await self._news.wait()
                continue
            await self.membership.wait_admitted()
            if not await self._send_all(waiting):
                with trio.move_on_after(RETRY_S):
                    await self._news.wait()

    async def _send_all(self, lease_ids: tuple[bytes, ...]) -> bool:
        """Send each once; True when every one was answered for good."""
        slots = trio.CapacityLimiter(AT_ONCE)
        outcomes: list[bool] = []

        async def send(lease_id: bytes) -> None:
            async with slots:
                outcomes.append(await self._send(lease_id))

        async with trio.open_nursery() as nursery:
            for lease_id in lease_ids:
                nursery.start_soon(send, lease_id)
        return all(outcomes)

    async def _send(self, lease_id: bytes) -> bool:
        try:
            sealed = await trio.to_thread.run_sync(self.spool.get, lease_id)
        except HostError as error:
            event(_log, "an unsent result cannot be read", level=logging.ERROR, why=error.detail)
            return False
        if sealed is None:
            return True
        try:
            receipt = await self.uplink.submit(sealed)
            if receipt.lease_id != lease_id:
                raise LinkLost("the receipt is for another lease")
        except LinkLost as error:
            _log.debug("a result did not get through: %s", error)
            return False
        except Refused as refusal:
            if refusal.code == "node.not_admitted":
                self.membership.renew()
            if refusal.code in AGAIN:
                return False
            self._count_refusal(refusal.code, refusal.detail, rollouts=_num_rollouts(sealed))
            self._note(lease_id, code=refusal.code, detail=refusal.detail)
        else:
            self._note(lease_id, accepted=len(receipt.accepted), code=receipt.code, detail=receipt.detail)
            self._count(receipt, rollouts=_num_rollouts(sealed))
        fault_point("node.receipt_came")
        await trio.to_thread.run_sync(self.spool.drop, lease_id)
        self._unsent.discard(lease_id)
        if not self._unsent:
            self._empty.set()
        self.on_receipt()
        return True

    def _note(self, lease_id: bytes, *, accepted: int = 0, code: str | None, detail: str) -> None:
        if self.journal is not None:
            self.journal.answered(lease_id, accepted=accepted, code=code, detail=detail)

    def _count(self, receipt: Receipt, *, rollouts: int) -> None:
        self.tally = replace(self.tally, standing=receipt.standing)
        if receipt.accepted:
            self.tally = replace(
                self.tally,
                accepted=self.tally.accepted + len(receipt.accepted),
                last_accepted_at=trio.current_time(),
            )
            self._tell(receipt.standing, rollouts=len(receipt.accepted))
        if receipt.code is not None:
            self._count_refusal(receipt.code, receipt.detail, rollouts=max(0, rollouts - len(receipt.accepted)))

    def _tell(self, standing: Standing, *, rollouts: int) -> None:
        """Say what was accepted, in one line for all of it since the last line."""
        self._untold += rollouts
        now = trio.current_time()
        if now >= self._tell_at:
            event(_log, "accepted", rollouts=self._untold, total=self.tally.accepted, standing=standing.state)
            self._untold, self._tell_at = 0, now + TELL_S

    def _count_refusal(self, code: str, detail: str, *, rollouts: int) -> None:
        known = CODES.get(code)
        sentence = detail or (known.meaning if known else code)
        advice = known.advice if known else ""
        self.tally = replace(
            self.tally,
            rejected=self.tally.rejected + rollouts,
            last_refusal=f"{code}: {sentence}{f' ({advice})' if advice else ''}"[: limits.MAX_TEXT_CHARS],
        )
        event(_log, "refused", level=logging.WARNING, code=code, rollouts=rollouts, why=sentence, advice=advice)


def _num_rollouts(sealed: bytes) -> int:
    """How many rollouts a result of our own holds."""
    envelope = Envelope.decode(sealed, limit=limits.RESULT_BYTES)
    return len(Result.decode(envelope.body, limit=limits.RESULT_BYTES).samples)
