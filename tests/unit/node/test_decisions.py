"""What a worker decides: every lease ends once, nothing is generated with other weights, the engine is kept busy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_node import capacity, decisions, in_hand
from rollmesh_node.capacity import Capacity, Pace
from rollmesh_node.decisions import advance, next_tick
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
from rollmesh_node.in_hand import State, waiting_for
from rollmesh_protocol import limits
from tests.unit.node.deciding import run
from tests.unit.node.leases import make_lease, root_of

CAPACITY = Capacity(batch_samples=16, groups=8, group_samples=4)


def ready(version: int = 1) -> State:
    """A worker whose engine has loaded the newest weights and whose first request is on its way."""
    state, _ = run(State(capacity=CAPACITY), EngineUp(), Verified(root=root_of(version), version=version))
    state, _actions = run(state, Loaded(root=root_of(version)))
    assert state.asking
    return state


UNANSWERED = NotAnswered(why="", retry_s=99.0)
"""The end of a request that brought nothing, and no other soon."""


def asked(actions: list[Action]) -> list[int]:
    return [action.groups for action in actions if isinstance(action, Ask)]


def returned(actions: list[Action]) -> dict[str, int]:
    return {action.code: len(action.lease_ids) for action in actions if isinstance(action, GiveBack)}


def added(actions: list[Action]) -> list[int]:
    return [len(action.leases) for action in actions if isinstance(action, Add)]


def samples_of(*leases) -> list[Event]:
    """What is reported of leases whose samples are all made."""
    return [SampleMade(lease_id=lease.lease_id) for lease in leases for _ in lease.samples]


def made(*leases) -> list[Event]:
    """What is reported of leases that come to a good end."""
    return [*samples_of(*leases), *(LeaseDone(lease_id=lease.lease_id) for lease in leases)]


def some(count: int, **fields) -> tuple:
    return tuple(make_lease(**fields) for _ in range(count))


def paced(cost_s: float) -> State:
    """The same worker when a lease was seen to take ``cost_s`` for each sample in flight."""
    return replace(ready(), pace=Pace(at=0.0, cost_s=cost_s))


def test_from_start_to_the_first_leases() -> None:
    state, actions = run(State(capacity=CAPACITY), Ticked())
    assert asked(actions) == [0]  # a sign of life before there is an engine
    state, actions = run(state, Verified(root=root_of(1), version=1))
    assert actions == []  # the engine is still starting
    state, actions = run(state, EngineUp())
    assert actions == [Load()]
    state, actions = run(state, Loaded(root=root_of(1)), NotAnswered(why="", retry_s=0))
    assert actions == [Generate(), Ask(groups=6)]
    state, actions = run(state, Answered(leases=some(2)))
    assert added(actions) == [2]
    assert asked(actions) == [4]  # what is to come next is asked for at once
    assert waiting_for(state, 0.0) == ""


def test_the_engine_is_filled_and_the_rest_waits_in_order() -> None:
    leases = some(6)
    state, actions = run(ready(), Answered(leases=leases))
    assert [a.leases for a in actions if isinstance(a, Add)] == [leases[:4]]
    assert [taken.lease for taken in state.queue] == list(leases[4:])
    state, actions = run(state, SampleMade(lease_id=leases[2].lease_id), now=1.0)
    assert [a.leases for a in actions if isinstance(a, Add)] == [leases[4:5]]  # a place was free at once
    state, actions = run(state, *samples_of(leases[0]), now=2.0)
    assert [a.leases for a in actions if isinstance(a, Add)] == [leases[5:]]
    assert [taken.lease for taken in state.finishing] == [leases[0]]


def test_a_lease_larger_than_the_engine_still_runs() -> None:
    _state, actions = run(ready(), Answered(leases=(make_lease(samples=64), make_lease())))
    assert added(actions) == [1]


def test_new_weights_drain_the_engine_return_the_queue_and_are_loaded_next() -> None:
    leases = some(6)
    state, _ = run(ready(), Answered(leases=leases))
    state, actions = run(state, Verified(root=root_of(2), version=2))
    assert returned(actions) == {"node.weights": 2}
    assert Finish() in actions and not any(isinstance(action, Load | Hold | Abandon) for action in actions)
    fresh = make_lease(version=2)
    state, actions = run(state, Answered(leases=(fresh,)))
    assert added(actions) == []
    assert waiting_for(state, 0.0) == ""
    state, actions = run(state, *made(*leases[:4]), now=2.0)
    assert Load() not in actions and added(actions) == []  # the engine has not said that it rests
    state, actions = run(state, EngineRests(), now=2.0)
    assert Load() in actions and added(actions) == []
    state, actions = run(state, Loaded(root=root_of(2)), now=2.1)
    assert actions[:2] == [Generate(), Add(leases=(fresh,))]


def test_leases_that_allow_it_are_held_over_new_weights() -> None:
    leases = some(6, swap_mode="recompute")
    state, _ = run(ready(), Answered(leases=leases))
    state, actions = run(state, Verified(root=root_of(2), version=2), now=1.0)
    assert returned(actions) == {"node.weights": 2} and Hold() in actions and Finish() not in actions
    state, actions = run(state, SampleMade(lease_id=leases[0].lease_id), EngineRests(), now=1.0)
    assert returned(actions) == {} and Load() in actions
    assert "version 2" in waiting_for(state, 1.0)
    fresh = make_lease(version=2, samples=1)
    state, actions = run(state, Loaded(root=root_of(2)), Answered(leases=(fresh,)), now=1.5)
    assert actions[0] == Generate()
    assert added(actions) == [1]  # the place of the sample that was made
    state, actions = run(state, *samples_of(*leases[1:4]), *samples_of(leases[0])[1:], now=9.0)
    assert [taken.lease for taken in state.running] == [fresh]
    assert len(state.finishing) == 4


def test_one_lease_that_does_not_allow_it_lets_all_of_them_drain() -> None:
    drains, holds = make_lease(), make_lease(swap_mode="recompute")
    state, _ = run(ready(), Answered(leases=(drains, holds)))
    state, actions = run(state, Verified(root=root_of(2), version=2))
    assert Finish() in actions and Hold() not in actions
    state, actions = run(state, *samples_of(drains))
    assert Hold() in actions  # nobody needs the old weights any more
    state, actions = run(state, EngineRests())
    assert Load() in actions and [taken.lease for taken in state.running] == [holds]


def test_an_engine_without_work_changes_weights_at_once() -> None:
    state, actions = run(ready(), Verified(root=root_of(2), version=2))
    assert Finish() in actions
    state, actions = run(state, EngineRests())
    assert Load() in actions


def test_a_lease_for_weights_on_their_way_is_kept_a_while_and_then_returned() -> None:
    ahead = make_lease(version=3, duration_s=100)
    state, actions = run(ready(), Answered(leases=(ahead,)))
    assert returned(actions) == {} and added(actions) == []
    assert "version 3" in waiting_for(state, 0.0)
    assert next_tick(state) <= 25.0
    _later, actions = run(state, Ticked(), now=25.0)
    assert returned(actions) == {"node.weights": 1}
    new = (Verified(root=root_of(3), version=3), EngineRests(), Loaded(root=root_of(3)))
    state, actions = run(state, *new, now=10.0)
    assert added(actions) == [1]


def test_a_lease_of_older_weights_goes_back_at_once() -> None:
    _state, actions = run(ready(version=5), Answered(leases=(make_lease(version=4),)))
    assert returned(actions) == {"node.weights": 1} and added(actions) == []


def test_the_same_root_under_a_newer_version_is_used_without_a_load() -> None:
    state = ready(version=1)
    rolled_back = make_lease(version=1)
    state, actions = run(state, Verified(root=root_of(1), version=9), Answered(leases=(rolled_back,)))
    assert added(actions) == [1] and Load() not in actions and Finish() not in actions


def test_weights_that_come_back_while_the_engine_drains_need_no_load() -> None:
    state, _ = run(ready(), Answered(leases=some(1)), Verified(root=root_of(2), version=2))
    state, actions = run(state, Verified(root=root_of(1), version=3), EngineRests())
    assert Generate() in actions and Load() not in actions


def test_a_wait_is_obeyed_and_signs_of_life_go_on() -> None:
    state, actions = run(ready(), Answered(wait_s=60, why="the step is full"))
    assert asked(actions) == []
    assert "the step is full" in waiting_for(state, 1.0)
    state, actions = run(state, Ticked(), now=limits.HEARTBEAT_S)
    assert asked(actions) == [0]
    state, actions = run(state, Answered(wait_s=None), now=limits.HEARTBEAT_S)
    assert asked(actions) == []


def test_an_answer_to_a_sign_of_life_does_not_shorten_a_wait() -> None:
    state, _ = run(ready(), Answered(wait_s=60, why="the step is full"))
    state, _ = run(state, Ticked(), now=3.0)
    state, _ = run(state, Answered(), now=3.0)
    state, actions = run(state, Ticked(), now=30.0)
    assert asked(actions) == [0]
    state, _ = run(state, Answered(), now=30.0)
    state, actions = run(state, Ticked(), now=60.0)
    assert asked(actions) == [6]


def test_new_weights_end_a_wait() -> None:
    state, _ = run(ready(), Answered(wait_s=60, why="the step is full"))
    state, actions = run(state, Verified(root=root_of(2), version=2), now=1.0)
    assert asked(actions) == [6]


def test_useless_leases_are_asked_for_ever_less_often() -> None:
    state, now, gaps = ready(), 0.0, []
    for _ in range(12):
        state, _ = run(state, Answered(unusable=1), now=now)
        gaps.append(state.ask_after - now)
        now = state.ask_after
        state, _ = run(state, Ticked(), now=now)
        assert state.asking
    assert gaps == sorted(gaps) and gaps[1] >= 0.5 and gaps[-1] == limits.BACKOFF_MOST_S
    state, actions = run(state, Answered(leases=(make_lease(),)), now=now)
    assert added(actions) == [1]


def test_leases_that_expire_at_once_are_returned_without_a_busy_loop() -> None:
    state, now, asks = ready(), 0.0, 0
    for _ in range(200):
        if state.asking:
            asks += 1
            state, actions = run(state, Answered(leases=(make_lease(version=2, duration_s=1e-9),)), now=now)
            assert added(actions) == []
        now = next_tick(state)
        state, _ = run(state, Ticked(), now=now)
    assert now > 200 and asks < 200


def test_no_more_is_asked_for_than_fits_into_a_duration() -> None:
    """At 5 s for each sample in flight, 88 s of a lease of 110 s are enough for 17 samples."""
    _state, actions = run(paced(5.0), Answered(leases=some(3, duration_s=110)))
    assert added(actions) == [3]
    assert asked(actions) == [1]
    _, actions = run(replace(paced(50.0), duration_s=110.0, asking=False), Ticked())
    assert asked(actions) == [1]  # nothing in hand: one is always tried
    _state, actions = run(paced(50.0), Answered(leases=some(1, duration_s=110)))
    assert asked(actions) == []


def test_work_is_asked_for_when_the_queue_is_empty_not_at_every_sample() -> None:
    state, actions = run(ready(), Answered(leases=some(6)), Answered())
    assert asked(actions) == []  # 24 samples for 16 places
    leases = [lease.lease for lease in state.running]
    state, actions = run(state, *samples_of(leases[0]), now=1.0)
    assert asked(actions) == [] and added(actions) == [1]
    state, actions = run(state, *samples_of(leases[1]), now=2.0)
    assert asked(actions) == [2] and added(actions) == [1]


def test_the_engine_goes_on_while_the_last_results_are_written() -> None:
    leases = some(8)
    state, _ = run(ready(), Answered(leases=leases))
    state, actions = run(state, *samples_of(*leases[:4]))
    assert sum(added(actions)) == 4 and state.leases_open == 8
    state, actions = run(state, LeaseDone(lease_id=leases[0].lease_id), LeaseSpoiled(lease_id=leases[1].lease_id))
    assert returned(actions) == {"node.engine": 1} and state.leases_open == 6
    state, actions = run(state, EngineDown(why="gone"))
    assert returned(actions) == {"node.engine": 4}  # what is being written needs no engine


def test_a_lease_that_the_engine_does_not_take_goes_back_alone() -> None:
    leases = some(2)
    state, _ = run(ready(), Answered(leases=leases))
    state, actions = run(state, LeaseSpoiled(lease_id=leases[0].lease_id))
    assert returned(actions) == {"node.engine": 1}
    assert [taken.lease for taken in state.running] == [leases[1]]


def test_a_stop_waits_for_results_that_are_being_written() -> None:
    lease = make_lease()
    state, _ = run(ready(), Answered(leases=(lease,)), *samples_of(lease))
    state, actions = run(state, UNANSWERED, StopAsked(grace_s=5.0))
    assert actions == []
    state, actions = run(state, LeaseDone(lease_id=lease.lease_id))
    assert actions == [Stopped()]


def test_a_dead_engine_gives_everything_back_and_takes_nothing() -> None:
    state, _ = run(ready(), Answered(leases=some(6)))
    first = state.running[0].lease
    state, actions = run(state, *made(first), EngineDown(why="it was killed"))
    assert returned(actions) == {"node.engine": 5}
    assert waiting_for(state, 0.0) == "it was killed"
    state, actions = run(state, NotAnswered(why="", retry_s=0), Ticked(), now=10.0)
    assert asked(actions) == [0]
    state, actions = run(state, EngineRests(), Loaded(root=root_of(1)), EngineUp(), now=11.0)
    assert actions == [Load()]  # the word of the dead engine counts for nothing
    state, actions = run(state, Loaded(root=root_of(1)), Answered(), now=11.0)
    assert asked(actions) == [6]


def test_an_engine_that_rests_before_all_is_made_gives_the_rest_back_and_slows_the_asking() -> None:
    state, _ = run(ready(), Answered(leases=some(1)), Answered())
    state, actions = run(state, EngineRests(), now=1.0)
    assert returned(actions) == {"node.engine": 1} and Generate() in actions
    state, actions = run(state, Answered(leases=some(1)), EngineRests(), now=1.0)
    assert returned(actions) == {"node.engine": 1}
    assert state.ask_after > 1.0


def test_weights_that_change_while_they_are_loaded_are_loaded_again() -> None:
    state, actions = run(ready(), Verified(root=root_of(2), version=2), EngineRests())
    assert Load() in actions
    state, actions = run(state, Verified(root=root_of(3), version=3), Answered(leases=(make_lease(version=3),)))
    assert actions == [Ask(groups=5)]
    state, actions = run(state, Loaded(root=root_of(2)))
    assert actions == [Load()]  # nothing is generated with weights that are not the newest
    state, actions = run(state, Loaded(root=root_of(3)))
    assert added(actions) == [1]


def test_pause_returns_the_queue_and_lets_the_engine_finish_what_it_has() -> None:
    leases = some(6)
    state, _ = run(ready(), Answered(leases=leases))
    state, actions = run(state, Held(why="paused by the learner"))
    assert returned(actions) == {"node.paused": 2}
    state, actions = run(state, Answered(), *made(*leases[:4]), now=5.0)
    assert waiting_for(state, 5.0) == "paused by the learner"
    state, actions = run(state, Held(why=""), Answered(), now=20.0)
    assert asked(actions) == [6]


def test_drain_generates_what_is_in_hand_and_takes_no_more() -> None:
    leases = some(6)
    state, _ = run(ready(), Answered(leases=leases))
    state, actions = run(state, Answered(), Held(why="the run is ending", drain=True), now=4.0)
    assert returned(actions) == {} and asked(actions) == [0]
    state, actions = run(state, *made(*leases[:4]), now=5.0)
    assert sum(added(actions)) == 2


def test_a_polite_stop_waits_for_what_is_nearly_done() -> None:
    leases = some(6)
    state, _ = run(paced(10 / 16), Answered(leases=leases))  # ten seconds for a lease in a full engine
    state, actions = run(run(state, UNANSWERED)[0], StopAsked(grace_s=5.0), now=8.0)
    assert returned(actions) == {"node.stopping": 2} and Abandon() not in actions
    state, actions = run(state, *made(*leases[:4]), now=10.0)
    assert Stopped() in actions


def test_a_polite_stop_ends_what_has_only_begun() -> None:
    state, _ = run(paced(100 / 16), Answered(leases=some(6)))
    state, actions = run(run(state, UNANSWERED)[0], StopAsked(grace_s=5.0), now=8.0)
    ids = [lease_id for a in actions if isinstance(a, GiveBack) for lease_id in a.lease_ids]
    assert len(ids) == len(set(ids)) == 6
    assert Abandon() in actions and actions[-1] == Stopped()


def test_a_polite_stop_has_a_deadline() -> None:
    state, _ = run(paced(10 / 4), Answered(leases=some(1)))
    state, actions = run(run(state, UNANSWERED)[0], StopAsked(grace_s=5.0), now=8.0)
    assert Stopped() not in actions
    assert next_tick(state) == 13.0
    state, actions = run(state, Ticked(), now=13.0)
    assert returned(actions) == {"node.stopping": 1} and Stopped() in actions


def test_a_stop_does_not_wait_for_leases_that_are_held() -> None:
    state, _ = run(ready(), Answered(leases=some(1, swap_mode="recompute")), Verified(root=root_of(2), version=2))
    state, actions = run(state, UNANSWERED, EngineRests(), StopAsked(grace_s=50.0))
    assert returned(actions) == {"node.stopping": 1} and Stopped() in actions


def test_an_idle_worker_stops_at_once() -> None:
    _, actions = run(ready(), UNANSWERED, StopAsked(grace_s=5.0))
    assert actions == [Stopped()]


def test_a_stop_waits_a_little_for_the_last_answer_and_returns_its_leases() -> None:
    asking, actions = run(ready(), StopAsked(grace_s=5.0))
    assert actions == [] and next_tick(asking) == asking.asked_at + decisions.LAST_ANSWER_S
    _, actions = run(asking, Answered(leases=(make_lease(),)))
    assert returned(actions) == {"node.stopping": 1} and actions[-1] == Stopped()
    silent, actions = run(asking, Ticked(), now=decisions.LAST_ANSWER_S)
    assert actions == [Stopped()]
    _, actions = run(silent, Answered(leases=(make_lease(),)), now=decisions.LAST_ANSWER_S)
    assert returned(actions) == {"node.stopping": 1} and Stopped() not in actions


def test_receiving_the_same_lease_twice_takes_it_once() -> None:
    lease = make_lease()
    state, _actions = run(ready(), Answered(leases=(lease, lease)))
    state, _more = run(state, Answered(leases=(lease,)))
    assert state.leases_open == 1


def test_a_learner_cannot_heap_up_leases_that_nobody_asked_for() -> None:
    state, now = ready(), 0.0
    back = 0
    for _ in range(20):
        flood = some(16, version=2, duration_s=3600)
        state, actions = run(state, Answered(leases=flood), now=now)
        back += returned(actions).get("lease.limits", 0)
        assert state.leases_open == CAPACITY.groups
        now += limits.HEARTBEAT_S
        state, _ = run(state, Ticked(), now=now)
    assert back == 20 * 16 - CAPACITY.groups


# --- how fast it is --------------------------------------------------------------------------------------------------
def test_the_rate_counts_the_time_with_work_in_flight_alone() -> None:
    (lease,) = some(1)
    state, _ = run(ready(), Ticked(), now=100.0)
    state, _ = run(state, Answered(leases=(lease,)), now=100.0)
    state, _ = run(state, Drew(tokens=100), now=101.0)
    state, _ = run(state, *made(lease), now=104.0)
    state, _ = run(state, Drew(tokens=100), now=150.0)
    assert state.pace.tokens_per_s == 50.0


def test_a_lease_costs_its_time_for_each_sample_in_flight() -> None:
    first, second = some(2)
    state, _ = run(ready(), Answered(leases=(first,)), now=10.0)
    state, _ = run(state, *samples_of(first), now=14.0)
    assert state.pace.cost_s == 1.0
    state, _ = run(state, Answered(leases=(second, *some(3))), now=20.0)
    state, _ = run(state, *samples_of(second), now=36.0)
    assert state.pace.cost_s == 1.0
    assert state.pace.expected_s(state.in_flight) == 12.0


# --- any order of events ---------------------------------------------------------------------------------------------
class Ledger:
    """Plays a worker's surroundings and holds the invariants while hypothesis chooses what happens."""

    def __init__(self) -> None:
        self.state = State(capacity=CAPACITY)
        self.now = 0.0
        self.version = 0
        self.open: set[bytes] = set()
        self.engine: dict[bytes, int] = {}
        """Samples that are not made, of each lease in the engine."""
        self.modes: dict[bytes, str] = {}
        self.told: str = "rest"
        """The last word to the engine: rest (it does), generate, finish or hold."""
        self.requests = 0

    def feed(self, event: Event) -> None:
        if isinstance(event, LeaseDone):
            self.open.discard(event.lease_id)
        self.state, actions = advance(self.state, event, self.now)
        for action in actions:
            self._obey(action)
        held = (*self.state.queue, *self.state.running, *self.state.finishing)
        assert {taken.lease.lease_id for taken in held} == self.open and self.state.leases_open == len(self.open)
        assert {lease.lease.lease_id: lease.left for lease in self.state.running} == self.engine
        assert len(self.state.queue) + len(self.state.running) <= CAPACITY.groups
        assert self.requests in (0, 1)

    def begin(self, leases) -> None:
        """Come to an engine with work, so that not every story has to find its way there."""
        self.version = 1
        for event in (Verified(root=root_of(1), version=1), EngineUp(), Loaded(root=root_of(1))):
            self.feed(event)
        self.answer(leases, wait_s=None)

    def answer(self, leases, *, wait_s: float | None) -> None:
        self.requests -= 1
        self.open |= {lease.lease_id for lease in leases}
        self.modes |= {lease.lease_id: lease.swap_mode for lease in leases}
        self.feed(Answered(leases=leases, wait_s=wait_s))

    def made(self, lease_id: bytes) -> None:
        self.engine[lease_id] -= 1
        if not self.engine[lease_id]:
            del self.engine[lease_id]
        self.feed(SampleMade(lease_id=lease_id))

    def _obey(self, action: Action) -> None:
        state = self.state
        match action:
            case Ask(groups=groups):
                self.requests += 1
                assert 0 <= groups <= CAPACITY.groups
            case Generate():
                assert self.told == "rest" and state.loaded == state.verified
                self.told = "generate"
            case Add(leases=leases):
                assert self.told == "generate"
                assert leases and {lease.root for lease in leases} == {state.loaded} == {state.verified}
                for lease in leases:
                    assert sum(self.engine.values()) < CAPACITY.batch_samples
                    self.engine[lease.lease_id] = len(lease.samples)
            case Finish():
                assert self.told == "generate"
                self.told = "finish"
            case Hold():
                assert self.told in ("generate", "finish")
                assert self.engine and {self.modes[lease_id] for lease_id in self.engine} == {"recompute"}
                self.told = "hold"
            case GiveBack(lease_ids=lease_ids):
                for lease_id in lease_ids:
                    self.open.remove(lease_id)  # a KeyError is a lease given back twice, or after it was done
                    self.engine.pop(lease_id, None)
            case Load():
                assert self.told == "rest" and state.activity == "loading"
            case Abandon() | Stopped():
                pass


