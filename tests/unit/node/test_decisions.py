"""What a worker decides: every lease ends once, nothing is generated with other weights, the engine is kept busy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_node import decisions
from rollmesh_node.decisions import Capacity, State, advance, next_tick, waiting_for
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
from tests.unit.node.leases import make_lease, root_of

CAPACITY = Capacity(batch_samples=16, groups=8, group_samples=4)


def run(state: State, *events: Event, now: float = 0.0) -> tuple[State, list[Action]]:
    actions: list[Action] = []
    for event in events:
        state, more = advance(state, event, now)
        actions += more
    return state, actions


def ready(version: int = 1) -> State:
    """A worker whose engine has loaded the newest weights and whose first request is on its way."""
    state, _ = run(State(capacity=CAPACITY), EngineUp(), Verified(root=root_of(version), version=version))
    state, _actions = run(state, Loaded(root=root_of(version)))
    assert state.asking
    return state


def asked(actions: list[Action]) -> list[int]:
    return [action.groups for action in actions if isinstance(action, Ask)]


def returned(actions: list[Action]) -> dict[str, int]:
    return {action.code: len(action.lease_ids) for action in actions if isinstance(action, GiveBack)}


def generated(actions: list[Action]) -> list[int]:
    return [len(action.leases) for action in actions if isinstance(action, Generate)]


def made(leases) -> list[Event]:
    """What is reported of leases that come to a good end."""
    return [kind(lease_id=lease.lease_id) for lease in leases for kind in (LeaseMade, LeaseDone)]


def test_from_start_to_the_first_batch() -> None:
    state, actions = run(State(capacity=CAPACITY), Ticked())
    assert asked(actions) == [0]  # a sign of life before there is an engine
    state, actions = run(state, Verified(root=root_of(1), version=1))
    assert actions == []  # the engine is still starting
    state, actions = run(state, EngineUp())
    assert actions == [Load()]
    state, actions = run(state, Loaded(root=root_of(1)), NotAnswered(why="", retry_s=0))
    assert asked(actions) == [4]
    state, actions = run(state, Answered(leases=(make_lease(), make_lease())))
    assert generated(actions) == [2]
    assert asked(actions) == [4]  # the next batch is asked for while this one runs
    assert waiting_for(state, 0.0) == ""


def test_a_batch_is_bounded_by_the_engine_and_the_rest_waits_in_order() -> None:
    leases = tuple(make_lease() for _ in range(6))
    state, actions = run(ready(), Answered(leases=leases))
    assert [a.leases for a in actions if isinstance(a, Generate)] == [leases[:4]]
    assert [taken.lease for taken in state.queue] == list(leases[4:])
    done = made(leases[:4])
    state, actions = run(state, *done, BatchEnded(tokens=100), now=2.0)
    assert [a.leases for a in actions if isinstance(a, Generate)] == [leases[4:]]


def test_a_lease_larger_than_the_engine_still_runs_alone() -> None:
    _state, actions = run(ready(), Answered(leases=(make_lease(samples=64), make_lease())))
    assert generated(actions) == [1]


def test_new_weights_drain_the_batch_return_the_queue_and_are_loaded_next() -> None:
    leases = tuple(make_lease() for _ in range(6))
    state, _ = run(ready(), Answered(leases=leases))
    state, actions = run(state, Verified(root=root_of(2), version=2))
    assert returned(actions) == {"node.weights": 2}
    assert not any(isinstance(action, Load | CancelBatch) for action in actions)
    fresh = make_lease(version=2)
    state, actions = run(state, Answered(leases=(fresh,)))
    assert generated(actions) == []
    done = made(leases[:4])
    state, actions = run(state, *done, BatchEnded(tokens=100), now=2.0)
    assert Load() in actions and generated(actions) == []
    state, actions = run(state, Loaded(root=root_of(2)), now=2.1)
    assert [a.leases for a in actions if isinstance(a, Generate)] == [(fresh,)]


def test_a_lease_for_weights_on_their_way_is_kept_a_while_and_then_returned() -> None:
    ahead = make_lease(version=3, duration_s=100)
    state, actions = run(ready(), Answered(leases=(ahead,)))
    assert returned(actions) == {} and generated(actions) == []
    assert "version 3" in waiting_for(state, 0.0)
    assert next_tick(state) <= 25.0
    _later, actions = run(state, Ticked(), now=25.0)
    assert returned(actions) == {"node.weights": 1}
    state, actions = run(state, Verified(root=root_of(3), version=3), Loaded(root=root_of(3)), now=10.0)
    assert generated(actions) == [1]


def test_a_lease_of_older_weights_goes_back_at_once() -> None:
    _state, actions = run(ready(version=5), Answered(leases=(make_lease(version=4),)))
    assert returned(actions) == {"node.weights": 1} and generated(actions) == []


def test_the_same_root_under_a_newer_version_is_used_without_a_load() -> None:
    state = ready(version=1)
    rolled_back = make_lease(version=1)
    state, actions = run(state, Verified(root=root_of(1), version=9), Answered(leases=(rolled_back,)))
    assert generated(actions) == [1] and Load() not in actions


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
    assert asked(actions) == [4]


def test_new_weights_end_a_wait() -> None:
    state, _ = run(ready(), Answered(wait_s=60, why="the step is full"))
    state, actions = run(state, Verified(root=root_of(2), version=2), now=1.0)
    assert asked(actions) == [4]


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
    assert generated(actions) == [1]


def test_leases_that_expire_at_once_are_returned_without_a_busy_loop() -> None:
    state, now, asks = ready(), 0.0, 0
    for _ in range(200):
        if state.asking:
            asks += 1
            state, actions = run(state, Answered(leases=(make_lease(version=2, duration_s=1e-9),)), now=now)
            assert generated(actions) == []
        now = next_tick(state)
        state, _ = run(state, Ticked(), now=now)
    assert now > 200 and asks < 200


def test_no_more_than_fits_into_a_duration() -> None:
    state = replace(ready(), batch_s=100.0, duration_s=110.0)
    state, actions = run(state, Answered(leases=tuple(make_lease(duration_s=110) for _ in range(3))))
    assert generated(actions) == [3]
    assert asked(actions) == []  # a second batch would end after 200 s
    slow = replace(ready(), batch_s=400.0, duration_s=110.0, asking=False)
    _, actions = run(slow, Ticked())
    assert asked(actions) == [1]


def test_the_next_batch_begins_while_the_last_results_are_written() -> None:
    leases = tuple(make_lease() for _ in range(8))
    state, _ = run(ready(), Answered(leases=leases))
    state, actions = run(state, *(LeaseMade(lease_id=lease.lease_id) for lease in leases[:4]), BatchEnded(tokens=9))
    assert generated(actions) == [4] and state.leases_open == 8
    state, actions = run(state, LeaseDone(lease_id=leases[0].lease_id), LeaseSpoiled(lease_id=leases[1].lease_id))
    assert returned(actions) == {"node.engine": 1} and state.leases_open == 6
    state, actions = run(state, EngineDown(why="gone"))
    assert returned(actions) == {"node.engine": 4}  # what is being written needs no engine


def test_a_stop_waits_for_results_that_are_being_written() -> None:
    lease = make_lease()
    state, _ = run(ready(), Answered(leases=(lease,)), LeaseMade(lease_id=lease.lease_id), BatchEnded(tokens=9))
    state, actions = run(state, StopAsked(grace_s=5.0))
    assert actions == []
    state, actions = run(state, LeaseDone(lease_id=lease.lease_id))
    assert actions == [Stopped()]


def test_a_dead_engine_gives_everything_back_and_takes_nothing() -> None:
    state, _ = run(ready(), Answered(leases=tuple(make_lease() for _ in range(6))))
    first = state.batch[0].lease
    state, actions = run(state, *made([first]), EngineDown(why="it was killed"))
    assert returned(actions) == {"node.engine": 5}
    assert waiting_for(state, 0.0) == "it was killed"
    state, actions = run(state, NotAnswered(why="", retry_s=0), Ticked(), now=10.0)
    assert asked(actions) == [0]
    state, actions = run(state, Loaded(root=root_of(1)), EngineUp(), now=11.0)
    assert actions == [Load()]  # the word of the dead engine counts for nothing
    state, actions = run(state, Loaded(root=root_of(1)), Answered(), now=11.0)
    assert asked(actions) == [4]


def test_a_batch_that_fails_goes_back_and_slows_the_asking() -> None:
    state, _ = run(ready(), Answered(leases=(make_lease(),)))
    state, actions = run(state, Answered(leases=(make_lease(),)), BatchEnded(tokens=0), now=1.0)
    assert returned(actions) == {"node.engine": 1}
    state, actions = run(state, BatchEnded(tokens=0), now=1.0)
    assert returned(actions) == {"node.engine": 1}
    assert state.ask_after > 1.0


def test_weights_that_change_while_they_are_loaded_are_loaded_again() -> None:
    state, actions = run(ready(), Verified(root=root_of(2), version=2))
    assert Load() in actions
    state, actions = run(state, Verified(root=root_of(3), version=3), Answered(leases=(make_lease(version=3),)))
    assert actions == [Ask(groups=3)]
    state, actions = run(state, Loaded(root=root_of(2)))
    assert actions == [Load()]
    state, actions = run(state, Loaded(root=root_of(3)))
    assert generated(actions) == [1]


def test_pause_returns_the_queue_and_lets_the_batch_end() -> None:
    leases = tuple(make_lease() for _ in range(6))
    state, _ = run(ready(), Answered(leases=leases))
    state, actions = run(state, Held(why="paused by the learner"))
    assert returned(actions) == {"node.paused": 2}
    done = made(leases[:4])
    state, actions = run(state, Answered(), *done, BatchEnded(tokens=10), now=5.0)
    assert waiting_for(state, 5.0) == "paused by the learner"
    state, actions = run(state, Held(why=""), Answered(), now=20.0)
    assert asked(actions) == [4]


def test_drain_generates_what_is_in_hand_and_takes_no_more() -> None:
    leases = tuple(make_lease() for _ in range(6))
    state, _ = run(ready(), Answered(leases=leases))
    state, actions = run(state, Answered(), Held(why="the run is ending", drain=True), now=4.0)
    assert returned(actions) == {} and asked(actions) == [0]
    done = made(leases[:4])
    state, actions = run(state, *done, BatchEnded(tokens=10), now=5.0)
    assert generated(actions) == [2]


def test_a_polite_stop_waits_for_a_batch_that_is_nearly_done() -> None:
    state = replace(ready(), batch_s=10.0)
    leases = tuple(make_lease() for _ in range(6))
    state, _ = run(state, Answered(leases=leases))
    state, actions = run(state, StopAsked(grace_s=5.0), now=8.0)
    assert returned(actions) == {"node.stopping": 2} and CancelBatch() not in actions
    state, actions = run(state, *made(leases[:4]), now=10.0)
    assert Stopped() in actions


def test_a_polite_stop_ends_a_batch_that_has_only_begun() -> None:
    state = replace(ready(), batch_s=100.0)
    state, _ = run(state, Answered(leases=tuple(make_lease() for _ in range(6))))
    state, actions = run(state, StopAsked(grace_s=5.0), now=8.0)
    ids = [lease_id for a in actions if isinstance(a, GiveBack) for lease_id in a.lease_ids]
    assert len(ids) == len(set(ids)) == 6
    assert CancelBatch() in actions and actions[-1] == Stopped()


def test_a_polite_stop_has_a_deadline() -> None:
    state = replace(ready(), batch_s=10.0)
    state, _ = run(state, Answered(leases=(make_lease(),) * 1))
    state, actions = run(state, StopAsked(grace_s=5.0), now=8.0)
    assert Stopped() not in actions
    assert next_tick(state) == 13.0
    state, actions = run(state, Ticked(), now=13.0)
    assert returned(actions) == {"node.stopping": 1} and Stopped() in actions


def test_an_idle_worker_stops_at_once_and_returns_late_answers() -> None:
    state, actions = run(ready(), StopAsked(grace_s=5.0))
    assert actions == [Stopped()]
    state, actions = run(state, Answered(leases=(make_lease(),)))
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
        flood = tuple(make_lease(version=2, duration_s=3600) for _ in range(16))
        state, actions = run(state, Answered(leases=flood), now=now)
        back += returned(actions).get("lease.limits", 0)
        assert state.leases_open == CAPACITY.groups
        now += limits.HEARTBEAT_S
        state, _ = run(state, Ticked(), now=now)
    assert back == 20 * 16 - CAPACITY.groups


# --- any order of events ---------------------------------------------------------------------------------------------
class Ledger:
    """Plays a worker's surroundings and holds the invariants while hypothesis chooses what happens."""

    def __init__(self) -> None:
        self.state = State(capacity=CAPACITY)
        self.now = 0.0
        self.version = 0
        self.open: set[bytes] = set()
        self.running: set[bytes] = set()
        self.requests = 0
        self.alive = True

    def feed(self, event: Event) -> None:
        if isinstance(event, LeaseMade):
            self.running.discard(event.lease_id)
        if isinstance(event, LeaseDone):
            self.open.discard(event.lease_id)
        self.state, actions = advance(self.state, event, self.now)
        for action in actions:
            self._obey(action)
        held = (*self.state.queue, *self.state.batch, *self.state.finishing)
        assert {taken.lease.lease_id for taken in held} == self.open and self.state.leases_open == len(self.open)
        assert len(self.state.queue) + len(self.state.batch) <= CAPACITY.groups
        assert self.requests in (0, 1)

    def _obey(self, action: Action) -> None:
        match action:
            case Ask(groups=groups):
                self.requests += 1
                assert 0 <= groups <= CAPACITY.groups
            case Generate(leases=leases):
                assert self.state.activity == "generating" and not self.running
                assert leases and {lease.root for lease in leases} == {self.state.loaded} == {self.state.verified}
                assert sum(len(lease.samples) for lease in leases) <= CAPACITY.batch_samples or len(leases) == 1
                self.running = {lease.lease_id for lease in leases}
            case GiveBack(lease_ids=lease_ids):
                for lease_id in lease_ids:
                    self.open.remove(lease_id)  # a KeyError is a lease given back twice, or after it was done
                    self.running.discard(lease_id)
            case Load():
                assert not self.running and self.state.activity == "loading"
            case CancelBatch() | Stopped():
                pass


