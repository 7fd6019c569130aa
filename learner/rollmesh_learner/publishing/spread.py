"""How each version spreads: who holds it since when, what our own uplink gave, and whom it is slowest for. Pure.

What nodes say is taken as it comes (with their heartbeats, so seconds are coarse): it is for people to read and decides
nothing. The last few versions are watched at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from rollmesh_peer.logging_setup import event
from rollmesh_peer.status.words import duration, share, size
from rollmesh_protocol.status import MOST_SPREADS, SpreadStatus

log = logging.getLogger(__name__)

SLOWEST: Final = 3
"""Nodes named as the slowest."""


@dataclass
class _Watched:
    version: int
    num_bytes: int
    published_at: float
    served_before: int
    held_at: dict[str, float] = field(default_factory=dict)
    served: int = 0
    is_told: bool = False


class SpreadBook:
    """What is known of the last :data:`~rollmesh_protocol.status.MOST_SPREADS` versions.

    Args:
        online: the nodes that are here now, and what people call them.
        served_bytes: what our own uplink has given of all payloads since the start.
    """

    def __init__(self, *, online: Callable[[], Mapping[str, str]], served_bytes: Callable[[], int]) -> None:
        self._online = online
        self._served_bytes = served_bytes
        self._watched: list[_Watched] = []

    def published(self, version: int, *, num_bytes: int, now: float) -> None:
        """``version`` is out; from the one before it takes ``num_bytes``, manifest and payload, to get there.

        0 where that is not known: then nothing is said of who gave it.
        """
        for watched in self._watched:
            self._tell(watched, now=now)
        served = self._served_bytes()
        self._watched.append(_Watched(version, num_bytes, now, served))
        del self._watched[:-MOST_SPREADS]

    def heard(self, peer: str, *, version: int, now: float) -> None:
        """``peer`` says that it holds ``version``, or a newer one than those watched."""
        for watched in self._watched:
            if version >= watched.version and peer not in watched.held_at:
                watched.held_at[peer] = now - watched.published_at
                watched.served = self._served_bytes() - watched.served_before
                if watched.held_at.keys() >= self._online().keys():
                    self._tell(watched, now=now)

    def status(self, *, now: float) -> tuple[SpreadStatus, ...]:
        """The newest version first."""
        return tuple(self._status(watched, now=now) for watched in reversed(self._watched))

    def _status(self, watched: _Watched, *, now: float) -> SpreadStatus:
        online = self._online()
        age_s = now - watched.published_at
        took = {peer: watched.held_at.get(peer, math.inf) for peer in online}
        times = sorted(took.values())
        slowest = sorted(took, key=lambda peer: took[peer], reverse=True)[:SLOWEST]
        return SpreadStatus(
            version=watched.version,
            head_bytes=watched.num_bytes,
            age_s=age_s,
            online=len(online),
            holding=sum(1 for time in times if time < math.inf),
            most_s=_finite(times[math.ceil(0.9 * len(times)) - 1] if times else math.inf),
            last_s=_finite(times[-1] if times else math.inf),
            bytes_from_learner=watched.served,
            slowest=tuple(online[peer][:64] for peer in slowest),
        )

    def _tell(self, watched: _Watched, *, now: float) -> None:
        if watched.is_told:
            return
        watched.is_told = True
        found = self._status(watched, now=now)
        if not found.online:
            return
        fetched = found.head_bytes * len(watched.held_at)
        from_peers = max(0, fetched - found.bytes_from_learner)
        event(
            log, "version spread", version=found.version, holding=f"{found.holding} of {found.online} nodes",
            bytes=size(found.head_bytes), from_peers=share(from_peers, fetched),
            nine_in_ten=_seconds(found.most_s), all=_seconds(found.last_s), slowest=", ".join(found.slowest),
        )  # fmt: skip


def _finite(seconds: float) -> float | None:
    return seconds if seconds < math.inf else None


def _seconds(seconds: float | None) -> str:
    return "not yet" if seconds is None else duration(seconds)
