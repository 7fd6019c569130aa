"""The door: who comes in next, what a flood in front of it costs others, and who is turned away."""

from __future__ import annotations

from collections import Counter

import trio

from rollmesh_peer.mesh import doorway as doorway_module
from rollmesh_peer.mesh.doorway import TOP_RANK, Doorway, Queue, Visitor
from rollmesh_protocol import limits


class Hall:
    """Visitors by name; the first letter is the peer's."""

    def __init__(self, ranks=None):
        self.ranks = ranks or {}
        self.came, self.went, self.gone = [], [], set()
        self.door = Doorway(lambda peer: self.ranks.get(peer, 0))

    def visitor(self, name, *, since=None):
        return Visitor(
            since=trio.current_time() if since is None else since,
            is_wanted=lambda: name not in self.gone,
            come_in=lambda: self.came.append(name),
            turn_away=lambda: self.went.append(name),
        )

    def knock(self, *names):
        for name in names:
            self.door.knock(name[0], self.visitor(name))


def order_of(queue):
    names = []
    while (found := queue.take()) is not None:
        found[0].come_in()
        names.append(found[1])
    return names


async def test_peers_take_turns(nursery, autojump_clock):
    hall = Hall()
    hall.knock("a1", "a2", "a3", "b1", "c1", "b2")
    nursery.start_soon(hall.door.run)
    await trio.sleep(1)
    assert hall.came == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_whoever_matters_goes_first_and_strangers_are_not_forgotten():
    hall, queue = Hall(), Queue()
    for number in range(20):
        queue.put("s", hall.visitor(f"s{number}", since=0.0), rank=0)
        queue.put("n", hall.visitor(f"n{number}", since=0.0), rank=TOP_RANK)
    ranks = order_of(queue)
    assert ranks[:8] == [TOP_RANK] * 7 + [0]
    assert Counter(ranks) == {0: 20, TOP_RANK: 20}
    assert ranks.index(0) < doorway_module._LOW_SHARE, "a stranger waits for a bounded number of others"


async def test_one_of_many_waits_for_its_turn_and_not_for_the_flood(nursery, autojump_clock):
    hall = Hall({"n": TOP_RANK})
    hall.knock(*[f"{peer}{n}" for peer in "abcdefgh" for n in range(60)])
    nursery.start_soon(hall.door.run)
    await trio.lowlevel.checkpoint()
    before = len(hall.came)
    hall.knock("n1")
    while "n1" not in hall.came:
        await trio.lowlevel.checkpoint()
    assert len(hall.came) - before <= 2


async def test_what_was_given_up_costs_no_turn(nursery, autojump_clock):
    hall = Hall()
    hall.gone = {f"a{n}" for n in range(1000)}
    hall.knock(*sorted(hall.gone), "a-last")
    nursery.start_soon(hall.door.run)
    for _ in range(3):
        await trio.lowlevel.checkpoint()
    assert hall.came == ["a-last"] and hall.went == []


async def test_who_waited_too_long_is_turned_away(nursery, autojump_clock):
    hall = Hall()
    hall.knock("a1")
    await trio.sleep(limits.DOOR_S + 1)
    hall.knock("a2")
    nursery.start_soon(hall.door.run)
    await trio.sleep(1)
    assert (hall.went, hall.came) == (["a1"], ["a2"])


async def test_a_rank_beyond_the_table_is_the_nearest():
    hall, queue = Hall(), Queue()
    queue.put("a", hall.visitor("a1", since=0.0), rank=-5)
    queue.put("b", hall.visitor("b1", since=0.0), rank=99)
    assert order_of(queue) == [TOP_RANK, 0]
