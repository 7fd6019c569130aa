"""Which chunk to ask of whom next: the decisions of the chunk swarm, without a clock, a socket or a disk.

Sources are neighbours and the learner. Rarest first among what the neighbours hold, ties at random, so that different
nodes fetch different chunks; the learner is asked for what no neighbour has, and with half its window for what the
neighbours are too busy to send. A late chunk (by the fetch's median, and by its source's own pace) is asked for
elsewhere too; two strikes end a neighbour. At the end, when everything has been asked for, an uplink that has nothing
to do for us takes asks over from queues that are longer: else a fetch would end with the slowest uplink that was ever
asked, while the others idle.

Invariant: at most ``window`` asks are out to a source, a chunk that is asked for in time is not asked for twice (but
at the very end), and a missing chunk that some live source holds is never forgotten. Not here: who is a neighbour
(:mod:`~rollmesh_peer.weights.neighbourhood`), how long an ended one stays away (:mod:`~rollmesh_peer.weights.conduct`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random

import numpy as np

from rollmesh_peer.weights.offers import Bits
from rollmesh_protocol import limits

_MEDIAN_OF = 64
"""Recent chunks whose median time sets the deadlines."""
_FORGET_BEST = 1.02
_PACE_WEIGHT = 0.2
"""Of the newest chunk in the average of a source's pace."""
_SOONER = 1.5
"""At the end an ask goes to another source that will answer it so many times sooner: the estimates are rough."""
_LOOK_S = 0.1
"""How often the end of a fetch looks for asks that would be answered sooner elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """Ask ``peer`` for chunk ``index``. Times are on the caller's clock, in seconds."""

    peer: str
    index: int
    asked: float
    due: float
    """From here on it is late, and may be asked of others too."""
    give_up: float
    """From here on the answer is not waited for."""
    instead_of: Ask | None = None
    """The ask that this one takes the place of; it is withdrawn."""


@dataclass(slots=True)
class _Source:
    has: Bits
    window: int = limits.FIRST_WINDOW
    out: dict[int, Ask] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    denied: set[int] = field(default_factory=set)
    """Chunks that it claims to hold and would not send."""
    strikes: int = 0
    timely: int = 0
    patience: float = 1.0
    pace_s: float | None = None
    """Seconds from one of its chunks to the next while some are out, averaged; None before the first."""
    heard_at: float = -math.inf
    """When its last chunk came."""
    best_s: float = math.inf
    """The shortest time in which a chunk came, slowly forgotten."""
    struck_at: float = -math.inf
    rest_until: float = -math.inf
    has_ended: bool = False


