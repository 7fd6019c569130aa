"""Events fed to a worker's decisions one after the other."""

from __future__ import annotations

from rollmesh_node.decisions import advance
from rollmesh_node.events import Action, Event
from rollmesh_node.in_hand import State


def run(state: State, *events: Event, now: float = 0.0) -> tuple[State, list[Action]]:
    """The state after ``events``, all at ``now``, and every action they led to."""
    actions: list[Action] = []
    for event in events:
        state, more = advance(state, event, now)
        actions += more
    return state, actions
