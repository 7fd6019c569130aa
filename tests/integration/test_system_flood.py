"""Short floods by a few identities against a real learner: what they get is counted, what they cost is bounded.

``make lab-flood`` plays all of them, longer, and measures how long honest nodes wait meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from rollmesh_protocol import limits
from tests.lab.flood import SETTINGS
from tests.lab.flood_attackers import flood, look
from tests.lab.flood_kinds import KINDS
from tests.support.attacker import Attacker, Weight, open_attacker, result_of
from tests.support.system import System, open_system

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
IDENTITIES, SECONDS = 4, 1.5
PACE_S = 0.2
"""Between two rounds of the honest node: it keeps to its rate, as nodes do."""
MOST_ANSWERS = IDENTITIES * (limits.REQUEST_BURST + limits.MAX_REQUESTS_PER_S * (SECONDS + 1))
MOST_GROWTH_MIB = 80
FLOODS = {
    "hello": {"answered"},
    "lease, strangers": {"node.not_admitted"},
    "submit, unknown leases": {"lease.unknown"},
    "submit, one byte too large": {"request.too_large"},
    "submit, forged": {"result.signature", "lease.unknown", "node.quarantined"},
    "rapid resets": set(),
    "pings": set(),
    "windows ignored": set(),
}
"""Kinds, and what some of their requests must be answered with, if any."""
REFUSALS = {
    "node.rate", "node.not_admitted", "node.quarantined", "request.busy", "request.too_large", "request.timeout",
    "lease.unknown", "result.signature", "result.schema",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with open_system(tmp_path_factory.mktemp("flood"), *SETTINGS, steps=1_000_000) as system:
        trio.run(partial(system.learner.until_logged, "--join", timeout_s=100))
        yield system


@asynccontextmanager
async def working(system: System) -> AsyncIterator[Attacker]:
    """A node beside the flood whose results are all accepted, and whose link lasts."""
    accepted = 0

    async def work(one: Attacker) -> None:
        nonlocal accepted
        while True:
            for lease in await one.take_leases():
                receipt = await one.submit(result_of(lease))
                assert receipt.code is None, receipt
                accepted += 1
            await trio.sleep(PACE_S)

    async with open_attacker(await system.join_line()) as one, trio.open_nursery() as nursery:
        nursery.start_soon(work, one)
        while not accepted:
            await trio.sleep(0.05)
        before = accepted
        yield one
        with trio.fail_after(90):
            while accepted == before:
                await trio.sleep(0.05)
        assert one.learner in one.mesh.links()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_gets_little_and_costs_little(run: System, name: str) -> None:
    address = await run.join_line()
    weight = Weight(run.learner.pid)
    known = await look(address)
    async with working(run):
        counts = await flood(KINDS[name], address=address, identities=IDENTITIES, seconds=SECONDS, run=known)
    assert counts.get("answered", 0) <= MOST_ANSWERS
    assert counts["sent"] > 0 and (not FLOODS[name] or FLOODS[name] & counts.keys()), counts
    told = {what for what in counts if "." in what}
    assert told <= REFUSALS, counts
    assert weight.growth_mib < MOST_GROWTH_MIB
    assert run.learner.is_alive and "Traceback" not in run.learner.log, run.learner.tail(80)
