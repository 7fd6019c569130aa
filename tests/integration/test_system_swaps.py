"""Leases that allow swaps, through the real wire: what is honest is audited segment by segment and trained on.

All work is done by nodes of the test's own, so that the run takes a step, and publishes, exactly when a test says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio

from rollmesh_protocol.lease import Lease
from rollmesh_protocol.rollout import Result, Segment
from tests.support.attacker import Attacker, Studio, open_attacker, open_studio, result_of, sample_of
from tests.support.pen import Part, Pen
from tests.support.system import System, open_system

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
CUT = 128
SETTINGS = (
    "rollouts.groups_per_step=1",
    "rollouts.max_new_tokens=288",
    "rollouts.staleness=4",
    'leases.swap_modes=["drain","recompute"]',
    "leases.recompute_from=256",
    "leases.min_duration_s=60",
    "leases.max_duration_s=120",
    "leases.cap=1",
    "training.checkpoint_every=1",
    "training.kl=0.3",  # else a step whose rewards are all alike changes nothing, and nothing is published
    "training.lr=1e-2",  # one step moves the weights so far that the wrong ones show within a segment
)


@dataclass
class Stage:
    """The run, the weights as a node follows them, and a pen that draws under any of them."""

    system: System
    join: str
    studio: Studio
    pen: Pen

    async def draw(self, lease: Lease, *parts: Part) -> Result:
        chosen = parts or (self.part(0, lease.root),)
        stop = frozenset(self.studio.card.stop_tokens)
        return await trio.to_thread.run_sync(partial(self.pen.answer, lease, chosen, stop=stop))

    def part(self, first: int, drawn: bytes, *, named: bytes | None = None) -> Part:
        return Part(first, self.studio.images[drawn], named or drawn)

    async def settle(self) -> None:
        """Until nothing that was handed in waits, and the newest weights are here."""
        waiting = (
            "SELECT 1 FROM rollouts r JOIN groups g ON g.group_id = r.group_id WHERE g.state != 'consumed'"
            " AND r.state IN ('scoring', 'auditing', 'assigned') LIMIT 1"
        )
        with trio.fail_after(120):
            while self.system.rows(waiting) or not self._is_at_head():
                await trio.sleep(0.1)

    def _is_at_head(self) -> bool:
        ((root,),) = self.system.rows(
            "SELECT root FROM versions WHERE state = 'published' ORDER BY version DESC LIMIT 1"
        )
        return root == self.studio.newest

    async def overtake(self, *nodes: Attacker) -> list[Lease]:
        """A lease for each of the nodes, given before the newest weights were out.

        A step changes nothing if its rewards are all alike; then all is handed in, and it begins anew: who holds a
        lease for long is overtaken.
        """
        while True:
            await self.settle()
            async with open_attacker(self.join) as worker:
                early = await worker.take_lease(root=lambda: self.studio.newest)
                leases = [await node.take_lease(root=lambda: self.studio.newest) for node in nodes]
                before = len(self.studio.images)
                receipt = await worker.submit(await self.draw(early))
                assert receipt.code is None, receipt
                with trio.move_on_after(45):
                    await self.studio.wait_for(before + 1)
                    assert all(lease.root == early.root != self.studio.newest for lease in leases)
                    return leases
            for node, lease in zip(nodes, leases, strict=True):
                await node.submit(await self.draw(lease))


@pytest.fixture
async def stage(run: System, tmp_path: Path):
    join = await run.join_line()
    async with open_attacker(join, gossip=True) as scout, open_studio(scout, tmp_path / "studio") as studio:
        assert scout.card is not None
        pen = await trio.to_thread.run_sync(lambda: Pen(json.loads(studio.card.model.config), studio.card.layout))
        yield Stage(run, join, studio, pen)
    assert "Traceback" not in run.learner.log, run.learner.tail(200)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with open_system(tmp_path_factory.mktemp("swaps"), *SETTINGS, steps=1_000_000) as system:
        yield system


def is_long(result: Result) -> bool:
    return any(len(sample.segments) > 1 for sample in result.samples)


async def test_a_rollout_of_two_segments_is_accepted_audited_and_trained_on(stage: Stage) -> None:
    async with open_attacker(stage.join) as node:
        while True:
            (lease,) = await stage.overtake(node)
            assert lease.swap_mode == "recompute" and "recompute" in stage.studio.card.swap_modes
            new = stage.studio.newest
            result = await stage.draw(lease, stage.part(0, lease.root), stage.part(CUT, new))
            receipt = await node.submit(result)
            assert (receipt.code, len(receipt.accepted)) == (None, 4), receipt
            if is_long(result):
                break
        await stage.settle()
        mine = stage.system.rows(
            "SELECT r.sample, r.state, a.verdict, a.largest, r.version, length(r.tokens), r.exact_logprobs, r.logprobs"
            " FROM rollouts r JOIN audits a ON a.lease_id = r.lease_id AND a.sample = r.sample WHERE r.lease_id = ?",
            lease.lease_id,
        )  # fmt: skip
        assert len(mine) == 4
        for _, state, verdict, largest, version, length, exact, claimed in mine:
            assert state in ("assigned", "consumed") and verdict == "pass" and largest < 1.0
            assert version == lease.version, "its age is that of its oldest tokens"
            gaps = np.abs(np.frombuffer(exact, "<f4") - np.frombuffer(claimed, "<f4"))
            assert len(exact) == length and gaps.max() < 0.5
        stretches = stage.system.rows(
            "SELECT sample, first_token, root FROM stretches WHERE lease_id = ? ORDER BY sample", lease.lease_id
        )
        long = [sample for sample in result.samples if len(sample.segments) > 1]
        assert stretches == [(sample.index, CUT, new) for sample in long]


async def test_swaps_that_no_lease_allows_are_refused_with_their_code(stage: Stage) -> None:
    async with (
        open_attacker(stage.join) as a,
        open_attacker(stage.join) as b,
        open_attacker(stage.join) as c,
        open_attacker(stage.join) as d,
    ):
        leases = await stage.overtake(a, b, c, d)
        assert stage.studio.card is not None
        old, new, base = leases[0].root, stage.studio.newest, stage.studio.card.model.base_root
        assert len({old, new, base}) == 3
        cheats = {
            "a boundary at 64": (a, "result.schema", ((0, old), (64, new))),
            "twice for one version": (b, "result.root", ((0, old), (128, new), (256, new))),
            "backwards": (c, "result.root", ((0, new), (128, old))),
            "the base model": (d, "result.root", ((0, old), (128, base))),
        }
        found: dict[str, str | None] = {}
        for (what, (node, _, segments)), lease in zip(cheats.items(), leases, strict=True):
            told = tuple(Segment(first_token=first, root=root) for first, root in segments)
            samples = [sample_of(lease, sample.index, segments=told) for sample in lease.samples]
            found[what] = (await node.submit(result_of(lease, samples))).code
        assert found == {what: code for what, (_, code, _) in cheats.items()}


async def test_old_weights_under_a_newer_name_are_caught_by_the_audit(stage: Stage) -> None:
    """Only behind the boundary: everything before it is what was ordered."""
    async with open_attacker(stage.join) as node:
        while True:
            (lease,) = await stage.overtake(node)
            old, new = lease.root, stage.studio.newest
            result = await stage.draw(lease, stage.part(0, old), stage.part(CUT, old, named=new))
            assert (await node.submit(result)).code is None
            if is_long(result):
                break
        with trio.fail_after(150):
            while not (found := stage.system.rows("SELECT detail FROM offences WHERE peer = ?", node.peer)):
                await trio.sleep(0.1)
        assert "below" in found[0][0]
        standing = await stage.system.until_run(
            lambda run: any(p.peer == node.peer and p.standing.state == "quarantined" for p in run.peers)
        )
        assert standing
        audits = dict(stage.system.rows("SELECT sample, verdict FROM audits WHERE lease_id = ?", lease.lease_id))
        long = {sample.index for sample in result.samples if len(sample.segments) > 1}
        assert {index for index, verdict in audits.items() if verdict != "pass"} <= long
        node.held.clear()
