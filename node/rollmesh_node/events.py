"""What can happen to a worker, and what it can be told to do: the vocabulary of ``decisions``. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh_protocol.lease import Lease


# --- what happens ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Answered:
    """The learner answered a request: leases (verified and within our limits), and perhaps how long to wait.

    ``unusable`` counts leases that were forged, another's, or beyond our limits.
    """

    leases: tuple[Lease, ...] = ()
    wait_s: float | None = None
    why: str = ""
    unusable: int = 0


@dataclass(frozen=True, kw_only=True)
class NotAnswered:
    """A request failed; ask again after ``retry_s``."""

    why: str
    retry_s: float


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The keeper holds these weights now."""

    root: bytes
    version: int


@dataclass(frozen=True, kw_only=True)
class EngineUp:
    """A new engine process is ready for its first load."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The engine holds these weights now; it has not begun to generate with them."""

    root: bytes


@dataclass(frozen=True, kw_only=True)
class Drew:
    """The engine has drawn so many tokens since the last time."""

    tokens: int


@dataclass(frozen=True, kw_only=True)
class SampleMade:
    """One more sample of a lease in the engine is generated.

    With the last one the lease is made: its result is being checked, signed and written.
    """

    lease_id: bytes


@dataclass(frozen=True, kw_only=True)
class LeaseDone:
    """The result of a lease that was made is safe on disk."""

    lease_id: bytes


@dataclass(frozen=True, kw_only=True)
class LeaseSpoiled:
    """The engine does not take this lease, or its result is not fit to be sent or could not be written."""

    lease_id: bytes


@dataclass(frozen=True, kw_only=True)
class EngineRests:
    """The engine generates no more: all it had is made (after ``Finish``), or it holds the rest (after ``Hold``)."""


@dataclass(frozen=True, kw_only=True)
class EngineDown:
    """The engine process is gone, or stopped."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A receipt came: the allowance may have grown."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Take no new work (``why``), or go on (empty): a notice of the learner, a quarantine, or the owner's pause.

    With ``drain`` the leases in hand are still generated; without, only those in the engine are.
    """

    why: str
    drain: bool = False


@dataclass(frozen=True, kw_only=True)
class Paused:
    """The owner wants the engine's memory (``why``), or lets the node go on (empty)."""

    why: str


@dataclass(frozen=True, kw_only=True)
class StopAsked:
    """Finish what is nearly done within ``grace_s``, give the rest back, then stop."""

    grace_s: float


@dataclass(frozen=True, kw_only=True)
class Ticked:
    """Time has passed."""


Event = (
    Answered | NotAnswered | Verified | EngineUp | Loaded | Drew | SampleMade | LeaseDone | LeaseSpoiled | EngineRests
    | EngineDown | Accepted | Held | Paused | StopAsked | Ticked
)  # fmt: skip


# --- what to do ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Ask:
    """Send a lease request: for so many groups, or (0) as a sign of life."""

    groups: int


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load the newest verified weights into the engine."""


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Let the engine generate with the weights it has loaded: what it holds, and what is added from now on."""


@dataclass(frozen=True, kw_only=True)
class Add:
    """Put these leases into the engine, which generates; all have the loaded root."""

    leases: tuple[Lease, ...]


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Nothing more is added: the engine rests when all it has is made."""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """The engine rests now, and holds what is not made until it generates again."""


@dataclass(frozen=True, kw_only=True)
class Abandon:
    """Forget everything in the engine at once."""


@dataclass(frozen=True, kw_only=True)
class GiveBack:
    """Return leases to the learner, with a code."""

    lease_ids: tuple[bytes, ...]
    code: str


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Nothing is left to wait for."""


Action = Ask | Load | Generate | Add | Finish | Hold | Abandon | GiveBack | Stopped
