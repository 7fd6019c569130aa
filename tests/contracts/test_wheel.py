"""The wheel holds the four packages, whole, and they work from anywhere without this repository."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    name: ROOT / folder / name
    for name, folder in {
        "rollmesh_protocol": "protocol",
        "rollmesh_peer": "protocol",
        "rollmesh_node": "node",
        "rollmesh_learner": "learner",
    }.items()
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("target")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_it_holds_every_source_file_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        str(Path(name) / path.relative_to(folder))
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == sources
    assert {f"{name}/py.typed" for name in PACKAGES} <= packed
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_it_offers_the_command_and_its_sub_commands(wheel):
    archive = zipfile.ZipFile(wheel)
    (entries,) = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
    text = archive.read(entries).decode()
    assert "rollmesh = rollmesh_peer.command:main" in text
    for command in ("node", "learner", "status"):
        assert f"\n{command} = rollmesh_" in text


def test_it_imports_from_an_empty_folder(installed, tmp_path):
    # Every module that needs no torch; those that do are imported by their own tests.
    program = """
import importlib, json, pathlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
from rollmesh_peer.command import main
places = {}
for name in sys.argv[2:]:
    package = importlib.import_module(name)
    places[name] = package.__file__
    places |= {module.name: module.module_finder.path for module in pkgutil.walk_packages(package.__path__, f"{name}.")}
import rollmesh_node.config, rollmesh_learner.config
print(json.dumps(places))
"""
    command = [sys.executable, "-I", "-c", program, str(installed), *PACKAGES]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    places = json.loads(told.stdout)
    assert set(PACKAGES) < set(places)
    assert [name for name, place in places.items() if not Path(place).is_relative_to(installed)] == []