class Picker:
    """The state of one fetch. Every method is immediate; times only ever grow."""

    def __init__(
        self, *, chunk_count: int, chunk_bytes: int, held: Collection[int], learner: str | None, random: Random
    ) -> None:
        self._missing: Bits = np.ones(chunk_count, np.bool_)
        self._missing[list(held)] = False
        self._missing_count = int(self._missing.sum())
        self._asked = np.zeros(chunk_count, np.int16)
        """Asks in time, and writes, by chunk."""
        self._writing: set[int] = set()
        self._holders = np.zeros(chunk_count, np.int32)
        """Live neighbours, without the learner, by chunk."""
        self._sources: dict[str, _Source] = {}
        self._times: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._median_s = 0.0
        self._max_window = max(limits.FIRST_WINDOW, min(limits.MAX_WINDOW, limits.MAX_WINDOW_BYTES // chunk_bytes))
        self._learner = learner
        self._random = random

    # --- who has what ------------------------------------------------------------------------------------------------
    def offer(self, peer: str, has: Bits) -> None:
        """``peer`` holds these chunks. A source that had ended comes back with one strike left."""
        source = self._sources.get(peer)
        if source is None:
            source = self._sources[peer] = _Source(has=np.zeros_like(has))
        elif source.has_ended:
            strikes = max(0, limits.MAX_STRIKES - 1)
            source = self._sources[peer] = _Source(has=np.zeros_like(has), window=1, strikes=strikes)
        has = has.copy()
        has[list(source.denied)] = False
        if peer != self._learner:
            self._holders += has.astype(np.int32) - source.has.astype(np.int32)
        source.has = has

    def lose(self, peer: str) -> None:
        """``peer`` is gone: what was asked of it is asked of others."""
        self.end(peer)
        self._sources.pop(peer, None)

    def end(self, peer: str) -> None:
        """Ask nothing more of ``peer``, until it is offered again."""
        source = self._sources.get(peer)
        if source is None or source.has_ended:
            return
        for ask in list(source.out.values()):
            self._release(source, ask)
        if peer != self._learner:
            self._holders -= source.has
        source.has_ended = True

    @property
    def live_sources(self) -> frozenset[str]:
        """Peers that may be asked."""
        return frozenset(peer for peer, source in self._sources.items() if not source.has_ended)

    @property
    def missing_count(self) -> int:
        """Chunks that are not stored yet."""
        return self._missing_count

    @property
    def unheld_count(self) -> int:
        """Missing chunks that no live source holds."""
        reachable = np.zeros_like(self._missing)
        for source in self._sources.values():
            if not source.has_ended:
                reachable |= source.has
        return int((self._missing & ~reachable).sum())

    # --- what to do now ----------------------------------------------------------------------------------------------
    def asks(self, now: float) -> list[Ask]:
        """The requests to send now, counted as sent."""
        neighbours = [peer for peer in self._sources if peer != self._learner]
        self._random.shuffle(neighbours)
        found = self._rounds(neighbours, now)
        if self._learner in self._sources:
            found += self._rounds([self._learner], now)
        return found

    def overdue(self, now: float) -> tuple[str, ...]:
        """Note what is late by now; the neighbours that struck out by it, which have ended."""
        struck: list[str] = []
        for peer, source in self._sources.items():
            for index, ask in source.out.items():
                if ask.due > now:
                    continue
                if index not in source.late:
                    source.late.add(index)
                    self._asked[index] -= 1
                self._strike(peer, source, ask, now=now)
            if source.strikes >= limits.MAX_STRIKES and not source.has_ended:
                struck.append(peer)
        return self._ended(struck)

    def next_event(self, now: float) -> float:
        """When :meth:`asks` or :meth:`overdue` may have news without anything else happening; infinity for never."""
        times = [math.inf]
        has_choice = len(self._sources) > 1 and self._is_endgame
        for source in self._sources.values():
            times += [source.rest_until, source.struck_at + self._late_s * source.patience]
            for ask in source.out.values():
                times += [ask.due, max(ask.asked + limits.ENDGAME_S, now + _LOOK_S) if has_choice else math.inf]
        return min(time for time in times if time > now)

    # --- what came of it ---------------------------------------------------------------------------------------------
    def received(self, ask: Ask, *, now: float) -> bool:
        """Chunk bytes arrived. True: check and store them, then call :meth:`stored` or :meth:`corrupt`."""
        source = self._sources.get(ask.peer)
        if source is not None and source.out.get(ask.index) is ask:
            was_late = ask.index in source.late
            self._release(source, ask)
            self._measure(source, ask, now)
            self._times.append(now - ask.asked)
            self._median_s = statistics.median(self._times)
            self._adapt(source, now - ask.asked)
            if not was_late:
                self._praise(source)
        if not self._missing[ask.index] or ask.index in self._writing:
            return False
        self._writing.add(ask.index)
        self._asked[ask.index] += 1
        return True

    def stored(self, ask: Ask) -> tuple[Ask, ...]:
        """The chunk is verified and on disk. Returns the other asks for it, which are to be withdrawn."""
        self._writing.discard(ask.index)
        self._asked[ask.index] -= 1
        self._missing_count -= int(self._missing[ask.index])
        self._missing[ask.index] = False
        others = [(source, source.out[ask.index]) for source in self._sources.values() if ask.index in source.out]
        for source, other in others:
            self._release(source, other)
        return tuple(other for _, other in others)

    def corrupt(self, ask: Ask) -> None:
        """The chunk has a wrong digest, which ends its source at once."""
        self._writing.discard(ask.index)
        self._asked[ask.index] -= 1
        self.end(ask.peer)

    def failed(self, ask: Ask, *, now: float) -> tuple[str, ...]:
        """No answer, or a broken one: a strike. Returns the peer when it struck out."""
        source = self._out_of(ask)
        if source is None:
            return ()
        self._release(source, ask)
        source.rest_until = now + limits.REST_S
        self._strike(ask.peer, source, ask, now=now)
        return self._ended([ask.peer] if source.strikes >= limits.MAX_STRIKES else [])

    def busy(self, ask: Ask, *, now: float) -> None:
        """The source has no room for us just now."""
        source = self._out_of(ask)
        if source is not None:
            self._release(source, ask)
            source.rest_until = now + limits.REST_S
            source.window = max(1, source.window - 1)

    def lacks(self, ask: Ask) -> None:
        """The source does not have this chunk (any more)."""
        source = self._out_of(ask)
        if source is not None:
            self._release(source, ask)
            if ask.peer != self._learner:
                self._holders[ask.index] -= int(source.has[ask.index])
            source.has[ask.index] = False
            source.denied.add(ask.index)

    # --- inside ------------------------------------------------------------------------------------------------------
    def _rounds(self, peers: list[str], now: float) -> list[Ask]:
        """One chunk of each in turn, until none of ``peers`` takes another."""
        found: list[Ask] = []
        turn = [peer for peer in peers if self._is_ready(self._sources[peer], now)]
        while turn:
            again = []
            for peer in turn:
                source = self._sources[peer]
                ask = self._next(peer, source, now)
                if ask is None:
                    continue
                found.append(ask)
                if self._is_ready(source, now):
                    again.append(peer)
            turn = again
        return found

    def _is_ready(self, source: _Source, now: float) -> bool:
        return not source.has_ended and len(source.out) < source.window and source.rest_until <= now

    def _next(self, peer: str, source: _Source, now: float) -> Ask | None:
        wanted = self._missing & source.has & (self._asked == 0)
        if source.late:
            wanted[list(source.late)] = False
        candidates = np.flatnonzero(wanted)
        rarity = self._holders[candidates]
        least = rarity.min(initial=np.iinfo(np.int32).max)
        if peer == self._learner and least > 0 and len(source.out) >= max(1, source.window // 2):
            return None
        if not len(candidates):
            return self._take_over(peer, source, now)
        rarest = candidates[rarity == least]
        return self._ask(peer, source, int(rarest[self._random.randrange(len(rarest))]), now)

    def _take_over(self, peer: str, source: _Source, now: float) -> Ask | None:
        """At the end, ask ``source`` for the chunk that would come the latest of all, if it sends it sooner.

        An ask that waits behind others at its source is withdrawn there. The first one is not, for its bytes may be
        under way: that chunk is then out twice, and whoever is second is told to stop.
        """
        if not self._is_endgame:
            return None
        longest_s = _SOONER * self._remaining_s(source, len(source.out), now)
        found: tuple[_Source, Ask, int] | None = None
        for other in self._sources.values():
            for place, ask in enumerate(other.out.values()) if other is not source else ():
                remaining_s = self._remaining_s(other, place, now)
                if remaining_s > longest_s and self._can_take_over(ask, other, source, now):
                    longest_s, found = remaining_s, (other, ask, place)
        if found is None:
            return None
        other, ask, place = found
        if place > 0:
            self._release(other, ask)
        return self._ask(peer, source, ask.index, now, instead_of=ask if place > 0 else None)

    def _can_take_over(self, ask: Ask, other: _Source, source: _Source, now: float) -> bool:
        index = ask.index
        if self._asked[index] != 1 or index in self._writing or index in other.late:
            return False  # it is out elsewhere as well, or here already
        return bool(source.has[index]) and index not in source.out and ask.asked + limits.ENDGAME_S <= now

    def _remaining_s(self, source: _Source, place: int, now: float) -> float:
        """In how long an ask of ``source`` with ``place`` others before it is answered.

        Each takes the source's pace, or as long as it has been silent where that is longer.
        """
        pace_s = self._median_s if source.pace_s is None else source.pace_s
        oldest = next(iter(source.out.values()), None)
        silent_s = 0.0 if oldest is None else now - max(oldest.asked, source.heard_at)
        return (place + 1) * max(pace_s, silent_s) - min(pace_s, silent_s)

    def _ask(self, peer: str, source: _Source, index: int, now: float, *, instead_of: Ask | None = None) -> Ask:
        patience_s = source.patience * max(self._late_s, self._queue_s(source))
        give_up = now + min(limits.TRANSFER_S, limits.LATE_MEDIANS * patience_s)
        due = min(now + patience_s, give_up)
        ask = Ask(peer=peer, index=index, asked=now, due=due, give_up=give_up, instead_of=instead_of)
        source.out[index] = ask
        self._asked[index] += 1
        return ask

    def _queue_s(self, source: _Source) -> float:
        """What a slow source is given for one more ask behind those that are out, by its own pace so far."""
        if source.pace_s is None:
            return limits.FIRST_CHUNK_S
        return min(limits.SLOW_CHUNK_S, limits.LATE_PACES * source.pace_s * (len(source.out) + 1))

    @property
    def _late_s(self) -> float:
        return max(limits.CHUNK_S, limits.LATE_MEDIANS * self._median_s)

    @property
    def _is_endgame(self) -> bool:
        """True when everything that is missing has been asked for."""
        return not (self._missing & (self._asked == 0)).any()

    def _out_of(self, ask: Ask) -> _Source | None:
        source = self._sources.get(ask.peer)
        return source if source is not None and source.out.get(ask.index) is ask else None

    def _release(self, source: _Source, ask: Ask) -> None:
        del source.out[ask.index]
        if ask.index in source.late:
            source.late.discard(ask.index)
        else:
            self._asked[ask.index] -= 1

    def _measure(self, source: _Source, ask: Ask, now: float) -> None:
        took_s = now - max(ask.asked, source.heard_at)
        source.heard_at = now
        if source.pace_s is None:
            source.pace_s = took_s
        else:
            source.pace_s += _PACE_WEIGHT * (took_s - source.pace_s)

    def _adapt(self, source: _Source, took_s: float) -> None:
        """More asks out while they cost no waiting, fewer when they only queue at the other side."""
        source.best_s = min(took_s, _FORGET_BEST * source.best_s)
        if took_s <= max(limits.PROMPT_S, limits.PROMPT_BESTS * source.best_s):
            source.window = min(source.window + 1, self._max_window)
        elif took_s > limits.QUEUED_BESTS * source.best_s:
            source.window = max(1, source.window - 1)

    def _praise(self, source: _Source) -> None:
        source.timely += 1
        if source.timely % limits.STRIKE_FORGIVEN_AFTER == 0:
            source.strikes = max(0, source.strikes - 1)

    def _strike(self, peer: str, source: _Source, ask: Ask, *, now: float) -> None:
        """One strike, unless the last one was for the same silence: one hiccup makes several chunks late at once."""
        source.window = 1
        if ask.asked <= source.struck_at and now < source.struck_at + self._late_s * source.patience:
            return
        source.struck_at = now
        source.strikes += 1
        if peer == self._learner and source.strikes >= limits.MAX_STRIKES:
            # The learner is never ended: it may be the only source, and slow for everybody.
            source.strikes = 0
            source.patience *= 2

    def _ended(self, struck: list[str]) -> tuple[str, ...]:
        for peer in struck:
            self.end(peer)
        return tuple(struck)
