"""kill -9 and SIGSTOP of nodes, kill -9 of an engine: their samples go to others, and who comes back works again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
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
GROUPS = 8
"""A step; with S = 2 there is work for every node at every time."""


@pytest.mark.timeout(600)
async def test_work_of_nodes_that_are_gone_goes_to_others(tmp_path: Path) -> None:
    with open_system(tmp_path, *LONG, f"rollouts.groups_per_step={GROUPS}", steps=100_000) as system:
        chronicle = Chronicle(system, groups_per_step=GROUPS)
        for name in ("north", "south", "east"):
            await system.add_node(name)
        await _contribute(system, "north", "south", "east")
        await _one_dies_and_one_sleeps(system, killed="north", stopped="south")
        chronicle.look()
        await _kill_the_engine(system, "north")
        chronicle.look()
        system.learner.kill(signal.SIGINT)
        assert await system.learner.wait(PATIENCE_S) == 0
        chronicle.look()
        assert "Traceback" not in system.learner.log + "".join(node.log for node in system.nodes.values())
        assert not system.rows("SELECT code FROM offences WHERE code NOT IN ('lease.expired', 'result.stale')")
        assert system.summary()["audits_failed"] == 0


async def _one_dies_and_one_sleeps(system: System, *, killed: str, stopped: str) -> None:
    """A power cut at one volunteer's, and a PC that goes to sleep at another's, both with work in hand."""
    engines = await _stop_engines_at_work(system, killed, stopped)
    system.nodes[killed].kill(signal.SIGKILL)
    os.kill(engines[killed], signal.SIGCONT)  # stopped, it could not notice that its daemon is gone
    os.kill(system.nodes[stopped].pid, signal.SIGSTOP)
    stopped_at = trio.current_time()
    await system.nodes[killed].wait()
    run = await system.until_run(
        lambda run: not _leased(run, killed) and not _leased(run, stopped), timeout_s=PATIENCE_S
    )
    # Their samples went to the third node: the run goes on for more steps than what had been done could serve.
    await system.until_run(lambda later: later.step >= run.step + 4, timeout_s=PATIENCE_S)
    await trio.sleep(max(0.0, stopped_at + limits.DEAD_AFTER_S + 1 - trio.current_time()))
    await system.until_run(lambda run: not _of(run, stopped).connected, timeout_s=PATIENCE_S)
    system.nodes[killed].start()
    _signal((engines[stopped], system.nodes[stopped].pid), signal.SIGCONT)
    await _contribute(system, killed, stopped)


async def _stop_engines_at_work(system: System, *names: str) -> dict[str, int]:
    """SIGSTOP the engines of these nodes at a moment at which each node has work in hand; returns their pids."""
    engines = {name: system.nodes[name].children("rollmesh_node.engine")[0] for name in names}
    with trio.fail_after(PATIENCE_S):
        while True:
            _signal(engines.values(), signal.SIGSTOP)
            await trio.sleep(1.5 * limits.STATUS_EVERY_S)  # what was built before is told for so long
            run = await system.until_run(lambda _: True)
            if all(_leased(run, name) for name in names):
                return engines
            _signal(engines.values(), signal.SIGCONT)  # one was loading weights, and its node asks for nothing
            await trio.sleep(0.3)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


async def _contribute(system: System, *names: str) -> None:
    """Wait until something of each of these nodes is accepted, from now on."""
    before = await system.until_run(lambda run: {peer.name for peer in run.peers} >= set(names), timeout_s=PATIENCE_S)
    await system.until_run(
        lambda run: all(_accepted(run, name) > _accepted(before, name) for name in names), timeout_s=PATIENCE_S
    )


async def _kill_the_engine(system: System, name: str) -> None:
    """The GPU's driver, or the memory killer. The node lives on, and nothing of its leases is lost for the run."""
    node = system.nodes[name]
    pid = (await _stop_engines_at_work(system, name))[name]
    before = await system.until_run(lambda _: True)
    os.kill(pid, signal.SIGKILL)
    await node.until_logged(f"(pid {pid}) was killed", timeout_s=PATIENCE_S)
    await system.until_run(lambda run: _accepted(run, name) > _accepted(before, name) + 8, timeout_s=PATIENCE_S)
    assert node.is_alive


def _of(run: RunStatus, name: str) -> PeerStatus:
    return next(peer for peer in run.peers if peer.name == name)


def _leased(run: RunStatus, name: str) -> int:
    return _of(run, name).leased_samples


def _accepted(run: RunStatus, name: str) -> int:
    return _of(run, name).standing.accepted
