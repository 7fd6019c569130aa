"""The demo over real processes, with a model of a few seconds: what it leaves behind, and how it ends when it must."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollmesh_peer.testing.tiny_model import prepare_tiny
from tests.integration.nodes import command_of
from tests.unit.demo.test_account import PROMISED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

PATIENCE_S = 180.0
"""For what takes some 15 s on a quiet machine."""
CONFIG = """
[run]
name = "tiny"
steps = {steps}
[model]
source = "{source}"
[[environments]]
name = "addition"
[rollouts]
groups_per_step = 2
samples_per_group = 4
max_prompt_tokens = 128
max_new_tokens = 12
staleness = 2
[training]
lr = 1e-3
checkpoint_every = 5
[tripwires]
enabled = false
"""
STEPS = 40
"""So many that a node whose engine loads some seconds after the other one still finds work."""


class Demo:
    """A demo in a process of its own, without a terminal."""

    def __init__(self, folder: Path, *, steps: int) -> None:
        config = folder / "run.toml"
        config.write_text(CONFIG.format(steps=steps, source=prepare_tiny(folder / "tiny")))
        self.out = folder / "demo"
        command = [sys.executable, "-m", "rollmesh_learner.demo", "--out", str(self.out), "--config", str(config)]
        self._told = folder / "told"
        with self._told.open("wb") as told:
            self.process = subprocess.Popen(command, stdout=told, stderr=told, start_new_session=True)

    @property
    def told(self) -> str:
        return self._told.read_text()

    def until_told(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.told:
            assert self.process.poll() is None, self.told
            assert time.monotonic() < deadline, self.told
            time.sleep(0.1)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def survivors(self) -> list[str]:
        """Processes that have this demo's folder in their command line."""
        return [command for pid in pids() if str(self.out) in (command := command_of(pid)) and ".demo" not in command]

    def pid_of(self, words: str) -> int:
        (pid,) = [pid for pid in pids() if str(self.out) in command_of(pid) and words in command_of(pid)]
        return pid


def pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


@pytest.fixture
def begin(tmp_path):
    """Starts a demo; one that is left over is ended politely, so that nothing of it stays."""
    begun: list[Demo] = []

    def start(*, steps: int) -> Demo:
        begun.append(Demo(tmp_path, steps=steps))
        return begun[-1]

    yield start
    for demo in begun:
        if demo.process.poll() is None:
            demo.process.send_signal(signal.SIGTERM)
            demo.process.send_signal(signal.SIGTERM)
            demo.process.wait(60)


def test_a_whole_demo_leaves_what_it_promised(begin) -> None:
    demo = begin(steps=STEPS)
    assert demo.wait() == 0, demo.told
    summary = json.loads((demo.out / "summary.json").read_text())
    assert summary.keys() >= PROMISED
    assert summary["steps"] == STEPS
    assert len(summary["nodes"]) == 2
    for node in summary["nodes"]:
        assert node["accepted"] > 0 and node["tokens"] > 0
        assert node["chunks_from_peers"] + node["chunks_from_learner"] > 0
    with contextlib.closing(sqlite3.connect(demo.out / "learner" / "ledger.sqlite")) as ledger:
        hard = "SELECT peer, code FROM offences WHERE code NOT IN ('lease.expired', 'result.stale')"
        assert not ledger.execute(hard).fetchall()
    assert summary["audits_done"] > 0 and summary["audits_failed"] == 0
    assert summary["staleness_max"] <= 2
    assert 0 <= summary["bubble_fraction"] <= 1
    assert len((demo.out / "metrics.jsonl").read_text().splitlines()) == STEPS
    assert (demo.out / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (Path(summary["checkpoint"]) / "model.safetensors").exists()
    assert f"step {STEPS} of {STEPS}: reward" in demo.told
    assert "shown   every node contributes" in demo.told
    assert "The checkpoint loads with transformers. Of 20 sums" in demo.told
    assert demo.survivors() == []


def test_a_node_that_dies_ends_the_demo_with_its_name_and_last_words(begin) -> None:
    demo = begin(steps=100_000)
    demo.until_told("step 1 of")
    pid = demo.pid_of('node.name="node-b"')
    subprocess.run(["kill", "-9", str(pid)], check=True)
    assert demo.wait() == 1
    assert "node-b was ended by SIGKILL before the run was over" in demo.told
    assert "engine started" in demo.told.partition("before the run was over")[2]
    assert "leases go back" in (demo.out / "node-a.log").read_text()
    assert "the run is stopped" in (demo.out / "learner.log").read_text()
    assert demo.survivors() == []


def test_ctrl_c_ends_everybody_politely(begin) -> None:
    demo = begin(steps=100_000)
    demo.until_told("step 1 of")
    demo.process.send_signal(signal.SIGINT)
    assert demo.wait() == 130
    for name in ("node-a", "node-b"):
        log = (demo.out / f"{name}.log").read_text()
        assert "stopping politely" in log and "stopped reason" in log
    assert "the run is stopped; the same command goes on from here" in (demo.out / "learner.log").read_text()
    assert "interrupted" in demo.told
    assert demo.survivors() == []


def test_a_learner_that_cannot_start_is_quoted(begin, tmp_path) -> None:
    demo = begin(steps=0)
    assert demo.wait() == 1
    assert "learner ended with status 2 before the run was over" in demo.told
    assert "run.steps must be at least 1" in demo.told
