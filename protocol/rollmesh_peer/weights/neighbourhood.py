"""The few peers that a node exchanges chunks with: found through the learner and the cache, dialled, and replaced.

Invariant: at most ``limits.MAX_NEIGHBOURS``, never the learner, never a shunned peer; in ``learner_only`` mode none at
all. It works on while the learner is away. What is exchanged with them is not decided here.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random

import trio

from rollmesh_peer.mesh.address import parse_peer_address
from rollmesh_peer.mesh.peer_cache import PeerCache
from rollmesh_peer.mesh.requests import ask
from rollmesh_peer.mesh.seam import Mesh
from rollmesh_peer.weights.conduct import ConductBook
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused, UsageError
from rollmesh_protocol.identity import short
from rollmesh_protocol.messages import Head, PeersAnswer, PeersRequest
from rollmesh_protocol.streams import PEERS

log = logging.getLogger("rollmesh.swarm")

_TEND_S = 2.0
"""How often the neighbourhood is looked over; a lost neighbour is noticed then, too."""
_ASK_EVERY_S = 10.0
"""How often the learner is asked for peers while there are too few."""
_ASK_AGAIN_S = 300.0
"""The same while there are enough: newer peers, for when some are lost."""
_MAX_CANDIDATES = 128
_IDLE_FETCHES = 8
"""A neighbour that gave nothing and took nothing in so many fetches makes room for another."""


class Neighbourhood:
    """Keeps about ``wanted`` neighbours. ``await run()`` beside the rest of the node.

    Args:
        learner: its peer id; never a neighbour.
        conduct: peers to keep away from.
        cache: peers of earlier runs of this process, dialled before the learner introduces any.
        on_head: called with the head that comes with the learner's introductions.
        learner_only: dial nobody, and have no neighbours.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        learner: str,
        conduct: ConductBook,
        random: Random,
        cache: PeerCache | None = None,
        on_head: Callable[[Head], None] | None = None,
        learner_only: bool = False,
        wanted: int = limits.NEIGHBOURS_WANTED,
    ) -> None:
        self._mesh = mesh
        self._learner = learner
        self._conduct = conduct
        self._random = random
        self._cache = cache
        self._on_head = on_head
        self._learner_only = learner_only
        self._wanted = min(wanted, limits.MAX_NEIGHBOURS)
        self._candidates: dict[str, tuple[str, ...]] = {}
        self._failures: Counter[str] = Counter()
        self._retry_at: dict[str, float] = {}
        self._ask_at = -math.inf
        self._idle: Counter[str] = Counter()
        self._members: dict[str, None] = {}

    def peers(self) -> tuple[str, ...]:
        """The neighbours that are connected now, those that have been for longest first."""
        if self._learner_only:
            return ()
        now = trio.current_time()
        linked = [peer for peer in self._mesh.links() if peer != self._learner]
        good = [peer for peer in linked if not self._conduct.is_shunned(peer, now=now)]
        self._members = {peer: None for peer in self._members if peer in good} | dict.fromkeys(good)
        return tuple(self._members)[: limits.MAX_NEIGHBOURS]

    def fetch_ended(self, useful: Iterable[str]) -> None:
        """A fetch is over; ``useful`` are the peers that gave or took chunks of it."""
        neighbours = self.peers()
        self._idle.update(neighbours)
        for peer in useful:
            self._idle.pop(peer, None)
        self._idle = Counter({peer: count for peer, count in self._idle.items() if peer in neighbours})

    async def run(self) -> None:
        """Tend the neighbourhood for ever."""
        if self._learner_only:
            await trio.sleep_forever()
        for peer in self._cache.peers() if self._cache else ():
            for address in self._cache.addresses_of(peer) if self._cache else ():
                self._learn_of(address)
        while True:
            await self._tend()
            await trio.sleep(_TEND_S)

    async def _tend(self) -> None:
        now = trio.current_time()
        for peer in self._mesh.links():
            if peer != self._learner and self._conduct.is_shunned(peer, now=now):
                log.info("disconnecting %s, which sent a wrong chunk", short(peer))
                await self._mesh.disconnect(peer)
        short_by = self._wanted - len(self.peers())
        if now >= self._ask_at and self._learner in self._mesh.links():
            self._ask_at = now + (_ASK_EVERY_S if short_by > 0 else _ASK_AGAIN_S)
            await self._ask_learner()
        able = self._able(now)
        if short_by <= 0 and able:
            await self._drop_idle()
        if short_by > 0 and able:
            async with trio.open_nursery() as nursery:
                for peer in able[:short_by]:
                    nursery.start_soon(self._dial, peer)

    async def _ask_learner(self) -> None:
        request = PeersRequest(count=limits.MAX_NEIGHBOURS).encode()
        try:
            answer = await ask(
                self._mesh, self._learner, PEERS, request,
                answer_bytes=limits.PEERS_BYTES, deadline_s=limits.REQUEST_S,
            )  # fmt: skip
            introduced = PeersAnswer.decode(answer, limit=limits.PEERS_BYTES)
        except (LinkLost, Refused) as error:
            log.debug("the learner named no peers: %s", error)
            return
        if self._on_head:
            self._on_head(introduced.head)
        for neighbour in introduced.peers:
            for address in neighbour.addresses:
                self._learn_of(address, peer=neighbour.peer)

    def _learn_of(self, address: str, *, peer: str | None = None) -> None:
        try:
            named = parse_peer_address(address).peer
        except UsageError:
            return
        if named in (self._learner, self._mesh.peer_id) or peer not in (None, named):
            return
        known = self._candidates.pop(named, ())
        if address not in known:
            known = (address, *known)[:4]
        self._candidates[named] = known
        while len(self._candidates) > _MAX_CANDIDATES:
            self._forget(next(iter(self._candidates)))

    def _able(self, now: float) -> list[str]:
        """Candidates that may be dialled now, in random order."""
        linked = self._mesh.links()
        able = [
            peer
            for peer in self._candidates
            if peer not in linked and now >= self._retry_at.get(peer, now) and self._conduct.is_free(peer, now=now)
        ]
        self._random.shuffle(able)
        return able

    async def _dial(self, peer: str) -> None:
        for address in self._candidates.get(peer, ()):
            try:
                await self._mesh.connect(address)
            except (LinkLost, Refused, UsageError) as error:
                log.debug("cannot reach %s at %s: %s", short(peer), address, error)
                continue
            self._failures.pop(peer, None)
            self._retry_at.pop(peer, None)
            log.info("connected to neighbour %s", short(peer))
            if self._cache:
                await trio.to_thread.run_sync(self._cache.remember, address)
            return
        self._failures[peer] += 1
        back_off_s = min(_TEND_S * 2.0 ** self._failures[peer], limits.PENALTY_MOST_S)
        self._retry_at[peer] = trio.current_time() + back_off_s
        if back_off_s >= limits.PENALTY_MOST_S:
            self._forget(peer)

    async def _drop_idle(self) -> None:
        """Disconnect the one neighbour, of those that we dialled, that was of no use for longest."""
        links = self._mesh.links()
        idle = [
            peer
            for peer, count in self._idle.items()
            if count >= _IDLE_FETCHES and peer in links and links[peer].outbound
        ]
        if idle:
            peer = max(idle, key=lambda idle_peer: self._idle[idle_peer])
            log.info("disconnecting %s, which has been of no use", short(peer))
            del self._idle[peer]
            self._retry_at[peer] = trio.current_time() + limits.PENALTY_MOST_S
            await self._mesh.disconnect(peer)

    def _forget(self, peer: str) -> None:
        self._candidates.pop(peer, None)
        self._failures.pop(peer, None)
        self._retry_at.pop(peer, None)
