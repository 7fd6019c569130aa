"""How a node joins a run and stays a member: hello, the run card, and the pass that other peers ask for.

The invariants: the card is the word of the very learner that the join line names; it has passed this node's own limits
before anything is downloaded; and it never changes while the node takes part, over restarts neither, but for how the
run judges sampling: a learner that was calibrated anew says so. A learner that restarts has forgotten us, so hello is
said again after every new connection, whenever the learner says that it does not know us, and before the pass grows
old.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import trio

from rollmesh_node.uplink import Uplink
from rollmesh_peer.logging_setup import event
from rollmesh_peer.mesh.keeping import Backoff
from rollmesh_peer.weights.durable import write_file
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.errors import HostError, LinkLost, Refused
from rollmesh_protocol.messages import Hello, Pass, RunCard, Welcome

FINAL: Final = frozenset(
    {"version.unsupported", "node.allowlist", "node.invite", "node.quarantined", "run.ended", "request.unknown"}
)
"""Refusals of a hello that asking again does not change."""
PASS_SHARE: Final = 0.5
"""A pass is renewed after this share of the versions for which it is good."""
NO_CHANCE: Final = 0.5
"""Of the back-off between hellos: one node asks one learner, so nothing has to be spread."""

_log = logging.getLogger(__name__)


class Membership:
    """One node's membership of one run. :meth:`join` first, then :meth:`keep` in a nursery.

    ``check`` is asked of the first card, before anything else; ``pin`` writes it down, and each that replaces it. Both
    raise for a card that is not to be.
    """

    def __init__(
        self,
        uplink: Uplink,
        *,
        node: str,
        hello: Callable[[], Hello],
        check: Callable[[RunCard], None],
        pin: Callable[[RunCard], None],
    ) -> None:
        self._uplink = uplink
        self._node = node
        self._hello = hello
        self._check = check
        self._pin = pin
        self._card: RunCard | None = None
        self._admission = b""
        self._issued_version = 0
        self._admitted = trio.Event()
        self._lapsed = trio.Event()
        self._trouble = "admission to the run"

    # --- what others see ---------------------------------------------------------------------------------------------
    @property
    def card(self) -> RunCard:
        """The run card; only after :meth:`join`."""
        assert self._card is not None
        return self._card

    @property
    def admission(self) -> bytes:
        """The sealed pass that other peers ask for, as it is now."""
        return self._admission

    @property
    def is_admitted(self) -> bool:
        """True while the learner knows us, as far as we know."""
        return self._admitted.is_set()

    @property
    def waiting_for(self) -> str:
        """What is missing, as a sentence; empty for a member with a link."""
        return self._uplink.waiting_for or ("" if self.is_admitted else self._trouble)

    async def wait_admitted(self) -> None:
        """Return when the learner has admitted us over the present link."""
        while not (self.is_admitted and self._uplink.is_linked):
            await self._uplink.wait_linked()
            await self._admitted.wait()

    def renew(self) -> None:
        """The learner does not know us any more: say hello again."""
        self._admitted = trio.Event()
        self._lapsed.set()

    # --- joining -----------------------------------------------------------------------------------------------------
    async def join(self) -> RunCard:
        """Say hello until the learner answers with a card that is good, and with a pass.

        Raises:
            Refused: the learner says no for good, or the card is not the learner's or asks too much.
        """
        await self._until_welcome()
        return self.card

    async def keep(self) -> None:
        """Stay a member until cancelled.

        Raises:
            Refused: the learner says no for good, or shows another card than before.
        """
        while True:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_link, nursery.cancel_scope)
                nursery.start_soon(self._watch_pass, nursery.cancel_scope)
                await self._lapsed.wait()
                nursery.cancel_scope.cancel()
            self._lapsed = trio.Event()
            await self._until_welcome()

    async def _watch_link(self, scope: trio.CancelScope) -> None:
        """End the wait when the link has gone: whoever answers on the next one may have forgotten us."""
        await self._uplink.wait_lost()
        self._admitted = trio.Event()
        scope.cancel()

    async def _watch_pass(self, scope: trio.CancelScope) -> None:
        """End the wait when the pass grows old."""
        while True:
            head = self._uplink.head
            if head is not None and head.version - self._issued_version > PASS_SHARE * limits.PASS_VERSIONS:
                scope.cancel()
            await trio.sleep(limits.DEAD_AFTER_S)

    async def _until_welcome(self) -> None:
        backoff = Backoff()
        while True:
            await self._uplink.wait_linked()
            try:
                welcome = await self._uplink.hello(self._hello())
            except Refused as refusal:
                if refusal.code in FINAL:
                    raise
                self._trouble = f"admission: {refusal.detail}"
                event(_log, "the learner does not admit us yet", code=refusal.code, why=refusal.detail)
                backoff = backoff.failed()
            except LinkLost as error:
                self._trouble = f"an answer to hello: {error.detail}"
                backoff = backoff.failed()
            else:
                self._enter(welcome)
                return
            await trio.sleep(max(limits.BACKOFF_FIRST_S, backoff.delay_s(chance=NO_CHANCE)))

    def _enter(self, welcome: Welcome) -> None:
        """Verify what the learner's welcome holds; then we are in."""
        card = open_card(welcome.card, learner=self._uplink.learner)
        if self._card is None:
            self._check(card)
        elif not card.is_same_run(self._card):
            raise Refused("card.model", _changed(self._card, card))
        envelope = Envelope.decode(welcome.admission, limit=limits.SMALL_BYTES)
        issued = Pass.decode(
            envelope.open(run=card.run, kind="pass", signer=self._uplink.learner), limit=limits.SMALL_BYTES
        )
        if issued.peer != self._node:
            raise Refused("envelope.key", "the pass that the learner gave is for another peer")
        if card != self._card:
            self._pin(card)
        self._card = card
        self._admission = welcome.admission
        self._issued_version = issued.issued_version
        self._admitted.set()


