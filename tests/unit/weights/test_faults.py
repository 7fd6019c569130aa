"""Fault points: nothing unless armed, and then exactly what was asked for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh_peer import faults
from rollmesh_peer.faults import FAULT, ONCE, Fault, arm, armed, fault_point
from rollmesh_protocol.errors import UsageError


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    arm({})


def test_nothing_armed_nothing_happens() -> None:
    arm({})
    fault_point("any.name")


def test_the_counted_passing_raises() -> None:
    arm({FAULT: "a.point:3:raise,b.point:raise"})
    fault_point("a.point")
    fault_point("a.point")
    with pytest.raises(Fault, match="b.point"):
        fault_point("b.point")
    with pytest.raises(Fault, match="a.point"):
        fault_point("a.point")
    fault_point("a.point")


def test_once_means_once_over_all_processes(tmp_path: Path) -> None:
    environ = {FAULT: "a.point:raise", ONCE: str(tmp_path / "fired")}
    arm(environ)
    with pytest.raises(Fault):
        fault_point("a.point")
    arm(environ)
    fault_point("a.point")


@pytest.mark.parametrize("text", ["a.point:0", "a.point:explode", "a.point:-1"])
def test_a_wrong_variable_is_told(text: str) -> None:
    with pytest.raises(UsageError, match="neither a count"):
        arm({FAULT: text})


def test_only_these_variables_are_passed_on() -> None:
    assert armed({FAULT: "x", ONCE: "y", "SECRET": "z"}) == {FAULT: "x", ONCE: "y"}
    assert armed({"SECRET": "z"}) == {}


def run(mode: str, **kwargs: float) -> subprocess.CompletedProcess[str]:
    code = "from rollmesh_peer.faults import fault_point; fault_point('p'); print('alive')"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, FAULT: f"p:{mode}"},
        capture_output=True,
        text=True,
        check=False,
        **kwargs,
    )


def test_kill_kills_for_real() -> None:
    ended = run("kill")
    assert ended.returncode == -signal.SIGKILL
    assert "the fault point p fires" in ended.stderr
    assert "alive" not in ended.stdout


def test_stall_never_goes_on() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run("stall", timeout=2)


def test_every_point_of_the_product_is_documented_and_exists() -> None:
    root = Path(__file__).parents[3]
    sources = [path for part in ("protocol", "node", "learner") for path in (root / part).rglob("*.py")]
    found = {name for path in sources for name in re.findall(r'fault_point\("([^"]+)"\)', path.read_text())}
    assert found == set(faults.POINTS)
