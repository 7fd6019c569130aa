"""Honest nodes in one process: ``python -m tests.lab.flood_honest JOIN NODES RATE``.

Each takes leases ahead and hands in a signed result RATE times a second, at set moments, whatever became of the one
before: what waits counts as waiting. Besides, a newcomer knocks every few seconds: connection, hello, and gone. One
JSON object a line on stdin, ``{"seconds": ...}``; the answer holds the latencies of that time in seconds, and what went
wrong. Answers are letters that nobody sampled: the run must not audit.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import trio

from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.lease import Lease
from tests.support.attacker import Attacker, open_attacker, result_of

AHEAD = 12
"""Leases that a node keeps in hand."""
NEWCOMER_S = 3.0
DEADLINE_S = 30.0


@dataclass
class Tally:
    """What was seen since the last report."""

    submits: list[float] = field(default_factory=list)
    leases: list[float] = field(default_factory=list)
    joins: list[float] = field(default_factory=list)
    lost_links: int = 0
    starved: int = 0
    """Moments at which a node had nothing to hand in."""
    failures: dict[str, int] = field(default_factory=dict)

    def failed(self, what: str, error: Exception) -> None:
        text = error.code if isinstance(error, Refused) else type(error).__name__
        name = f"{what}: {text}"
        self.failures[name] = self.failures.get(name, 0) + 1


@dataclass
class HonestNode:
    """One node that keeps to every rule."""

    join: str
    rate: float
    world: World
    hand: deque[Lease] = field(default_factory=deque)

    async def live(self) -> None:
        while True:
            with contextlib.suppress(LinkLost, trio.TooSlowError):
                async with open_attacker(self.join) as one, trio.open_nursery() as nursery:
                    nursery.start_soon(self._take, one)
                    nursery.start_soon(self._hand_in, one, nursery)
                    await one.mesh.wait_link_lost(one.learner)
                    self.world.tally.lost_links += 1
                    nursery.cancel_scope.cancel()
            self.hand.clear()
            await trio.sleep(0.2)

    async def _take(self, one: Attacker) -> None:
        while True:
            if len(self.hand) < AHEAD:
                began = time.monotonic()
                try:
                    answer = await one.request_work(4)
                    self.world.tally.leases.append(time.monotonic() - began)
                    self.hand.extend(one.open_lease(sealed) for sealed in answer.leases)
                except (Refused, LinkLost) as error:
                    self.world.tally.failed("lease", error)
            await trio.sleep(0.25)

    async def _hand_in(self, one: Attacker, nursery: trio.Nursery) -> None:
        due = trio.current_time()
        while True:
            due += 1 / self.rate
            await trio.sleep_until(due)
            if self.hand:
                nursery.start_soon(self._submit, one, self.hand.popleft())
            else:
                self.world.tally.starved += 1

    async def _submit(self, one: Attacker, lease: Lease) -> None:
        sealed = one.seal(result_of(lease).encode())
        tally, began = self.world.tally, time.monotonic()
        try:
            receipt = await one.send(sealed)
        except (Refused, LinkLost) as error:
            tally.failed("submit", error)
        else:
            if receipt.code not in (None, "lease.expired"):
                tally.failed("submit", Refused(receipt.code))
        tally.submits.append(time.monotonic() - began)


class World:
    """All nodes, and the tally that they share."""

    def __init__(self, join: str) -> None:
        self.join = join
        self.tally = Tally()

    async def newcomers(self) -> None:
        while True:
            began = time.monotonic()
            try:
                with trio.fail_after(DEADLINE_S):
                    async with open_attacker(self.join, hello=False) as one:
                        await one.hello(role="seed", engine=None)
                        self.tally.joins.append(time.monotonic() - began)
            except (Refused, LinkLost, trio.TooSlowError) as error:
                self.tally.failed("join", error)
            await trio.sleep(NEWCOMER_S)

    async def obey(self) -> None:
        stdin = trio.lowlevel.FdStream(os.dup(sys.stdin.fileno()))
        heard = b""
        async for piece in stdin:
            *lines, heard = (heard + piece).split(b"\n")
            for line in lines:
                self.tally = Tally()
                await trio.sleep(json.loads(line)["seconds"])
                print(json.dumps(vars(self.tally)), flush=True)


async def main(join: str, nodes: int, rate: float) -> None:
    world = World(join)
    async with trio.open_nursery() as nursery:
        for _ in range(nodes):
            nursery.start_soon(HonestNode(join, rate, world).live)
        nursery.start_soon(world.newcomers)
        print(json.dumps({"ready": True}), flush=True)
        await world.obey()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