@given(st.data())
def test_every_lease_ends_exactly_once_whatever_happens(data: st.DataObject) -> None:
    ledger = Ledger()
    modes = data.draw(st.sampled_from([("drain",), ("recompute",), ("drain", "recompute")]))
    if data.draw(st.booleans()):
        ledger.begin(some(data.draw(st.integers(1, 7)), swap_mode=data.draw(st.sampled_from(modes))))
    for _ in range(data.draw(st.integers(5, 40))):
        ledger.now += data.draw(st.sampled_from([0.0, 0.1, 1.0, 5.0, 200.0]))
        rare = data.draw(st.sampled_from(["tick", "hold", "pause", "down", "accepted", "loaded", "drew"]))
        choices = [rare, "verified"]
        if ledger.state.activity == "down":
            choices += ["up", "up"]
        if ledger.requests:
            choices += ["answer", "answer", "failed"]
        if ledger.state.activity == "loading":
            choices += ["loaded", "loaded", "loaded"]
        if ledger.engine and ledger.told in ("generate", "finish"):
            choices += ["made", "made", "made", "refused"]
        is_abandoned = ledger.state.paused_why and ledger.told != "rest"
        if ledger.told == "hold" or (ledger.told == "finish" and not ledger.engine) or is_abandoned:
            choices += ["rests", "rests", "rests"]
        if ledger.state.finishing:
            choices += ["done", "spoiled"]
        match data.draw(st.sampled_from(choices)):
            case "tick":
                ledger.feed(Ticked())
            case "accepted":
                ledger.feed(Accepted())
            case "drew":
                ledger.feed(Drew(tokens=data.draw(st.integers(0, 100))))
            case "verified":
                ledger.version += 1
                ledger.feed(Verified(root=root_of(ledger.version), version=ledger.version))
            case "hold":
                ledger.feed(Held(why=data.draw(st.sampled_from(["", "paused"])), drain=data.draw(st.booleans())))
            case "pause":
                if not ledger.state.paused_why:
                    ledger.feed(Paused(why="the owner"))
                elif ledger.state.activity == "down":  # the engine is ended before the owner may let it go on
                    ledger.feed(Paused(why=""))
            case "down":
                ledger.told = "rest"
                ledger.feed(EngineDown(why="gone"))
            case "answer":
                near = st.sampled_from([ledger.version] * 4 + [ledger.version - 1, ledger.version + 1])
                versions = [max(1, version) for version in data.draw(st.lists(near, max_size=5))]
                leases = tuple(
                    make_lease(
                        version=version,
                        duration_s=data.draw(st.sampled_from([1, 600])),
                        samples=data.draw(st.integers(1, 5)),
                        swap_mode=data.draw(st.sampled_from(modes)),
                    )
                    for version in versions
                )
                ledger.answer(leases, wait_s=data.draw(st.sampled_from([None, 0.0, 10.0])))
            case "failed":
                ledger.requests -= 1
                ledger.feed(NotAnswered(why="lost", retry_s=data.draw(st.sampled_from([0.0, 3.0]))))
            case "loaded":
                behind = data.draw(st.sampled_from([0, 0, 0, 1]))
                ledger.feed(Loaded(root=root_of(max(0, ledger.version - behind))))
            case "up":
                ledger.feed(EngineUp())
            case "made":
                ledger.made(data.draw(st.sampled_from(sorted(ledger.engine))))
            case "refused":
                ledger.feed(LeaseSpoiled(lease_id=data.draw(st.sampled_from(sorted(ledger.engine)))))
            case "rests":
                ledger.told = "rest"
                ledger.feed(EngineRests())
            case "done" | "spoiled" as end:
                finishing = sorted(taken.lease.lease_id for taken in ledger.state.finishing)
                lease_id = data.draw(st.sampled_from(finishing))
                ledger.feed(LeaseDone(lease_id=lease_id) if end == "done" else LeaseSpoiled(lease_id=lease_id))
        assert next_tick(ledger.state) > ledger.now or ledger.state.asking or _has_progress(ledger)
    ledger.feed(StopAsked(grace_s=1.0))
    for taken in ledger.state.finishing:
        ledger.feed(LeaseDone(lease_id=taken.lease.lease_id))
    ledger.now += max(1.0, decisions.LAST_ANSWER_S)
    ledger.feed(Ticked())
    assert ledger.state.stopped and not ledger.open


def _has_progress(ledger: Ledger) -> bool:
    """A tick that is due now must change something, or the caller would spin."""
    state, actions = advance(ledger.state, Ticked(), ledger.now)
    return bool(actions) or state != ledger.state


@pytest.mark.parametrize("activity", ["down", "idle", "loading"])
def test_there_is_always_a_sentence_for_waiting(activity: str) -> None:
    assert waiting_for(State(capacity=CAPACITY, activity=activity), 0.0)  # type: ignore[arg-type]


def test_the_modules_are_pure() -> None:
    for module in (decisions, in_hand, capacity):
        assert not {"time", "trio", "random", "os"} & set(vars(module))
