"""The files of deploy/: what they run exists, and the tools that read them accept them where they are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
COMMANDS = {entry.name for entry in metadata.entry_points(group="rollmesh.commands")}


def test_there_is_a_unit_for_each_daemon():
    assert [path.stem for path in UNITS] == ["rollmesh-learner", "rollmesh-node"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_runs_a_command_of_ours_privately_and_politely(path):
    lines = set(path.read_text().splitlines())
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    found = re.match(r"ExecStart=/opt/rollmesh/bin/rollmesh ([a-z]+) run\b", start)
    assert found
    assert found[1] in COMMANDS
    assert path.stem == f"rollmesh-{found[1]}"
    # A child killed for its memory must not take the daemon with it; Ctrl-C's way out; a private folder for the key.
    assert {"OOMPolicy=continue", "KillSignal=SIGINT", "KillMode=mixed", "DynamicUser=yes", "UMask=0077"} <= lines
    assert {"NoNewPrivileges=yes", "ProtectSystem=strict", "ProtectHome=yes", "CapabilityBoundingSet="} <= lines
    assert "PrivateDevices=yes" not in lines


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_understands_every_line(path, tmp_path):
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace("ExecStart=/opt/rollmesh/bin/rollmesh", "ExecStart=/bin/true"))
    told = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")


def test_the_image_is_built_from_what_is_here_and_runs_as_nobody_special():
    text = DOCKERFILE.read_text()
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    copied = {
        source for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE) for source in line.split()[:-1]
    }
    assert copied == {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert all((ROOT / source).exists() for source in copied)
    assert re.search(r"^USER rollmesh$", text, re.MULTILINE)
    assert "STOPSIGNAL SIGINT" in text


def test_the_extras_that_are_told_to_people_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = [*UNITS, DOCKERFILE, ROOT / "README.md"]
    named = {name for path in told for name in re.findall(r"rollmesh\[([a-z]+)\]|EXTRA=([a-z]+)", path.read_text())}
    flat = {word for pair in named for word in pair if word}
    assert flat
    assert flat <= set(extras)
