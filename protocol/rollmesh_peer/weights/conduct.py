"""How long a peer that failed us is left alone. Pure; the time comes as an argument, in seconds.

It outlives a single fetch: a neighbour that struck out of one is asked again later, each time after a longer pause; one
that sent a chunk with a wrong digest is shunned. Offences against the protocol itself are counted by the mesh.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rollmesh_protocol import limits


@dataclass(slots=True)
class _Conduct:
    failures: int = 0
    free_at: float = 0.0
    is_shunned: bool = False


class ConductBook:
    """What we remember of the peers that failed us; at most ``limits.MAX_CONDUCT_PEERS`` of them."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, _Conduct] = OrderedDict()

    def penalise(self, peer: str, *, now: float) -> float:
        """``peer`` struck out. Until when it is left alone."""
        conduct = self._entry(peer)
        if now - conduct.free_at > limits.SHUN_S:
            conduct.failures = 0
        pause_s = min(limits.PENALTY_FIRST_S * 2.0 ** min(conduct.failures, 32), limits.PENALTY_MOST_S)
        conduct.failures += 1
        conduct.free_at = max(conduct.free_at, now + pause_s)
        return conduct.free_at

    def shun(self, peer: str, *, now: float) -> None:
        """``peer`` sent a chunk with a wrong digest."""
        conduct = self._entry(peer)
        conduct.is_shunned = True
        conduct.free_at = now + limits.SHUN_S

    def is_free(self, peer: str, *, now: float) -> bool:
        """True when ``peer`` may be asked."""
        conduct = self._peers.get(peer)
        return conduct is None or now >= conduct.free_at

    def is_shunned(self, peer: str, *, now: float) -> bool:
        """True for a peer that we do not even want to be connected to."""
        conduct = self._peers.get(peer)
        return conduct is not None and conduct.is_shunned and now < conduct.free_at

    def next_release(self, *, now: float) -> float | None:
        """When the next peer will be free again."""
        return min((conduct.free_at for conduct in self._peers.values() if conduct.free_at > now), default=None)

    def _entry(self, peer: str) -> _Conduct:
        conduct = self._peers.setdefault(peer, _Conduct())
        self._peers.move_to_end(peer)
        if len(self._peers) > limits.MAX_CONDUCT_PEERS:
            self._peers.popitem(last=False)
        return conduct
