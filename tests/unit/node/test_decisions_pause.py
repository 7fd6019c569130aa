"""The owner's pause in the decisions: everything goes back at once, nothing is taken, and afterwards all goes on."""

from __future__ import annotations

from rollmesh_node.capacity import Capacity
from rollmesh_node.events import (
    Abandon,
    Add,
    Answered,
    Ask,
    EngineDown,
    EngineRests,
    EngineUp,
    Generate,
    GiveBack,
    LeaseDone,
    Load,
    Loaded,
    Paused,
    SampleMade,
    StopAsked,
    Stopped,
    Ticked,
    Verified,
)
from rollmesh_node.in_hand import State, waiting_for
from tests.unit.node.deciding import run
from tests.unit.node.leases import make_lease, root_of

CAPACITY = Capacity(batch_samples=8, groups=8, group_samples=4)


def working() -> State:
    """Two leases in the engine, one of them half made, and one that waits."""
    state, _ = run(State(capacity=CAPACITY), EngineUp(), Verified(root=root_of(1), version=1), Loaded(root=root_of(1)))
    leases = tuple(make_lease() for _ in range(3))
    state, actions = run(state, Answered(leases=leases))
    assert sum(len(action.leases) for action in actions if isinstance(action, Add)) == 2
    state, _ = run(state, SampleMade(lease_id=leases[0].lease_id))
    return state


def test_everything_goes_back_at_once_with_the_owners_code() -> None:
    state, actions = run(working(), Paused(why="the owner"))
    given = [action for action in actions if isinstance(action, GiveBack)]
    assert [action.code for action in given] == ["node.paused"] and len(given[0].lease_ids) == 3
    assert Abandon() in actions and state.leases_open == 0
    state, actions = run(state, EngineRests(), EngineDown(why="stopped"), Ticked(), now=1.0)
    assert not [action for action in actions if isinstance(action, Generate | Load | Add | GiveBack)]
    assert waiting_for(state, 1.0) == "the owner"


def test_a_lease_that_was_made_before_is_still_sent() -> None:
    state = working()
    lease_id = state.running[0].lease.lease_id
    state, _ = run(state, *(SampleMade(lease_id=lease_id) for _ in range(3)))
    assert len(state.finishing) == 1
    state, actions = run(state, Paused(why="the owner"))
    (given,) = (action for action in actions if isinstance(action, GiveBack))
    assert lease_id not in given.lease_ids and len(state.finishing) == 1
    state, _ = run(state, LeaseDone(lease_id=lease_id))
    assert state.leases_open == 0


def test_nothing_is_taken_or_asked_for_while_it_lasts() -> None:
    state, _ = run(working(), Paused(why="the owner"), EngineDown(why="stopped"))
    late = make_lease()
    state, actions = run(state, Answered(leases=(late,)), now=2.0)
    assert GiveBack(lease_ids=(late.lease_id,), code="node.paused") in actions
    state, actions = run(state, Ticked(), now=1000.0)
    assert [action.groups for action in actions if isinstance(action, Ask)] == [0]  # a sign of life


def test_the_node_goes_on_after_it() -> None:
    state, _ = run(working(), Paused(why="the owner"), EngineRests(), EngineDown(why="stopped"))
    state, _ = run(state, Answered(), Paused(why=""), now=5.0)
    state, actions = run(state, EngineUp(), now=6.0)
    assert Load() in actions
    state, actions = run(state, Loaded(root=root_of(1)), now=7.0)
    assert Generate() in actions
    _, actions = run(state, Answered(), now=8.0)  # to the sign of life that was on its way
    assert any(isinstance(action, Ask) and action.groups for action in actions)


def test_a_paused_node_can_stop() -> None:
    state, _ = run(working(), Paused(why="the owner"), EngineDown(why="stopped"))
    _, actions = run(state, StopAsked(grace_s=10.0), now=3.0)
    assert Stopped() in actions


def test_no_work_is_asked_for_before_the_first_load() -> None:
    _, actions = run(State(capacity=CAPACITY), EngineUp(), Verified(root=root_of(1), version=1))
    assert [action.groups for action in actions if isinstance(action, Ask)] == [0]
