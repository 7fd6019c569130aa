"""The owner's pause of a running node: the engine is gone within seconds, and the word outlives a restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from rollmesh_protocol.status import NodeStatus
from tests.integration.nodes import NodeProcess, is_running, open_learner, start_node, wait_for

pytestmark = pytest.mark.timeout(300)

FREE_S = 10.0
"""The owner is promised half of it, on a machine that does nothing else."""


async def order(node: NodeProcess, word: str, *, expect: int = 0) -> str:
    """``rollmesh node pause`` or ``resume`` in a process of its own, as the owner types it; what it prints."""
    done = await trio.run_process(
        [sys.executable, "-m", "rollmesh_peer.command", "node", word],
        env={**os.environ, "ROLLMESH_HOME": str(node.home)},
        capture_stdout=True,
        stderr=subprocess.STDOUT,
        check=False,
    )
    text = done.stdout.decode()
    assert done.returncode == expect, text
    return text


def is_paused(status: NodeStatus) -> bool:
    return status.pause == "paused" and "paused by the owner" in status.waiting_for


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


async def test_a_pause_frees_the_memory_gives_leases_back_and_outlives_a_restart(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        address = learner.mesh.addresses[0]
        with start_node(tmp_path / "home", address, script={"rollout_s": 0.2}) as node:
            await wait_for(learner, lambda seen: seen.heard.accepted and len(seen.open) >= 2)
            (engine,) = node.engine_pids()
            assert resident_bytes(engine) > 1 << 20
            assert "memory free" in await order(node, "pause")
            assert not is_running(engine) and resident_bytes(engine) == 0 and node.engine_pids() == []
            took = next(line for line in node.log.splitlines() if "the engine's memory is free" in line)
            assert float(took.split("took_s=")[1].split()[0]) < FREE_S
            status = await node.until(lambda status: is_paused(status) and not status.leases_open)
            await wait_for(learner, lambda seen: not seen.open)
            assert {code for _, code in learner.heard.returned} == {"node.paused"}
            assert status.learner_connected and node.process.poll() is None
            node.signal(signal.SIGTERM)
            assert await node.wait() == 0
        before = list(learner.heard.accepted)
        with start_node(tmp_path / "home", address) as node:
            await node.until(lambda status: is_paused(status) and status.version_held == 1)
            assert node.engine_pids() == []
            assert learner.heard.accepted == before
            assert "goes on" in await order(node, "resume")
            await wait_for(learner, lambda seen: len(seen.heard.accepted) > len(before) + 2)
            await node.until(lambda status: status.pause == "" and "paused" not in status.waiting_for)
        assert not {lease for lease, _ in learner.heard.returned} & set(learner.heard.accepted)
        assert {lease for lease, _ in learner.heard.submitted} == set(learner.heard.accepted)


async def test_without_a_running_node_there_is_a_sentence(tmp_path: Path) -> None:
    node = NodeProcess(home=tmp_path, process=None, log_path=tmp_path / "log")  # type: ignore[arg-type]
    assert "runs on this machine" in await order(node, "pause", expect=1)
