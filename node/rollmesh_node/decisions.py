"""What a worker does next, as a pure function: ``advance(state, event, now) -> (state, actions)``.

A worker holds leases, an engine that generates one batch at a time, and weights that change underneath. The rules:

- The engine starts a batch only of leases whose root is both the one it has loaded and the newest one verified.
- New weights let the running batch finish (drain), are loaded next, and send leases of older roots back.
- While a batch runs, the leases of the next one are asked for, so that the engine never waits for the network; never
  more than can be finished within a lease's duration at the measured speed.
- The engine begins the next batch while the last results are still being signed and written.
- Every lease taken ends in one of three ways: :class:`LeaseDone`, :class:`GiveBack`, or the death of the process.
- A learner that says "wait" is obeyed, one that hands out useless leases is asked ever less often.

Nothing here does I/O or reads a clock; times are seconds of the caller's monotonic clock. ``worker`` does what is said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from rollmesh_node.events import (
    Accepted,
    Action,
    Answered,
    Ask,
    BatchEnded,
    CancelBatch,
    EngineDown,
    EngineUp,
    Event,
    Generate,
    GiveBack,
    Held,
    LeaseDone,
    LeaseMade,
    LeaseSpoiled,
    Load,
    Loaded,
    NotAnswered,
    StopAsked,
    Stopped,
    Ticked,
    Verified,
)
from rollmesh_protocol import limits
from rollmesh_protocol.lease import Lease

ASK_PAUSE_S: Final = 0.5
"""Least time between two requests that brought nothing."""
NEWER_WEIGHTS_SHARE: Final = 0.25
"""A lease for weights that are still on their way is kept for this share of its duration, then given back."""
SAFE_SHARE: Final = 0.8
"""Share of a lease's duration into which its generation must fit by our own measure."""
SMOOTHING: Final = 0.3
"""Weight of the newest batch in the mean of generation times."""
MOST_DOUBLINGS: Final = 30
"""Exponents beyond this only overflow."""
FIRST_BATCH_S: Final = 10.0
"""Expected duration of a batch before any has been timed."""

Activity = Literal["down", "idle", "loading", "generating"]


# --- state -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What the engine and its owner allow: samples side by side, groups in hand, and the run's group size."""

    batch_samples: int
    groups: int
    group_samples: int


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A lease in hand, and when it came."""

    lease: Lease
    at: float

    def is_expired(self, now: float) -> bool:
        """True when its duration is over."""
        return now >= self.at + self.lease.duration_s


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that the decisions rest on."""

    capacity: Capacity
    activity: Activity = "down"
    loaded: bytes | None = None
    verified: bytes | None = None
    version: int = 0
    queue: tuple[Taken, ...] = ()
    batch: tuple[Taken, ...] = ()
    """Leases in the engine that are not made."""
    finishing: tuple[Taken, ...] = ()
    """Leases whose results are being signed and written."""
    batch_at: float = 0.0
    batch_fill: float = 0.0
    """Share of ``capacity.batch_samples`` that the running batch fills."""
    batch_s: float | None = None
    """Mean duration of a batch; None before the first."""
    tokens_per_s: float = 0.0
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
    engine_why: str = "the engine is starting"
    stop_at: float | None = None
    """When the running batch is cut off; set once stopping."""
    stopped: bool = False

    @property
    def leases_open(self) -> int:
        """Leases in hand."""
        return len(self.queue) + len(self.batch) + len(self.finishing)


