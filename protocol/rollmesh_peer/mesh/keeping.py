"""Keeps one link up: dials a peer where it may be, notices the loss, dials again, and says what it waits for.

The schedule is pure (:class:`Backoff`); the loop around it (:class:`LinkKeeper`) needs no one to act: a learner that
was down for a week is linked again within one back-off of its return.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from rollmesh_peer.mesh.address import parse_peer_address
from rollmesh_peer.mesh.peer_cache import PeerCache
from rollmesh_peer.mesh.seam import Mesh
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, UsageError
from rollmesh_protocol.identity import short

log = logging.getLogger("rollmesh.mesh.keeping")


@dataclass(frozen=True)
class Backoff:
    """How long to wait before the next try. ``failures`` are rounds in a row without a steady link."""

    failures: int = 0

    def failed(self) -> Backoff:
        """After one more failure."""
        return Backoff(self.failures + 1)

    def delay_s(self, *, chance: float) -> float:
        """Between half and all of ``BACKOFF_FIRST_S`` doubled with each failure, at most ``BACKOFF_MOST_S``.

        ``chance`` in [0, 1) spreads many nodes that lost the same learner.
        """
        doublings = min(max(self.failures - 1, 0), 30)
        most = min(limits.BACKOFF_FIRST_S * 2.0**doublings, limits.BACKOFF_MOST_S)
        return most * (0.5 + 0.5 * chance)


class LinkKeeper:
    """Keeps a link to one peer. Start :meth:`run` in a nursery."""

    def __init__(
        self,
        mesh: Mesh,
        addresses: Sequence[str],
        *,
        name: str = "the learner",
        cache: PeerCache | None = None,
        chance: random.Random | None = None,
    ) -> None:
        """``addresses`` are full multiaddrs of the same peer; ``name`` is what people call it."""
        targets = [parse_peer_address(address) for address in addresses]
        if not targets or len({target.peer for target in targets}) != 1:
            raise UsageError("the addresses to keep a link to must name one peer")
        self.peer = targets[0].peer
        self._mesh = mesh
        self._name = name
        self._cache = cache
        self._chance = chance or random.Random()
        self._addresses = [str(target) for target in targets]
        self._linked = trio.Event()
        self._trouble = f"connecting to {name}"
        self._next_try: float | None = None

    @property
    def is_linked(self) -> bool:
        """True while a connection is up."""
        return self._linked.is_set()

    @property
    def waiting_for(self) -> str:
        """What is missing, as a sentence for people; empty while the link is up."""
        if self.is_linked:
            return ""
        if self._next_try is None:
            return self._trouble
        seconds = max(0.0, self._next_try - trio.current_time())
        return f"{self._trouble}; next try in {seconds:.0f} s"

    async def wait_linked(self) -> None:
        """Return when a connection is up."""
        while not self._linked.is_set():
            await self._linked.wait()

    async def run(self) -> None:
        """Keep the link until cancelled."""
        backoff = Backoff()
        while True:
            address = await self._dial_round()
            if address is not None:
                since = trio.current_time()
                await self._stay(address)
                is_steady = trio.current_time() - since >= limits.STEADY_S
                backoff = Backoff() if is_steady else backoff
            backoff = backoff.failed()
            delay_s = backoff.delay_s(chance=self._chance.random())
            self._next_try = trio.current_time() + delay_s
            await trio.sleep(delay_s)
            self._next_try = None

    async def _dial_round(self) -> str | None:
        """Try every address once; the one that answered, or None."""
        remembered = self._cache.addresses_of(self.peer) if self._cache else ()
        for address in dict.fromkeys([*self._addresses, *remembered]):
            try:
                await self._mesh.connect(address)
            except LinkLost as error:
                log.debug("%s: %s", address, error)
                endpoint = parse_peer_address(address).endpoint
                self._trouble = f"{self._name} at {endpoint} does not answer"
            else:
                return address
        return None

    async def _stay(self, address: str) -> None:
        log.info("linked to %s %s", self._name, short(self.peer))
        if address in self._addresses:
            self._addresses.remove(address)
            self._addresses.insert(0, address)
        if self._cache:
            self._cache.remember(address)
        self._linked.set()
        try:
            await self._mesh.wait_link_lost(self.peer)
        finally:
            self._linked = trio.Event()
            self._trouble = f"the connection to {self._name} was lost"
        log.info("lost the link to %s %s", self._name, short(self.peer))


async def dial_remembered(mesh: Mesh, cache: PeerCache, *, at_most: int) -> int:
    """Dial peers of the last run once, newest first and all at one time; returns how many answered."""
    answered = 0

    async def dial(peer: str) -> None:
        nonlocal answered
        for address in cache.addresses_of(peer):
            try:
                await mesh.connect(address)
            except LinkLost as error:
                log.debug("%s: %s", address, error)
            else:
                answered += 1
                return

    async with trio.open_nursery() as nursery:
        for peer in [peer for peer in cache.peers() if peer != mesh.peer_id][:at_most]:
            nursery.start_soon(dial, peer)
    return answered
