"""What a worker does next, as a pure function: ``advance(state, event, now) -> (state, actions)``.

A worker holds leases, an engine that generates all the time, and weights that change underneath. The rules:

- A lease enters the engine while that generates with the lease's root, which is also the newest one verified, and has
  fewer samples in flight than it takes side by side. There are no batches: places are filled as they become free.
- New weights let the engine finish what it has (drain), or hold it, where every lease in it allows that its weights
  change on the way (recompute); they are loaded when it rests, and the engine generates on. Leases of older roots that
  are not in the engine go back.
- Leases are asked for ahead, so that the engine never waits for the network; never more than can be finished within a
  lease's duration at the measured speed (``capacity``).
- The engine goes on while results are being signed and written.
- Every lease taken ends in one of three ways: :class:`LeaseDone`, :class:`GiveBack`, or the death of the process.
- A learner that says "wait" is obeyed, one that hands out useless leases is asked ever less often.

Nothing here does I/O or reads a clock; times are seconds of the caller's monotonic clock. ``worker`` does what is said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

from rollmesh_node.capacity import wanted_groups
from rollmesh_node.events import (
    Abandon,
    Accepted,
    Action,
    Add,
    Answered,
    Ask,
    Drew,
    EngineDown,
    EngineRests,
    EngineUp,
    Event,
    Finish,
    Generate,
    GiveBack,
    Held,
    Hold,
    LeaseDone,
    LeaseSpoiled,
    Load,
    Loaded,
    NotAnswered,
    Paused,
    SampleMade,
    StopAsked,
    Stopped,
    Ticked,
    Verified,
)
from rollmesh_node.in_hand import Running, State, Taken
from rollmesh_protocol import limits

ASK_PAUSE_S: Final = 0.5
"""Least time between two requests that brought nothing."""
LAST_ANSWER_S: Final = 5.0
"""A node that stops waits so long for the answer to its last request: leases in it would be lost."""
MOST_DOUBLINGS: Final = 30
"""Exponents beyond this only overflow."""

_T = TypeVar("_T", bound=Taken)


def advance(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """The state after ``event`` at ``now``, and what to do about it, in order."""
    pace = state.pace.until(now, in_flight=state.in_flight if state.is_generating else 0)
    state, first = _absorb(replace(state, pace=pace), event, now)
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
    is_quiet = state.asking or state.stop_at is not None  # no sign of life is due
    times = [] if is_quiet else [state.asked_at + limits.HEARTBEAT_S]
    if not state.asking and _wanted_groups(state):
        times.append(state.ask_after)
    times += [taken.until for taken in state.queue]
    times += [taken.patience_until for taken in state.queue if taken.lease.root != state.verified]
    if state.stop_at is not None and state.running:
        times.append(state.stop_at)
    elif state.stop_at is not None and state.asking and not state.finishing:
        times.append(state.asked_at + LAST_ANSWER_S)
    return min(times, default=math.inf)


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
        case Drew(tokens=tokens):
            return replace(state, pace=state.pace.drew(tokens)), ()
        case SampleMade(lease_id=lease_id):
            return _note_sample(state, lease_id), ()
        case LeaseDone(lease_id=lease_id):
            return replace(state, finishing=_split(state.finishing, lease_id)[1], useless=0), ()
        case LeaseSpoiled(lease_id=lease_id):
            return _spoil(state, lease_id, now)
        case EngineRests():
            return _rest(state, now)
        case EngineDown(why=why):
            lost = (*state.running, *state.queue)
            down = replace(state, activity="down", loaded=None, running=(), queue=(), engine_why=why)
            return down, _give_back(lost, "node.engine")
        case Held() | Paused() | StopAsked():
            return _obey(state, event, now)
        case Accepted() | Ticked():
            return state, ()


def _take(state: State, answer: Answered, now: float) -> tuple[State, tuple[Action, ...]]:
    """Take what was offered, but never more than there is room for, whatever the learner sends."""
    known = {taken.lease.lease_id for taken in (*state.queue, *state.running, *state.finishing)}
    offered = {lease.lease_id: lease for lease in answer.leases}
    new = [Taken(lease=lease, at=now) for lease_id, lease in offered.items() if lease_id not in known]
    room = max(0, state.capacity.groups - len(state.queue) - len(state.running))
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


def _note_sample(state: State, lease_id: bytes) -> State:
    found, rest = _split(state.running, lease_id)
    if not found:
        return state
    (lease,) = found
    if lease.left > 1:
        less = replace(lease, left=lease.left - 1)
        return replace(state, running=tuple(less if one is lease else one for one in state.running))
    return replace(state, running=rest, finishing=(*state.finishing, lease), pace=state.pace.made(lease.since))


def _spoil(state: State, lease_id: bytes, now: float) -> tuple[State, tuple[Action, ...]]:
    spoiled, finishing = _split(state.finishing, lease_id)
    refused, running = _split(state.running, lease_id)
    state = replace(state, finishing=finishing, running=running)
    return _back_off(state, now), _give_back((*spoiled, *refused), "node.engine")


def _rest(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    if state.activity not in ("open", "finishing", "holding"):
        return state, ()
    if state.activity == "holding" or not state.running:
        return replace(state, activity="idle"), ()
    lost = state.running  # it had promised to make them
    return _back_off(replace(state, activity="idle", running=()), now), _give_back(lost, "node.engine")


def _obey(state: State, order: Held | Paused | StopAsked, now: float) -> tuple[State, tuple[Action, ...]]:
    """What the learner or the owner wants of the whole worker."""
    match order:
        case Held(why=why, drain=drain):
            return replace(state, held_why=why, draining=drain), ()
        case Paused(why=why):
            return _pause(state, why)
        case StopAsked(grace_s=grace_s):
            return _begin_stop(state, now, grace_s=grace_s) if state.stop_at is None else (state, ())


def _pause(state: State, why: str) -> tuple[State, tuple[Action, ...]]:
    lost = (*state.running, *state.queue) if why else ()
    kept = replace(state, paused_why=why, running=(), queue=()) if why else replace(state, paused_why="")
    return kept, (Abandon(), *_give_back(lost, "node.paused")) if lost else ()


def _begin_stop(state: State, now: float, *, grace_s: float) -> tuple[State, tuple[Action, ...]]:
    """Give the queue back; let the engine go on if a lease in it should end within the grace, by our own measure."""
    actions = _give_back(state.queue, "node.stopping")
    expected_s = state.pace.expected_s(state.in_flight)
    left_s = min((lease.since.at + expected_s - now for lease in state.running), default=0.0)
    return replace(state, queue=(), stop_at=now + grace_s if left_s <= grace_s else now), actions


# --- decisions -------------------------------------------------------------------------------------------------------
def _proceed(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    """What follows from the state alone: load, generate, ask."""
    state, actions = _drive(state)
    state, asks = _ask(state, now)
    return state, (*actions, *asks)


def _drive(state: State) -> tuple[State, tuple[Action, ...]]:
    """What the engine is to do."""
    if state.paused_why:
        return state, ()
    is_current = state.loaded == state.verified
    if state.activity == "idle" and state.verified is not None:
        if not is_current:
            return replace(state, activity="loading"), (Load(),)
        state, adds = _fill(replace(state, activity="open"))
        return state, (Generate(), *adds)
    if state.activity == "open" and is_current:
        return _fill(state)
    if state.activity in ("open", "finishing") and not is_current and _may_be_held(state.running):
        return replace(state, activity="holding"), (Hold(),)
    if state.activity == "open":
        return replace(state, activity="finishing"), (Finish(),)
    return state, ()


def _fill(state: State) -> tuple[State, tuple[Action, ...]]:
    """Put leases of the loaded root into the engine, in the order in which they came, until it is full."""
    in_flight = state.in_flight
    chosen: list[Running] = []
    queue: list[Taken] = []
    for taken in state.queue:
        if taken.lease.root != state.loaded or in_flight >= state.capacity.batch_samples:
            queue.append(taken)
            continue
        left = len(taken.lease.samples)
        chosen.append(Running(lease=taken.lease, at=taken.at, left=left, since=state.pace.mark))
        in_flight += left
    if not chosen:
        return state, ()
    state = replace(state, queue=tuple(queue), running=(*state.running, *chosen))
    return state, (Add(leases=tuple(lease.lease for lease in chosen)),)


def _may_be_held(running: Sequence[Running]) -> bool:
    return bool(running) and all(lease.lease.swap_mode == "recompute" for lease in running)


def _proceed_to_stop(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    actions: tuple[Action, ...] = ()
    late, state = state.queue, replace(state, queue=())  # an answer that was on its way
    actions += _give_back(late, "node.stopping")
    assert state.stop_at is not None
    if state.running and (now >= state.stop_at or not state.is_generating):
        actions += (Abandon(), *_give_back(state.running, "node.stopping"))
        state = replace(state, running=())
    is_answered = not state.asking or now >= state.asked_at + LAST_ANSWER_S
    if is_answered and not state.running and not state.finishing and not state.stopped:
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
        if now >= taken.until:
            expired.append(taken)
        elif state.paused_why or (state.held_why and not state.draining):
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
    return now >= taken.patience_until


def _ask(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    if state.asking:
        return state, ()
    groups = _wanted_groups(state) if now >= state.ask_after else 0
    if not groups and now < state.asked_at + limits.HEARTBEAT_S:
        return state, ()
    return replace(state, asking=True, asked_at=now, asked_groups=groups), (Ask(groups=groups),)


def _wanted_groups(state: State) -> int:
    if state.loaded is None or state.verified is None:  # a first load may take as long as a lease stands
        return 0
    if state.activity == "down" or state.held_why or state.paused_why or state.stop_at is not None:
        return 0
    return wanted_groups(
        state.capacity,
        state.pace,
        in_hand=state.in_flight + sum(len(taken.lease.samples) for taken in state.queue),
        groups=len(state.queue) + len(state.running),
        duration_s=state.duration_s,
    )


def _split(leases: tuple[_T, ...], lease_id: bytes) -> tuple[tuple[_T, ...], tuple[_T, ...]]:
    """The lease called ``lease_id``, and the others."""
    one = tuple(taken for taken in leases if taken.lease.lease_id == lease_id)
    return one, tuple(taken for taken in leases if taken.lease.lease_id != lease_id)


def _give_back(leases: Sequence[Taken], code: str) -> tuple[Action, ...]:
    return (GiveBack(lease_ids=tuple(taken.lease.lease_id for taken in leases), code=code),) if leases else ()
