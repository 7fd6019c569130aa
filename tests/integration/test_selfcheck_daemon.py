"""A selfcheck beside a running daemon and after its death, by the command itself."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import trio

from rollmesh_node.journal import JOURNAL, Notes, read_journal
from tests.integration.nodes import NodeProcess, open_learner, start_node, wait_for
from tests.integration.test_node_engine import SETTINGS, _tiny_run

PATIENCE_S = 120.0
"""Deadline of every wait: some are for an engine that imports torch on a busy machine."""


async def check(node: NodeProcess, *words: str, settings: tuple[str, ...] = SETTINGS) -> tuple[int, dict]:
    command = [sys.executable, "-m", "rollmesh_peer.command", "node", "selfcheck", "--json", *words]
    for setting in (*settings, 'weights.ram_folder=""'):
        command += ["--set", setting]
    environ = {**os.environ, "ROLLMESH_HOME": str(node.home), "OMP_NUM_THREADS": "1"}
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False, env=environ)
    assert done.stderr == b"" and done.stdout.count(b"\n") == 1, done
    return done.returncode, json.loads(done.stdout)


async def until_noted(node: NodeProcess, condition) -> Notes:
    notes = None
    with trio.move_on_after(PATIENCE_S):
        while True:
            notes = read_journal(node.folder / JOURNAL)
            if notes is not None and condition(notes):
                return notes
            await trio.sleep(0.1)
    raise AssertionError(f"never so: {notes}")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_it_runs_beside_the_daemon_and_after_a_kill(tmp_path: Path) -> None:
    card, images = await _tiny_run(tmp_path)
    async with open_learner(tmp_path / "learner", card=card, image=images[0]) as learner:
        learner.script.most_open = 2
        with start_node(tmp_path / "home", learner.mesh.addresses[0], settings=SETTINGS) as node:
            await until_noted(node, lambda notes: len(notes.entries) > 4)
            before = await node.status()
            status, told = await check(node)
            assert status == 0 and told["verdict"] == "fine", told
            assert told["kept"]["rollouts"] > 4 and told["fresh"]["tokens"] >= 1000
            after = await node.until(lambda seen: seen.accepted > before.accepted)
            assert after.root_held == before.root_held and len(node.engine_pids()) == 1

            await learner.publish(images[1])
            await until_noted(node, lambda notes: notes.entries[-1].lease.version == 2)
            node.signal(signal.SIGKILL)
            await node.wait()
            status, told = await check(node, "--tokens", "0")
            assert status == 0 and told["versions"] == [2] and told["fresh"] is None, told
            assert told["kept"]["tokens"] > 0
            status, told = await check(node, settings=("engine.backend=scripted",))
            assert status == 2 and told["verdict"] == "unchecked"
        assert not list(node.folder.glob("runs/*/selfcheck/*.image"))
        learner.script.most_open = 4  # what the killed node held is still out
        with start_node(tmp_path / "home", learner.mesh.addresses[0], settings=SETTINGS) as again:
            await again.until(lambda seen: seen.accepted > 0)  # nothing that it needs was taken or locked


async def test_the_journal_survives_a_kill_and_knows_what_was_refused(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        with start_node(tmp_path / "home", learner.mesh.addresses[0], script={"rollout_s": 0.01}) as node:
            await wait_for(learner, lambda seen: len(seen.heard.accepted) >= 2)
            notes = await until_noted(node, lambda notes: notes.standing is not None)
            assert notes.run == learner.card.run
            node.signal(signal.SIGKILL)
            await node.wait()
        kept = read_journal(node.folder / JOURNAL)
        assert kept is not None and kept.entries and (node.folder / JOURNAL).stat().st_mode & 0o777 == 0o600
        assert {entry.lease.lease_id for entry in kept.entries} <= set(learner.leases)
        with start_node(tmp_path / "home", learner.mesh.addresses[0], script={"rollout_s": 0.01}) as node:
            later = await until_noted(node, lambda notes: len(notes.entries) > len(kept.entries))
            node.signal(signal.SIGINT)
            assert await node.wait() == 0
        assert later.entries[0].lease == kept.entries[0].lease or len(later.entries) >= 16
