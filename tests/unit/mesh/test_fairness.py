"""Turns: who is served next, under a virtual clock."""

from __future__ import annotations

import trio

from rollmesh_peer.mesh.fairness import Turns


async def settle():
    await trio.testing.wait_all_tasks_blocked()


class Desk:
    """Requests that hold their place until told to leave; ``served`` is the order of their turns."""

    def __init__(self, nursery, turns):
        self._nursery, self._turns = nursery, turns
        self.served = []
        self._leave = {}

    def ask(self, name):
        scope = trio.CancelScope()
        self._leave[name] = trio.Event()

        async def hold():
            with scope:
                async with self._turns.turn(name[0]):
                    self.served.append(name)
                    await self._leave[name].wait()

        self._nursery.start_soon(hold)
        return scope

    async def leave(self, name):
        self._leave[name].set()
        await settle()


async def test_peers_take_turns_however_many_requests_they_have(nursery, autojump_clock):
    desk = Desk(nursery, Turns(places=1, per_peer=1))
    for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2"):
        desk.ask(name)
        await settle()
    for name in ("a1", "a2", "b1", "c1", "a3", "b2", "a4"):
        assert desk.served[-1] == name
        await desk.leave(name)
    assert desk.served == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_nobody_holds_more_than_its_share(nursery, autojump_clock):
    turns = Turns(places=3, per_peer=2)
    desk = Desk(nursery, turns)
    for name in ("a1", "a2", "a3", "b1"):
        desk.ask(name)
        await settle()
    assert desk.served == ["a1", "a2", "b1"]
    assert turns.num_waiting() == 1
    await desk.leave("b1")
    assert desk.served == ["a1", "a2", "b1"]  # a place is free, and a has had its share
    await desk.leave("a1")
    assert desk.served == ["a1", "a2", "b1", "a3"]
    for name in ("a2", "a3"):
        await desk.leave(name)


async def test_whoever_gives_up_leaves_no_gap(nursery, autojump_clock):
    turns = Turns(places=1, per_peer=1)
    desk = Desk(nursery, turns)
    scopes = {}
    for name in ("a1", "b1", "c1"):
        scopes[name] = desk.ask(name)
        await settle()
    scopes["b1"].cancel()
    await settle()
    scopes["a1"].cancel()
    await settle()
    assert desk.served == ["a1", "c1"]
    await desk.leave("c1")
    assert turns.num_waiting() == 0
    assert turns._free == 1
    assert not turns._held
