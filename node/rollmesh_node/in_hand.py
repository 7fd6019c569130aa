"""What a worker has in hand: leases on their way, the engine's activity, and what it knows of the learner's wishes.

Values only, and the sentence that they come to. What follows from them is decided in ``decisions``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

from rollmesh_node.capacity import Capacity, Mark, Pace
from rollmesh_protocol import limits
from rollmesh_protocol.lease import Lease

NEWER_WEIGHTS_SHARE: Final = 0.25
"""A lease for weights that are still on their way is kept for this share of its duration, then given back."""

Activity = Literal["down", "idle", "loading", "open", "finishing", "holding"]
"""Of the engine. Idle: there is one and it rests. Open: it generates, and takes leases. Finishing and holding: it was
told to rest, and does not yet."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A lease in hand, and when it came."""

    lease: Lease
    at: float

    @property
    def until(self) -> float:
        """When its duration is over."""
        return self.at + self.lease.duration_s

    @property
    def patience_until(self) -> float:
        """When it is given back if its weights are still on their way."""
        return self.at + NEWER_WEIGHTS_SHARE * self.lease.duration_s


@dataclass(frozen=True, kw_only=True)
class Running(Taken):
    """A lease in the engine: samples that are not made, and when it went in."""

    left: int
    since: Mark


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that the decisions rest on."""

    capacity: Capacity
    activity: Activity = "down"
    loaded: bytes | None = None
    verified: bytes | None = None
    version: int = 0
    queue: tuple[Taken, ...] = ()
    running: tuple[Running, ...] = ()
    """Leases in the engine that are not made: generated, or held until it generates again."""
    finishing: tuple[Taken, ...] = ()
    """Leases whose results are being signed and written."""
    pace: Pace = field(default_factory=Pace)
    duration_s: float = limits.MAX_LEASE_S
    """Of the lease that came last."""
    asking: bool = False
    asked_at: float = -math.inf
    asked_groups: int = 0
    """Of the last request; 0 was a sign of life."""
    ask_after: float = -math.inf
    useless: int = 0
    """Answers in a row that held only leases of no use."""
    wait_why: str = ""
    held_why: str = ""
    draining: bool = False
    paused_why: str = ""
    """The owner's pause: there is no engine, and nothing is in hand."""
    engine_why: str = "the engine is starting"
    stop_at: float | None = None
    """When what is in the engine is given up; set once stopping."""
    stopped: bool = False

    @property
    def leases_open(self) -> int:
        """Leases in hand."""
        return len(self.queue) + len(self.running) + len(self.finishing)

    @property
    def in_flight(self) -> int:
        """Samples in the engine that are not made."""
        return sum(lease.left for lease in self.running)

    @property
    def is_generating(self) -> bool:
        """True while the engine works on samples."""
        return bool(self.running) and self.activity in ("open", "finishing")


def waiting_for(state: State, now: float) -> str:
    """One sentence on what keeps the engine from generating; empty while it generates."""
    if state.stop_at is not None:
        return "the last leases before stopping" if state.running or state.finishing else "nothing: stopping"
    if state.paused_why:
        return state.paused_why
    if state.is_generating:
        return ""
    if state.activity == "down":
        return state.engine_why
    if state.activity in ("loading", "finishing", "holding"):
        return f"the engine to load version {state.version}"
    if state.verified is None:
        return "weights"
    if state.held_why:
        return state.held_why
    if state.queue:
        return f"the weights of version {state.queue[0].lease.version}"
    if state.wait_why:
        left = state.ask_after - now
        return f"{state.wait_why} (asks again in {left:.0f} s)" if left >= 1 else state.wait_why
    return "leases"
