"""A node that works: joins, fetches weights, generates, follows new versions, and obeys notices."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from rollmesh_protocol.messages import Wait
from tests.integration.nodes import PATIENCE_S, image_of, open_learner, start_node, wait_for

pytestmark = pytest.mark.timeout(300)


async def test_a_node_joins_works_follows_and_ends_with_the_run(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        with start_node(tmp_path / "home", learner.mesh.addresses[0], script={"rollout_s": 0.01}) as node:
            await wait_for(learner, lambda seen: len(seen.heard.accepted) >= 5)
            first = await node.until(lambda status: status.accepted >= 5 and status.waiting_for == "")
            assert first.learner_connected and first.version_held == 1
            await learner.publish(image_of(2))
            accepted = len(learner.heard.accepted)
            await wait_for(
                learner,
                lambda seen: any(seen.leases[done].version == 2 for done in seen.heard.accepted[accepted:]),
            )
            assert {code for _, code in learner.heard.returned} <= {"node.weights"}
            await learner.notify("ended", text="all steps are done")
            assert await node.wait() == 0
            assert "the run has ended" in node.log
            assert "joined" in node.log.split("fetched")[0]  # who and what is shown before the first download


async def test_a_wait_is_shown_and_obeyed(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        learner.script.wait = Wait(seconds=3600, why="all work is given out")
        with start_node(tmp_path / "home", learner.mesh.addresses[0]) as node:
            status = await node.until(lambda status: "all work is given out" in status.waiting_for)
            assert status.version_held == 1
            asked = [request for request in learner.heard.requests if request.groups]
            assert len(asked) <= 1  # none, where the wait came with the answer to a sign of life
            await wait_for(learner, lambda seen: "all work is given out" in seen.heard.requests[-1].waiting_for)
            assert [request for request in learner.heard.requests if request.groups] == asked


async def test_pause_and_resume(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        with start_node(tmp_path / "home", learner.mesh.addresses[0], script={"rollout_s": 0.02}) as node:
            await wait_for(learner, lambda seen: len(seen.heard.accepted) >= 2)
            with trio.fail_after(PATIENCE_S):  # a notice reaches whoever has found its way into the gossip
                while "the operator sleeps" not in (await node.status()).waiting_for:
                    await learner.notify("pause", text="the operator sleeps")
                    await trio.sleep(0.5)
            before = len(learner.heard.accepted)
            await learner.notify("resume")
            await wait_for(learner, lambda seen: len(seen.heard.accepted) > before + 1)


async def test_a_seed_relays_and_generates_nothing(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        with start_node(tmp_path / "home", learner.mesh.addresses[0], settings=("node.role=seed",)) as node:
            await node.until(lambda status: status.version_held == 1)
            assert learner.heard.hellos[0].role == "seed" and learner.heard.hellos[0].engine is None
            assert node.engine_pids() == []
            await learner.publish(image_of(2))
            await node.until(lambda status: status.version_held == 2)
