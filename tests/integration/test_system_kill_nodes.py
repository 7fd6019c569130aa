"""kill -9 and SIGSTOP of nodes, kill -9 of an engine: their samples go to others, and who comes back works again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio

from rollmesh_protocol import limits
from rollmesh_protocol.status import PeerStatus, RunStatus
from tests.support.chronicle import Chronicle
from tests.support.system import System, open_system

PATIENCE_S = 120.0
"""Of one wait; a quiet machine needs a few seconds, and DEAD_AFTER_S where a node falls silent."""
LONG = ("leases.min_duration_s=120", "leases.max_duration_s=120")
"""Leases that do not run out by themselves while the test lasts."""


@pytest.mark.timeout(600)
async def test_work_of_nodes_that_are_gone_goes_to_others(tmp_path: Path) -> None:
    with open_system(tmp_path, *LONG, steps=100_000) as system:
        chronicle = Chronicle(system)
        for name in ("north", "south"):
            await system.add_node(name)
        await system.until_run(lambda run: all(_peer(run, name, "accepted") > 0 for name in ("north", "south")),
                               timeout_s=PATIENCE_S)  # fmt: skip
        await _kill_and_start_again(system, "north")
        chronicle.look()
        await _stop_and_go_on(system, "south")
        chronicle.look()
        await _kill_the_engine(system, "north")
        chronicle.look()
        system.learner.kill(signal.SIGINT)
        assert await system.learner.wait(PATIENCE_S) == 0
        chronicle.look()
        assert "Traceback" not in system.learner.log + system.node_logs()
        assert not system.rows("SELECT code FROM offences WHERE code NOT IN ('lease.expired', 'result.stale')")
        assert system.summary()["audits_failed"] == 0


async def _kill_and_start_again(system: System, name: str) -> None:
    """A power cut at the volunteer's."""
    await system.until_run(lambda run: _leased(run, name) > 0, timeout_s=PATIENCE_S)
    system.nodes[name].kill(signal.SIGKILL)
    await system.nodes[name].wait()
    await _taken_over(system, name)
    before = await system.until_run(lambda run: True)
    system.nodes[name].start()
    await system.until_run(
        lambda run: _peer(run, name, "accepted") > _peer(before, name, "accepted"), timeout_s=PATIENCE_S
    )


async def _stop_and_go_on(system: System, name: str) -> None:
    """A PC that sleeps for a while, work in hand."""
    node = system.nodes[name]
    engines = node.children("rollmesh_node.engine")
    await system.until_run(lambda run: _leased(run, name) > 0, timeout_s=PATIENCE_S)
    for pid in (*engines, node.pid):
        os.kill(pid, signal.SIGSTOP)
    stopped_at = trio.current_time()
    await _taken_over(system, name)
    await trio.sleep(max(0.0, stopped_at + limits.DEAD_AFTER_S + 1 - trio.current_time()))
    before = await system.until_run(lambda run: not _of(run, name).connected, timeout_s=PATIENCE_S)
    for pid in (*engines, node.pid):
        os.kill(pid, signal.SIGCONT)
    await system.until_run(
        lambda run: _peer(run, name, "accepted") > _peer(before, name, "accepted"), timeout_s=PATIENCE_S
    )


async def _kill_the_engine(system: System, name: str) -> None:
    """The GPU's driver, or the memory killer. The node lives on, and nothing of its leases is lost for the run."""
    node = system.nodes[name]
    before = await system.until_run(lambda run: _leased(run, name) > 0, timeout_s=PATIENCE_S)
    (pid,) = node.children("rollmesh_node.engine")
    os.kill(pid, signal.SIGKILL)
    await node.until_logged(f"(pid {pid}) was killed", timeout_s=PATIENCE_S)
    await system.until_run(
        lambda run: _peer(run, name, "accepted") > _peer(before, name, "accepted") + 8, timeout_s=PATIENCE_S
    )
    assert node.is_alive


async def _taken_over(system: System, name: str) -> None:
    """The node's leases are over, and the run has gone on for more steps than its work could have served."""
    run = await system.until_run(lambda run: _leased(run, name) == 0, timeout_s=PATIENCE_S)
    await system.until_run(lambda later: later.step >= run.step + 4, timeout_s=PATIENCE_S)


def _of(run: RunStatus, name: str) -> PeerStatus:
    return next(peer for peer in run.peers if peer.name == name)


def _leased(run: RunStatus, name: str) -> int:
    return _of(run, name).leased_samples


def _peer(run: RunStatus, name: str, what: str) -> int:
    return next((getattr(peer.standing, what) for peer in run.peers if peer.name == name), 0)