def advance(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """The state after ``event`` at ``now``, and what to do about it, in order."""
    state, first = _absorb(state, event, now)
    if state.stop_at is not None:
        state, then = _proceed_to_stop(state, now)
        return state, (*first, *then)
    state, returns = _sort_out(state, now)
    if returns and not state.queue and isinstance(event, Answered | Ticked):
        state = _back_off(state, now)  # they were of no use when they came, or before anything could be done with them
    state, then = _proceed(state, now)
    return state, (*first, *returns, *then)


def next_tick(state: State) -> float:
    """When to call :func:`advance` with :class:`Ticked` at the latest, if nothing else happens."""
    times = [] if state.asking else [state.asked_at + limits.HEARTBEAT_S]
    if not state.asking and _wanted_groups(state):
        times.append(state.ask_after)
    times += [taken.at + taken.lease.duration_s for taken in state.queue]
    times += [_patience_until(taken) for taken in state.queue if taken.lease.root != state.verified]
    if state.stop_at is not None:
        times.append(state.stop_at)
    return min(times, default=math.inf)


def waiting_for(state: State, now: float) -> str:
    """One sentence on what keeps the engine from generating; empty while it generates."""
    if state.stop_at is not None:
        return "the last batch before stopping" if state.batch or state.finishing else "nothing: stopping"
    if state.activity == "generating":
        return ""
    if state.activity == "down":
        return state.engine_why
    if state.activity == "loading":
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


# --- events ----------------------------------------------------------------------------------------------------------
def _absorb(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    match event:
        case Answered():
            return _take(state, event, now)
        case NotAnswered(why=why, retry_s=retry_s):
            return replace(state, asking=False, ask_after=max(state.ask_after, now + retry_s), wait_why=why), ()
        case Verified(root=root, version=version):
            # Whoever waits "until the next version" may ask at once: the wait was said before this one.
            return replace(state, verified=root, version=version, ask_after=min(state.ask_after, now)), ()
        case EngineUp():
            return replace(state, activity="idle", loaded=None, engine_why=""), ()
        case Loaded(root=root):
            # A load that ends after its engine has died says nothing about the next engine.
            return (replace(state, activity="idle", loaded=root) if state.activity == "loading" else state), ()
        case LeaseMade(lease_id=lease_id):
            made, rest = _split(state.batch, lease_id)
            return replace(state, batch=rest, finishing=state.finishing + made), ()
        case LeaseDone(lease_id=lease_id):
            return replace(state, finishing=_split(state.finishing, lease_id)[1], useless=0), ()
        case LeaseSpoiled(lease_id=lease_id):
            spoiled, rest = _split(state.finishing, lease_id)
            return _back_off(replace(state, finishing=rest), now), _give_back(spoiled, "node.engine")
        case BatchEnded(tokens=tokens):
            return _end_batch(state, now, tokens=tokens)
        case EngineDown(why=why):
            lost = (*state.batch, *state.queue)
            down = replace(state, activity="down", loaded=None, batch=(), queue=(), engine_why=why)
            return down, _give_back(lost, "node.engine")
        case Held(why=why, drain=drain):
            return replace(state, held_why=why, draining=drain), ()
        case StopAsked(grace_s=grace_s):
            if state.stop_at is not None:
                return state, ()
            return _begin_stop(state, now, grace_s=grace_s)
        case Accepted() | Ticked():
            return state, ()


def _take(state: State, answer: Answered, now: float) -> tuple[State, tuple[Action, ...]]:
    """Take what was offered, but never more than there is room for, whatever the learner sends."""
    known = {taken.lease.lease_id for taken in (*state.queue, *state.batch, *state.finishing)}
    offered = {lease.lease_id: lease for lease in answer.leases}
    new = [Taken(lease=lease, at=now) for lease_id, lease in offered.items() if lease_id not in known]
    room = max(0, state.capacity.groups - len(state.queue) - len(state.batch))
    fresh, excess = tuple(new[:room]), new[room:]
    if fresh:
        state = replace(state, queue=state.queue + fresh, duration_s=fresh[-1].lease.duration_s)
    pause_s = ASK_PAUSE_S if state.asked_groups and not fresh else 0.0
    if answer.wait_s is not None:
        pause_s = max(pause_s, answer.wait_s)
    if state.asked_groups or answer.wait_s is not None:
        state = replace(state, wait_why=answer.why)
    state = replace(state, asking=False, ask_after=max(state.ask_after, now + pause_s))
    if (answer.unusable or excess) and not fresh:
        state = _back_off(state, now)
    return state, _give_back(excess, "lease.limits")


def _back_off(state: State, now: float) -> State:
    """Asking brought nothing that could be used: wait twice as long as the last time before asking again.

    The first time is free: an answer and new weights cross each other now and then.
    """
    useless = state.useless + 1
    doubled_s = limits.BACKOFF_FIRST_S * 2.0 ** min(useless - 1, MOST_DOUBLINGS)
    pause_s = min(limits.BACKOFF_MOST_S, doubled_s) if useless > 1 else 0.0
    return replace(state, useless=useless, ask_after=max(state.ask_after, now + pause_s))


def _end_batch(state: State, now: float, *, tokens: int) -> tuple[State, tuple[Action, ...]]:
    if state.activity != "generating":
        return state, ()
    took = max(now - state.batch_at, 1e-3)
    ended = replace(state, activity="idle", batch=())
    if tokens:
        full_s = took / max(state.batch_fill, 1e-3) if state.batch_fill < 1 else took
        # A batch that was half full would not have taken twice as long: it is the upper bound that must fit.
        mean_s = full_s if state.batch_s is None else state.batch_s + SMOOTHING * (full_s - state.batch_s)
        rate = tokens / took
        smooth = rate if not state.tokens_per_s else state.tokens_per_s + SMOOTHING * (rate - state.tokens_per_s)
        ended = replace(ended, batch_s=mean_s, tokens_per_s=smooth)
    if state.batch:
        ended = _back_off(ended, now)
    return ended, _give_back(state.batch, "node.engine")


def _begin_stop(state: State, now: float, *, grace_s: float) -> tuple[State, tuple[Action, ...]]:
    """Give the queue back; let the batch go on if it should end within the grace, by our own measure."""
    actions = _give_back(state.queue, "node.stopping")
    expected = FIRST_BATCH_S if state.batch_s is None else state.batch_s * min(1.0, state.batch_fill)
    left = state.batch_at + expected - now
    stop_at = now + grace_s if left <= grace_s else now
    return replace(state, queue=(), stop_at=stop_at), actions


# --- decisions -------------------------------------------------------------------------------------------------------
def _proceed(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    """What follows from the state alone: load, generate, ask."""
    actions: tuple[Action, ...] = ()
    if state.activity == "idle" and state.verified is not None:
        if state.loaded != state.verified:
            state = replace(state, activity="loading")
            actions = (*actions, Load())
        elif batch := _next_batch(state):
            chosen = {taken.lease.lease_id for taken in batch}
            state = replace(
                state,
                activity="generating",
                batch=batch,
                queue=tuple(taken for taken in state.queue if taken.lease.lease_id not in chosen),
                batch_at=now,
                batch_fill=_samples(batch) / state.capacity.batch_samples,
            )
            actions = (*actions, Generate(leases=tuple(taken.lease for taken in batch)))
    state, asks = _ask(state, now)
    return state, (*actions, *asks)


def _proceed_to_stop(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    actions: tuple[Action, ...] = ()
    late, state = state.queue, replace(state, queue=())  # an answer that was on its way
    actions += _give_back(late, "node.stopping")
    assert state.stop_at is not None
    if state.batch and now >= state.stop_at:
        actions += (CancelBatch(), *_give_back(state.batch, "node.stopping"))
        state = replace(state, batch=())
    if not state.batch and not state.finishing and not state.stopped:
        actions += (Stopped(),)
        state = replace(state, stopped=True)
    return state, actions


def _sort_out(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    """Give back the leases that will not be generated: expired, of older weights, or while work is held."""
    kept: list[Taken] = []
    expired: list[Taken] = []
    stale: list[Taken] = []
    held: list[Taken] = []
    for taken in state.queue:
        if taken.is_expired(now):
            expired.append(taken)
        elif state.held_why and not state.draining:
            held.append(taken)
        elif _is_stale(taken, state, now):
            stale.append(taken)
        else:
            kept.append(taken)
    actions = (
        *_give_back(expired, "lease.expired"),
        *_give_back(stale, "node.weights"),
        *_give_back(held, "node.paused"),
    )
    return replace(state, queue=tuple(kept)), actions


def _is_stale(taken: Taken, state: State, now: float) -> bool:
    if taken.lease.root == state.verified:
        return False
    if taken.lease.version <= state.version:
        return True
    return now >= _patience_until(taken)


def _patience_until(taken: Taken) -> float:
    return taken.at + NEWER_WEIGHTS_SHARE * taken.lease.duration_s


def _next_batch(state: State) -> tuple[Taken, ...]:
    """Leases of the loaded root, in the order in which they came, up to the engine's capacity; at least one."""
    batch: tuple[Taken, ...] = ()
    room = state.capacity.batch_samples
    for taken in state.queue:
        if taken.lease.root != state.loaded:
            continue
        if batch and len(taken.lease.samples) > room:
            break
        batch = (*batch, taken)
        room -= len(taken.lease.samples)
    return batch


def _ask(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    if state.asking:
        return state, ()
    groups = _wanted_groups(state) if now >= state.ask_after else 0
    if not groups and now < state.asked_at + limits.HEARTBEAT_S:
        return state, ()
    return replace(state, asking=True, asked_at=now, asked_groups=groups), (Ask(groups=groups),)


def _wanted_groups(state: State) -> int:
    """Groups that fill the queue up to one batch beyond the one in the engine, within every bound."""
    if state.activity == "down" or state.held_why or state.verified is None or state.stop_at is not None:
        return 0
    capacity = state.capacity
    batch = max(1, capacity.batch_samples // capacity.group_samples)
    ahead = batch
    if state.batch_s:
        safe_s = SAFE_SHARE * state.duration_s
        # A batch that does not fit is made smaller; a second one is taken only if both fit one after the other.
        ahead = max(1, min(batch, math.floor(batch * safe_s / state.batch_s)))
        if state.activity == "generating" and 2 * state.batch_s * ahead / batch > safe_s:
            return 0
    missing = ahead - math.ceil(_samples(state.queue) / capacity.group_samples)
    return max(0, min(missing, capacity.groups - len(state.queue) - len(state.batch), limits.MAX_GROUPS_PER_REQUEST))


def _split(leases: tuple[Taken, ...], lease_id: bytes) -> tuple[tuple[Taken, ...], tuple[Taken, ...]]:
    """The lease called ``lease_id``, and the others."""
    one = tuple(taken for taken in leases if taken.lease.lease_id == lease_id)
    return one, tuple(taken for taken in leases if taken.lease.lease_id != lease_id)


def _samples(leases: tuple[Taken, ...]) -> int:
    return sum(len(taken.lease.samples) for taken in leases)


def _give_back(leases: tuple[Taken, ...] | list[Taken], code: str) -> tuple[Action, ...]:
    return (GiveBack(lease_ids=tuple(taken.lease.lease_id for taken in leases), code=code),) if leases else ()