@given(st.data())
def test_every_lease_ends_exactly_once_whatever_happens(data: st.DataObject) -> None:
    ledger = Ledger()
    for _ in range(data.draw(st.integers(5, 40))):
        ledger.now += data.draw(st.sampled_from([0.0, 0.1, 1.0, 5.0, 200.0]))
        choices = ["tick", "verified", "hold", "down", "accepted", "loaded"]
        if ledger.state.activity == "down":
            choices += ["up", "up"]
        if ledger.requests:
            choices += ["answer", "answer", "failed"]
        if ledger.state.activity == "loading":
            choices += ["loaded", "loaded"]
        if ledger.running:
            choices += ["made", "made", "ended"]
        if ledger.state.finishing:
            choices += ["done", "spoiled"]
        match data.draw(st.sampled_from(choices)):
            case "tick":
                ledger.feed(Ticked())
            case "accepted":
                ledger.feed(Accepted())
            case "verified":
                ledger.version += 1
                ledger.feed(Verified(root=root_of(ledger.version), version=ledger.version))
            case "hold":
                ledger.feed(Held(why=data.draw(st.sampled_from(["", "paused"])), drain=data.draw(st.booleans())))
            case "down":
                ledger.running = set()
                ledger.feed(EngineDown(why="gone"))
            case "answer":
                ledger.requests -= 1
                versions = data.draw(st.lists(st.integers(max(1, ledger.version - 1), ledger.version + 1), max_size=5))
                leases = tuple(make_lease(version=v, duration_s=data.draw(st.sampled_from([1, 600]))) for v in versions)
                ledger.open |= {lease.lease_id for lease in leases}
                ledger.feed(Answered(leases=leases, wait_s=data.draw(st.sampled_from([None, 0.0, 10.0]))))
            case "failed":
                ledger.requests -= 1
                ledger.feed(NotAnswered(why="lost", retry_s=data.draw(st.sampled_from([0.0, 3.0]))))
            case "loaded":
                ledger.feed(Loaded(root=root_of(data.draw(st.integers(max(0, ledger.version - 1), ledger.version)))))
            case "up":
                ledger.feed(EngineUp())
            case "made":
                ledger.feed(LeaseMade(lease_id=data.draw(st.sampled_from(sorted(ledger.running)))))
            case "done" | "spoiled" as end:
                finishing = sorted(taken.lease.lease_id for taken in ledger.state.finishing)
                lease_id = data.draw(st.sampled_from(finishing))
                ledger.feed(LeaseDone(lease_id=lease_id) if end == "done" else LeaseSpoiled(lease_id=lease_id))
            case "ended":
                ledger.running = set()
                ledger.feed(BatchEnded(tokens=data.draw(st.integers(0, 100))))
        assert next_tick(ledger.state) > ledger.now or ledger.state.asking or _has_progress(ledger)
    ledger.feed(StopAsked(grace_s=1.0))
    for taken in ledger.state.finishing:
        ledger.feed(LeaseDone(lease_id=taken.lease.lease_id))
    ledger.now += 1.0
    ledger.feed(Ticked())
    assert ledger.state.stopped and not ledger.open


def _has_progress(ledger: Ledger) -> bool:
    """A tick that is due now must change something, or the caller would spin."""
    state, actions = advance(ledger.state, Ticked(), ledger.now)
    return bool(actions) or state != ledger.state


@pytest.mark.parametrize("activity", ["down", "idle", "loading"])
def test_there_is_always_a_sentence_for_waiting(activity: str) -> None:
    assert waiting_for(State(capacity=CAPACITY, activity=activity), 0.0)  # type: ignore[arg-type]


def test_the_module_is_pure() -> None:
    assert not {"time", "trio", "random", "os"} & set(vars(decisions))
