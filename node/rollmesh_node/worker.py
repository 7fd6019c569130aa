"""Does what ``decisions`` decides: asks for leases, drives the engine, gives back, and reports what came of it.

The invariant: the state changes only in :meth:`Worker.feed`, which is synchronous, so decisions see events one at a
time; every task here ends in an event. Nothing is decided here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

import trio

from rollmesh_node import decisions, in_hand
from rollmesh_node.capacity import Capacity
from rollmesh_node.events import (
    Abandon,
    Accepted,
    Action,
    Add,
    Answered,
    Ask,
    Event,
    Finish,
    Generate,
    GiveBack,
    Held,
    Hold,
    Load,
    NotAnswered,
    Paused,
    StopAsked,
    Stopped,
    Ticked,
    Verified,
)
from rollmesh_node.in_hand import State
from rollmesh_node.joining import Membership
from rollmesh_node.own_limits import OwnLimits, open_lease
from rollmesh_node.returning import RETRY_S, Returner
from rollmesh_node.uplink import Uplink
from rollmesh_peer.logging_setup import event
from rollmesh_peer.weights.keeper import Keeper
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import LeaseAnswer, LeaseRequest, Notice, Standing

REFUSED_S: Final = 5.0
"""After a request that the learner refused."""
QUARANTINE_S: Final = 60.0
"""Between two requests of a node that is out of the run: the operator may take it back."""
HOLD_CHECK_S: Final = 60.0
"""A pause is over when the learner gives work again: its word to go on may have been lost, so it is asked."""
_log = logging.getLogger(__name__)


class Engine(Protocol):
    """What a worker needs of a :class:`~rollmesh_node.generator.Generator`."""

    async def load(self) -> None:
        """Give the newest verified weights to the engine."""

    async def generate(self) -> None:
        """Generate what the engine holds and what is added, until it rests."""

    def add(self, leases: Sequence[Lease]) -> None:
        """Put leases into the engine."""

    def finish(self) -> None:
        """Let the engine rest when all it has is made."""

    def hold(self) -> None:
        """Let the engine rest now, and hold what is not made."""

    def abandon(self) -> None:
        """Forget what is in the engine."""


class Worker:
    """One node's work. Run :meth:`run` in a nursery, with the engine that reports to :meth:`feed`."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        node: str,
        own: OwnLimits,
        uplink: Uplink,
        membership: Membership,
        keeper: Keeper,
        on_ended: Callable[[str], None],
        is_elsewhere: Callable[[bytes], bool] = lambda _lease_id: False,
    ) -> None:
        """``is_elsewhere`` tells whether another worker of this node has a lease in hand."""
        self._node = node
        self._own = own
        self._uplink = uplink
        self._membership = membership
        self._keeper = keeper
        self._on_ended = on_ended
        self._is_elsewhere = is_elsewhere
        self._state = State(capacity=capacity)
        self._nursery: trio.Nursery | None = None
        self._engine: Engine | None = None
        self._stirred = trio.Event()
        self._stopped = trio.Event()
        self._returner = Returner(uplink, membership)
        self._quarantine = ""
        self.standing: Standing | None = None
        """As of the learner's last answer to a request for work."""
        self.standing_at = 0.0
        """When that came."""

    # --- what others see ---------------------------------------------------------------------------------------------
    @property
    def leases_open(self) -> int:
        """Leases in hand."""
        return self._state.leases_open

    def has(self, lease_id: bytes) -> bool:
        """True while that lease is in hand."""
        state = self._state
        return any(taken.lease.lease_id == lease_id for taken in (*state.queue, *state.running, *state.finishing))

    @property
    def tokens_per_s(self) -> float:
        """Of the engine while it has work, over the last seconds."""
        return self._state.pace.tokens_per_s

    @property
    def waiting_for(self) -> str:
        """What keeps the engine from generating; empty while it does."""
        trouble = "" if self._state.is_generating else self._membership.waiting_for
        return (trouble or in_hand.waiting_for(self._state, trio.current_time()))[: limits.MAX_TEXT_CHARS]

    # --- driving -----------------------------------------------------------------------------------------------------
    async def run(self, engine: Engine) -> None:
        """Work until stopped by :meth:`stop`, or cancelled."""
        self._engine = engine
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._tick)
            self._nursery.start_soon(self._watch_weights)
            await self._stopped.wait()
            await self._returner.wait_done()
            self._nursery.cancel_scope.cancel()

    def stop(self, *, grace_s: float) -> None:
        """Finish what ends within ``grace_s``, give the rest back; :meth:`run` then returns."""
        self.feed(StopAsked(grace_s=grace_s))

    def notice(self, notice: Notice) -> None:
        """Obey a notice of the learner."""
        text = f": {notice.text}" if notice.text else ""
        match notice.kind:
            case "pause":
                self._hold(f"the learner to go on after its pause{text}", drain=False)
            case "drain":
                self._hold(f"nothing more: the run is about to end{text}", drain=True)
            case "resume":
                self.feed(Held(why=self._quarantine))
            case "ended":
                self._on_ended(notice.text)

    def pause(self, why: str) -> None:
        """Give everything back and take nothing, as the owner wants the engine's memory; or (empty) go on."""
        if self._nursery is None:
            self._state = replace(self._state, paused_why=why)
        else:
            self.feed(Paused(why=why))

    def receipt_came(self) -> None:
        """A result was answered for."""
        self.feed(Accepted())

    def feed(self, happened: Event) -> None:
        """Take in what has happened, and begin what follows from it."""
        self._state, actions = decisions.advance(self._state, happened, trio.current_time())
        for action in actions:
            self._begin(action)
        self._stirred.set()

    def _begin(self, action: Action) -> None:
        assert self._engine is not None
        match action:
            case Ask(groups=groups):
                self._spawn(self._ask, groups)
            case Load():
                self._spawn(self._engine.load)
            case Generate():
                self._spawn(self._engine.generate)
            case Add(leases=leases):
                _log.debug("%d groups more in the engine", len(leases))
                self._engine.add(leases)
            case Finish():
                self._engine.finish()
            case Hold():
                self._engine.hold()
            case Abandon():
                self._engine.abandon()
            case GiveBack(lease_ids=lease_ids, code=code):
                assert self._nursery is not None
                self._returner.begin(self._nursery, lease_ids, code=code)
            case Stopped():
                self._stopped.set()

    def _spawn(self, task: Callable[..., Awaitable[None]], *arguments: object) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(task, *arguments)

    async def _tick(self) -> None:
        """Call :meth:`feed` when time alone changes something."""
        while True:
            self._stirred = trio.Event()
            with trio.move_on_at(decisions.next_tick(self._state)):
                await self._stirred.wait()
                continue
            self.feed(Ticked())
            await trio.lowlevel.checkpoint()

    async def _watch_weights(self) -> None:
        root: bytes | None = None
        while True:
            view = await self._keeper.wait_changed(root)
            root = view.root
            await self._keeper.measure()  # before the engine stops for them
            self.feed(Verified(root=view.root, version=view.version))

    # --- the learner -------------------------------------------------------------------------------------------------
    async def _ask(self, groups: int) -> None:
        await self._membership.wait_admitted()
        request = LeaseRequest(
            groups=groups,
            version_held=self._keeper.version,
            root_held=self._keeper.root,
            tokens_per_s=min(self.tokens_per_s, 1e9),
            waiting_for=self.waiting_for,
        )
        try:
            answer = await self._uplink.lease(request)
        except LinkLost as error:
            self.feed(NotAnswered(why=f"an answer of the learner ({error.detail})", retry_s=RETRY_S))
        except Refused as refusal:
            self._told_no(refusal)
        else:
            self.feed(self._opened(answer))

    def _opened(self, answer: LeaseAnswer) -> Answered:
        """The leases of an answer that are the learner's word, ours, and within the limits."""
        self.standing, self.standing_at = answer.standing, trio.current_time()
        self._mind_standing(answer.standing)
        leases: list[Lease] = []
        refused: Counter[str] = Counter()
        last = ""
        for sealed in answer.leases:
            try:
                lease = open_lease(sealed, card=self._membership.card, node=self._node, own=self._own)
                if self._is_elsewhere(lease.lease_id):
                    raise Refused("lease.reused", "another engine of this node has that lease")
                leases.append(lease)
            except Refused as refusal:
                refused[refusal.code] += 1
                last = refusal.detail
        for code, count in refused.items():
            event(_log, "leases that this node does not obey", level=logging.WARNING, code=code, leases=count, why=last)
        wait = answer.wait
        return Answered(
            leases=tuple(leases),
            wait_s=wait.seconds if wait is not None else None,
            why=wait.why if wait is not None else "",
            unusable=sum(refused.values()),
        )

    def _told_no(self, refusal: Refused) -> None:
        why = f"{refusal.detail} ({refusal.code})"
        match refusal.code:
            case "run.ended":
                self._on_ended(refusal.detail)
                retry_s = REFUSED_S
            case "node.not_admitted":
                self._membership.renew()
                retry_s = RETRY_S
            case "node.quarantined":
                self._quarantined(refusal.detail)
                retry_s = QUARANTINE_S
            case _:
                event(_log, "the learner refused a request", level=logging.WARNING, code=refusal.code, why=why)
                retry_s = REFUSED_S
        self.feed(NotAnswered(why=why, retry_s=retry_s))

    def _mind_standing(self, standing: Standing) -> None:
        if standing.state == "quarantined":
            self._quarantined(standing.reason)
        elif self._quarantine:
            self._quarantine = ""
            event(_log, "this node is in the run again")
            self.feed(Held(why=""))

    def _quarantined(self, reason: str) -> None:
        if not self._quarantine:
            self._quarantine = f"the operator: this node is out of the run ({reason or 'no reason given'})"
            event(_log, "this node is quarantined and generates nothing", level=logging.ERROR, why=reason)
            self.feed(Held(why=self._quarantine))

    def _hold(self, why: str, *, drain: bool) -> None:
        event(_log, "work is held", why=why)
        self.feed(Held(why=why, drain=drain))
        self._spawn(self._ask_again_after_a_hold)

    async def _ask_again_after_a_hold(self) -> None:
        await trio.sleep(HOLD_CHECK_S)
        self.feed(Held(why=self._quarantine))