def open_card(sealed: bytes, *, learner: str) -> RunCard:
    """The run card in an encoded envelope, once it is known to be the learner's own word about its own run.

    Raises:
        Refused: an ``envelope.*`` code, or ``request.invalid``.
    """
    envelope = Envelope.decode(sealed, limit=limits.CARD_BYTES)
    body = envelope.open(run=envelope.run, kind="card", signer=learner)
    card = RunCard.decode(body, limit=limits.CARD_BYTES)
    if card.run != envelope.run:
        raise Refused("envelope.run", "the run card is signed for another run")
    if card.learner != learner:
        raise Refused("envelope.key", "the run card names another learner than the join line")
    return card


def pin_card(card: RunCard, file: Path) -> None:
    """Write the card down the first time, and compare with it ever after. One that only judges otherwise replaces it.

    Raises:
        Refused: ``card.model`` when the run had another card before.
        HostError: it cannot be written the first time, or not be read.
    """
    known = read_card(file)
    if known is None:
        write_file(file, card.encode())
    elif not known.is_same_run(card):
        raise Refused(
            "card.model",
            f"the learner shows another card for the run {card.run!r} than the last time, which an honest one never "
            f"does; to join anyway, delete {file.parent}",
        )
    elif known != card:
        _replace_card(card, file)


def _replace_card(card: RunCard, file: Path) -> None:
    """Only a selfcheck reads what is new in it: a full disk must not end a node that works."""
    try:
        write_file(file, card.encode())
    except HostError as error:
        event(_log, "the run judges otherwise than before, which could not be kept", why=error.detail)


def read_card(file: Path) -> RunCard | None:
    """The card that :func:`pin_card` wrote down, None before that; ``HostError`` for a file that cannot be read."""
    try:
        return RunCard.decode(file.read_bytes(), limit=limits.CARD_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostError(f"the run card {file} cannot be read: {error.strerror}") from error
    except Refused as refusal:
        raise HostError(f"the run card {file} is damaged; the learner gives it anew once it is deleted") from refusal


def _changed(before: RunCard, after: RunCard) -> str:
    if before.run != after.run:
        return f"the learner has begun another run ({after.run!r} instead of {before.run!r}): start the node again"
    return "the learner changed the card of a run that goes on, which an honest one never does"
