"""How a node stops: politely, at once, or killed; and what the learner has afterwards."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import trio

from tests.integration.nodes import is_running, open_learner, start_node, wait_for

pytestmark = pytest.mark.timeout(300)


async def test_ctrl_c_gives_leases_back_and_sends_what_is_finished(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        learner.script.max_new_tokens = 4
        with start_node(tmp_path / "home", learner.mesh.addresses[0], script={"rollout_s": 2.0}) as node:
            await wait_for(learner, lambda seen: len(seen.open) >= 4)
            await node.until(lambda status: status.waiting_for == "" and status.leases_open >= 4)
            engines = node.engine_pids()
            started = time.monotonic()
            node.signal(signal.SIGINT)
            assert await node.wait() == 0
            assert time.monotonic() - started < 35
            assert learner.open == set(), node.log
            assert {code for _, code in learner.heard.returned} == {"node.stopping"}
            assert "stopping politely" in node.log and "stopped" in node.log
            assert engines and not any(map(is_running, engines))


async def test_ctrl_c_waits_for_a_batch_that_is_nearly_done(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        with start_node(tmp_path / "home", learner.mesh.addresses[0], script={"rollout_s": 0.05}) as node:
            await wait_for(learner, lambda seen: len(seen.heard.accepted) >= 8)
            before = len(learner.heard.accepted)
            node.signal(signal.SIGTERM)
            assert await node.wait() == 0
            assert learner.open == set(), node.log
            assert len(learner.heard.accepted) > before  # the batch that was running was finished, not thrown away
            given = len(learner.leases)
            assert len(learner.heard.accepted) + len(learner.heard.returned) == given


async def test_a_second_ctrl_c_ends_at_once_and_leaves_no_child(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        with start_node(tmp_path / "home", learner.mesh.addresses[0], script={"rollout_s": 1.0}) as node:
            await node.until(lambda status: status.waiting_for == "" and status.leases_open >= 1)
            engines = node.engine_pids()
            assert engines
            learner.script.lose_receipts = 1000  # a polite stop would now take a while
            await wait_for(learner, lambda seen: seen.heard.submitted)
            node.signal(signal.SIGINT)
            await node.until_logged("stopping politely")
            started = time.monotonic()
            node.signal(signal.SIGINT)
            assert await node.wait() == 128 + signal.SIGINT
            assert time.monotonic() - started < 6.0
            with trio.fail_after(20):
                while any(map(is_running, engines)):
                    await trio.sleep(0.02)


async def test_ctrl_c_while_nobody_answers(tmp_path: Path) -> None:
    join = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWSyk9G7d4Ay8rE64h4nKeVMQHQbcA97hchmuMmXruPXT4"
    with start_node(tmp_path / "home", join) as node:
        status = await node.until(lambda status: "does not answer" in status.waiting_for)
        assert not status.learner_connected and status.head is None
        await node.until_logged("waiting")
        assert "does not answer" in node.log
        node.signal(signal.SIGINT)
        assert await node.wait(30) == 0


@pytest.mark.parametrize("point", ["node.result_durable", "node.receipt_came"])
async def test_dying_around_a_receipt_loses_nothing_and_counts_nothing_twice(tmp_path: Path, point: str) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        learner.script.most_open = 1
        home = tmp_path / "home"
        with start_node(home, learner.mesh.addresses[0], fault=f"{point}:1:kill") as node:
            assert await node.wait() == -signal.SIGKILL
        (kept,) = home.glob("node/runs/*/results/*.result")
        lease_id, raw = bytes.fromhex(kept.stem), kept.read_bytes()
        assert learner.heard.submitted == ([(lease_id, raw)] if point == "node.receipt_came" else [])
        with start_node(home, learner.mesh.addresses[0]) as node:
            await wait_for(learner, lambda seen: len(seen.heard.accepted) >= 3)
            again = [sent for sent in learner.heard.submitted if sent[0] == lease_id]
            assert again and all(sent == (lease_id, raw) for sent in again)
            assert learner.heard.accepted.count(lease_id) == 1
            await node.until(lambda status: status.accepted >= 4 and status.rejected == 0)


async def test_a_result_survives_kill_9_and_gets_its_receipt_once(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        learner.script.lose_receipts = 1000
        learner.script.most_open = 2
        home = tmp_path / "home"
        with start_node(home, learner.mesh.addresses[0]) as node:
            await wait_for(learner, lambda seen: len(seen.heard.submitted) >= 2)
            node.signal(signal.SIGKILL)
            await node.wait()
        sent = dict(learner.heard.submitted)
        spooled = {path.stem: path.read_bytes() for path in home.glob("node/runs/*/results/*.result")}
        assert spooled and all(sent.get(bytes.fromhex(name), raw) == raw for name, raw in spooled.items())
        learner.script.lose_receipts = 0
        learner.heard.submitted.clear()
        with start_node(home, learner.mesh.addresses[0]) as node:
            wanted = {bytes.fromhex(name) for name in spooled}
            await wait_for(learner, lambda seen: wanted <= {lease_id for lease_id, _ in seen.heard.submitted})
            again = dict(learner.heard.submitted)
            assert all(again[bytes.fromhex(name)] == raw for name, raw in spooled.items())
            await node.until(lambda status: status.accepted >= 4 * len(spooled))
            assert len(learner.heard.accepted) == len(set(learner.heard.accepted))
            with trio.fail_after(60):
                while wanted & {bytes.fromhex(p.stem) for p in home.glob("node/runs/*/results/*.result")}:
                    await trio.sleep(0.05)
