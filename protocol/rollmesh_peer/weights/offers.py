"""What an origin tells each peer that it has: not everything, but what would help the swarm most. Pure.

The learner holds every chunk, and its uplink is the bottleneck at first. If it offered all to all, peers that do not
see each other's requests would fetch the same chunks from it. So each peer is offered a window of chunks that nobody
has and nobody else was offered; when there are none left, chunks that some peer holds, the rarest first; and a peer
that would otherwise have nothing to ask for, a few of those that others were offered and have not fetched yet.

Invariant: a peer that lacks a chunk is always offered one that it lacks. An offer is a hint: every chunk is served on
request. (Known from BitTorrent as super-seeding.)
"""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt

from rollmesh_protocol import limits

Bits = npt.NDArray[np.bool_]
"""bool[chunks]: True for a chunk that is held."""


class _Peer:
    __slots__ = ("has", "offered", "window")

    def __init__(self, count: int) -> None:
        self.has: Bits = np.zeros(count, np.bool_)
        self.offered: Bits = np.zeros(count, np.bool_)
        """Offered, and not held yet."""
        self.window = limits.FIRST_OFFERS


class Offers:
    """The offers of one payload of ``chunk_count`` chunks to all peers that are after it."""

    def __init__(self, chunk_count: int, *, random: Random) -> None:
        self._peers: dict[str, _Peer] = {}
        self._holders = np.zeros(chunk_count, np.int32)
        self._offered = np.zeros(chunk_count, np.int32)
        self._random = random

    def update(self, peer: str, has: Bits) -> Bits:
        """``peer`` holds these chunks now. What to tell it: what it holds, and what it is offered."""
        state = self._peers.get(peer)
        if state is None:
            state = self._peers[peer] = _Peer(len(self._holders))
        self._holders += has.astype(np.int32) - state.has
        state.has = has.copy()
        self._offered -= state.offered & has
        state.offered &= ~has
        outstanding = int(state.offered.sum())
        if 2 * outstanding <= state.window:
            if state.offered.any() or has.any():
                state.window = min(2 * state.window, limits.MAX_OFFERS)
            self._refill(state, outstanding)
        return state.has | state.offered

    def leave(self, peer: str) -> None:
        """``peer`` is gone, and what it held and was offered counts for nothing."""
        state = self._peers.pop(peer, None)
        if state is not None:
            self._holders -= state.has
            self._offered -= state.offered

    def _refill(self, state: _Peer, outstanding: int) -> None:
        lacking = ~state.has & ~state.offered
        room = state.window - outstanding
        new = self._sample(lacking & (self._holders == 0) & (self._offered == 0), room)
        if len(new) < room:
            new = np.concatenate([new, self._rarest(lacking & (self._holders > 0), room - len(new))])
        if not len(new) and not outstanding:
            new = self._sample(lacking, limits.SPARE_OFFERS)
        state.offered[new] = True
        self._offered[new] += 1

    def _sample(self, wanted: Bits, count: int) -> npt.NDArray[np.intp]:
        """Up to ``count`` of the wanted chunks, at random."""
        candidates = np.flatnonzero(wanted)
        if len(candidates) <= count:
            return candidates
        return candidates[self._random.sample(range(len(candidates)), count)]

    def _rarest(self, wanted: Bits, count: int) -> npt.NDArray[np.intp]:
        """Up to ``count`` of the wanted chunks, those that the fewest peers hold or were offered."""
        candidates = np.flatnonzero(wanted)
        if len(candidates) <= count:
            return candidates
        rarity = self._holders[candidates] + self._offered[candidates]
        chance = np.array([self._random.random() for _ in candidates])
        return candidates[np.lexsort((chance, rarity))[:count]]
