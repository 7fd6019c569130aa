"""The swarm's decisions, driven by hand: no clock, no loop, no network."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_peer.weights.board import held_bits
from rollmesh_peer.weights.picker import Ask, Picker
from rollmesh_protocol import limits

LEARNER = "learner"
CHUNK = 256 * limits.KIB


class Handy(Picker):
    """A picker that takes indices."""

    def offer(self, peer: str, has) -> None:
        super().offer(peer, held_bits(frozenset(has), chunk_count=len(self._missing)))


def picker(*, chunks: int = 40, held: tuple[int, ...] = (), seed: int = 0, chunk_bytes: int = CHUNK) -> Handy:
    return Handy(chunk_count=chunks, chunk_bytes=chunk_bytes, held=held, learner=LEARNER, random=Random(seed))


def deliver(state: Picker, ask: Ask, *, now: float) -> None:
    if state.received(ask, now=now):
        state.stored(ask)


def test_it_starts_small_and_asks_for_each_chunk_once():
    state = picker()
    state.offer("a", range(40))
    state.offer("b", range(40))
    asks = state.asks(0.0)
    assert Counter(ask.peer for ask in asks) == {"a": limits.FIRST_WINDOW, "b": limits.FIRST_WINDOW}
    assert len({ask.index for ask in asks}) == len(asks)
    assert state.asks(0.0) == []


def test_the_window_grows_to_its_bound_and_no_further():
    state = picker(chunks=400)
    state.offer("a", range(400))
    out = state.asks(0.0)
    for step in range(1, 60):
        deliver(state, out.pop(0), now=step * 0.01)
        out += state.asks(step * 0.01)
        assert len(out) <= limits.MAX_WINDOW
    assert len(out) == limits.MAX_WINDOW


def test_the_window_is_bounded_in_bytes():
    state = picker(chunks=400, chunk_bytes=limits.MAX_CHUNK_BYTES)
    state.offer("a", range(400))
    out = state.asks(0.0)
    for step in range(1, 60):
        deliver(state, out.pop(0), now=step * 0.01)
        out += state.asks(step * 0.01)
        assert len(out) * limits.MAX_CHUNK_BYTES <= limits.MAX_WINDOW_BYTES


def test_the_rarest_chunk_comes_first():
    state = picker(chunks=4)
    state.offer("a", [0, 1, 2, 3])
    state.offer("b", [0, 1, 2])
    state.offer("c", [0, 1])
    first = [ask.index for ask in state.asks(0.0) if ask.peer == "a"]
    assert first[0] in (2, 3)
    rare = picker(chunks=4)
    rare.offer("b", [])
    rare.offer("a", [0, 3])
    rare.offer("c", [0])
    assert next(ask.index for ask in rare.asks(0.0) if ask.peer == "a") == 3


def test_nodes_with_other_seeds_take_other_chunks_from_the_learner():
    seen = []
    for seed in range(8):
        state = picker(chunks=400, seed=seed)
        state.offer(LEARNER, range(400))
        seen += [ask.index for ask in state.asks(0.0)]
    assert len(set(seen)) >= len(seen) - 2


def test_a_neighbour_is_preferred_and_the_learner_asked_for_what_nobody_has():
    state = picker(chunks=10)
    state.offer(LEARNER, range(10))
    state.offer("a", [0, 1, 2])
    asks = state.asks(0.0)
    assert all(ask.index in (0, 1, 2) for ask in asks if ask.peer == "a")
    assert all(ask.index not in (0, 1, 2) for ask in asks if ask.peer == LEARNER)


def test_the_learner_helps_out_one_chunk_at_a_time_when_neighbours_are_busy():
    state = picker(chunks=10)
    state.offer(LEARNER, range(10))
    state.offer("a", range(10))
    assert Counter(ask.peer for ask in state.asks(0.0)) == {"a": limits.FIRST_WINDOW, LEARNER: 1}


def test_a_late_chunk_is_asked_for_elsewhere_and_the_answer_still_counts():
    state = picker(chunks=1)
    state.offer("a", [0])
    (ask,) = state.asks(0.0)
    state.offer("b", [0])
    assert ask.due == limits.FIRST_CHUNK_S
    assert state.overdue(ask.due) == ()
    (again,) = state.asks(ask.due)
    assert (again.peer, again.index) == ("b", 0)
    deliver(state, ask, now=ask.due + 0.1)
    assert state.missing_count == 0
    assert not state.received(again, now=ask.due + 0.2)


def test_silence_is_two_strikes_not_one_for_each_chunk_out():
    state = picker()
    state.offer("a", range(40))
    state.asks(0.0)
    first = state.next_event(4.0)
    assert first == limits.FIRST_CHUNK_S
    assert state.overdue(first) == ()
    second = state.next_event(first)
    assert second == limits.FIRST_CHUNK_S + limits.CHUNK_S
    assert state.overdue(second) == ("a",)
    assert state.asks(second) == []
    assert state.unheld_count == 40


def test_a_slow_source_has_the_time_that_its_own_queue_takes():
    state = picker()
    state.offer("fast", range(20))
    now = 0.0
    while asks := state.asks(now):
        for ask in asks:
            now += 0.1
            deliver(state, ask, now=now)
    state.offer("slow", range(20, 40))
    for _ in range(2):
        for ask in state.asks(now):
            now += 4.0
            deliver(state, ask, now=now)
    given = [ask.due - ask.asked for ask in state.asks(now)]
    assert given and all(8.0 < patience_s <= limits.SLOW_CHUNK_S for patience_s in given)
    assert state.overdue(now + 8.0) == () and "slow" in state.live_sources


def test_the_learner_is_never_ended_but_gets_more_patience():
    state = picker(chunks=2)
    state.offer(LEARNER, [0, 1])
    asks = state.asks(0.0)
    now = 0.0
    for _ in range(4):
        now = state.next_event(now)
        assert state.overdue(now) == ()
    for ask in asks:
        state.failed(ask, now=ask.give_up)
    (again,) = state.asks(ask.give_up + limits.REST_S)
    assert again.due - again.asked >= 2 * limits.CHUNK_S


def test_the_deadline_follows_the_median():
    state = picker(chunks=40)
    state.offer("a", range(40))
    for step in range(3):
        for ask in state.asks(step * 3.0):
            deliver(state, ask, now=step * 3.0 + 2.0)
    ask = state.asks(20.0)[0]
    assert ask.due == 20.0 + limits.LATE_MEDIANS * 2.0


def test_a_wrong_digest_ends_the_source_at_once_and_the_chunk_is_asked_for_again():
    state = picker(chunks=3)
    state.offer("bad", range(3))
    asks = state.asks(0.0)
    assert state.received(asks[0], now=0.1)
    state.corrupt(asks[0])
    assert state.live_sources == frozenset()
    state.offer("good", range(3))
    out = state.asks(0.2)
    while out:
        deliver(state, out.pop(), now=0.3)
        out += state.asks(0.3)
    assert state.missing_count == 0


def test_what_a_lost_peer_was_asked_for_goes_to_others():
    state = picker(chunks=2)
    state.offer("a", [0, 1])
    assert len(state.asks(0.0)) == 2
    state.offer("b", [0, 1])
    assert state.asks(0.1) == []
    state.lose("a")
    assert {ask.index for ask in state.asks(0.1)} == {0, 1}


def test_at_the_end_a_slow_chunk_is_asked_of_a_second_source():
    state = picker(chunks=1)
    state.offer("a", [0])
    (first,) = state.asks(0.0)
    state.offer("b", [0])
    assert state.asks(0.1) == []
    at = state.next_event(0.1)
    assert at == limits.ENDGAME_S
    (second,) = state.asks(at)
    assert (second.peer, second.index) == ("b", 0)
    state.offer("c", [0])
    assert state.asks(at + 1.0) == []
    deliver(state, second, now=at + 1.1)
    assert not state.received(first, now=at + 1.2)


def test_at_the_end_an_idle_uplink_takes_over_what_waits_elsewhere():
    state = picker(chunks=2)
    state.offer("slow", [0, 1])
    first, waiting = state.asks(0.0)
    state.offer("fast", [0, 1])
    moved, doubled = state.asks(limits.ENDGAME_S)
    assert (moved.peer, moved.index, moved.instead_of) == ("fast", waiting.index, waiting)
    assert (doubled.peer, doubled.index, doubled.instead_of) == ("fast", first.index, None)  # it may be under way
    assert state.failed(waiting, now=0.6) == ()  # the end of a withdrawn ask is no news
    assert state.asks(1.0) == []


def test_nothing_is_taken_over_by_a_source_that_would_not_send_it_much_sooner():
    state = picker(chunks=4)
    state.offer("slow", [0])
    (ask,) = state.asks(0.0)
    deliver(state, ask, now=2.0)
    state.offer("fast", [1, 2, 3])
    out = state.asks(2.0)
    deliver(state, out.pop(0), now=2.1)
    out += state.asks(2.1)
    state.offer("slow", range(4))
    assert [ask.peer for ask in out] == ["fast", "fast"]
    assert state.asks(2.8) == []  # two seconds at its pace
    assert next(ask.peer for ask in state.asks(6.0)) == "slow"  # the other one has been silent for longer


def test_who_is_second_with_a_chunk_is_told_to_stop():
    state = picker(chunks=1)
    state.offer("a", [0])
    (first,) = state.asks(0.0)
    state.offer("b", [0])
    (second,) = state.asks(limits.ENDGAME_S)
    assert second.instead_of is None
    assert state.received(second, now=1.0)
    assert state.stored(second) == (first,)
    assert state.live_sources == {"a", "b"}


def test_a_busy_source_is_left_alone_for_a_while_without_a_strike():
    state = picker(chunks=1)
    state.offer("a", [0])
    for round_ in range(5):
        at = 2.0 * round_
        (ask,) = state.asks(at)
        state.busy(ask, now=at)
        assert state.asks(at + 0.5 * limits.REST_S) == []
    assert state.live_sources == {"a"}


def test_a_source_that_lacks_a_chunk_is_not_asked_for_it_again():
    state = picker(chunks=2)
    state.offer("a", [0, 1])
    asks = state.asks(0.0)
    for ask in asks:
        state.lacks(ask)
    assert state.asks(0.1) == []
    assert state.unheld_count == 2


def test_an_ended_source_comes_back_with_one_strike_left():
    state = picker(chunks=4)
    state.offer("a", range(4))
    state.end("a")
    state.offer("a", range(4))
    (ask,) = state.asks(0.0)
    assert state.overdue(ask.due) == ("a",)


@given(seed=st.integers(0, 10_000), chunks=st.integers(1, 40), data=st.data())
def test_whatever_happens_every_chunk_arrives_once(seed: int, chunks: int, data: st.DataObject):
    """Random sources that answer, fail, vanish, lie or stall: with one honest source at the end, the fetch ends."""
    state = picker(chunks=chunks, seed=seed)
    chance = Random(seed)
    now, out, stored = 0.0, [], Counter()
    for _ in range(data.draw(st.integers(0, 60))):
        now += chance.random()
        match chance.randrange(8):
            case 0:
                peer = chance.choice(["a", "b", "c", LEARNER])
                state.offer(peer, [index for index in range(chunks) if chance.random() < 0.5])
            case 1:
                state.lose(chance.choice(["a", "b", "c", LEARNER]))
            case 2 if out:
                state.failed(out.pop(chance.randrange(len(out))), now=now)
            case 3 if out:
                state.busy(out.pop(chance.randrange(len(out))), now=now)
            case 4 if out:
                ask = out.pop(chance.randrange(len(out)))
                if state.received(ask, now=now):
                    state.corrupt(ask)
            case 5 if out:
                state.lacks(out.pop(chance.randrange(len(out))))
            case _ if out:
                ask = out.pop(chance.randrange(len(out)))
                if state.received(ask, now=now):
                    state.stored(ask)
                    stored[ask.index] += 1
        state.overdue(now)
        out += state.asks(now)
    for peer in ("a", "b", "c", LEARNER):
        state.lose(peer)
    state.offer("honest", range(chunks))
    while state.missing_count:
        asks = state.asks(now)
        for ask in asks:
            if state.received(ask, now=now):
                state.stored(ask)
                stored[ask.index] += 1
        if not asks:
            now = state.next_event(now)
            assert now < math.inf
    assert stored == Counter(range(chunks))


@pytest.mark.parametrize("chunks", [1, 7, 300])
def test_what_is_held_is_never_asked_for(chunks: int):
    held = tuple(range(0, chunks, 2))
    state = picker(chunks=chunks, held=held)
    state.offer("a", range(chunks))
    asked = set()
    out = state.asks(0.0)
    while out:
        ask = out.pop()
        asked.add(ask.index)
        deliver(state, ask, now=0.1)
        out += state.asks(0.1)
    assert asked == set(range(chunks)) - set(held)


def test_a_source_strikes_out_once_however_often_one_looks():
    """Each time it is told, its pause doubles."""
    state = picker()
    state.offer("a", range(40))
    state.asks(0.0)
    told = [peer for moment in (6.0, 12.0, 12.1, 12.2, 20.0) for peer in state.overdue(moment)]
    assert told == ["a"]
