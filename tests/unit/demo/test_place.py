"""Only what a demo made is removed, and never under a process that still uses it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rollmesh_learner.demo.place import LOCK, fresh_folder
from rollmesh_learner.demo.plan import Plan
from rollmesh_protocol.errors import HostError, UsageError


@pytest.fixture
def plan(tmp_path) -> Plan:
    return Plan(program=("rollmesh",), out=tmp_path / "runs" / "demo")


def enter(plan: Plan, **options: int):
    return fresh_folder(plan, **({"needed_bytes": 0} | options))


def test_a_new_folder_is_made_with_a_private_home(plan) -> None:
    with enter(plan):
        assert plan.home.stat().st_mode & 0o777 == 0o700


def test_an_earlier_demo_goes_and_the_base_model_and_other_files_stay(plan) -> None:
    with enter(plan):
        (plan.models / "base").mkdir(parents=True)
        (plan.home / "control").mkdir()
        (plan.folder("learner") / "checkpoints").mkdir(parents=True)
        plan.log("node-a").write_text("words")
        (plan.out / "summary.json").write_text("{}")
        (plan.out / "my-notes.txt").write_text("keep me")
    with enter(plan):
        assert (plan.models / "base").is_dir()
        assert (plan.out / "my-notes.txt").read_text() == "keep me"
        assert sorted(entry.name for entry in plan.out.iterdir()) == [LOCK, "home", "my-notes.txt"]
        assert [entry.name for entry in plan.home.iterdir()] == ["models"]


def test_of_a_link_only_the_link_is_removed(plan, tmp_path) -> None:
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "gold").write_text("1")
    with enter(plan):
        plan.folder("learner").symlink_to(treasure)
        plan.folder("node-a").symlink_to(tmp_path / "nowhere")
    with enter(plan):
        assert not plan.folder("learner").is_symlink() and not plan.folder("node-a").is_symlink()
        assert (treasure / "gold").exists()


def test_a_folder_that_no_demo_made_is_left_alone(plan) -> None:
    plan.out.mkdir(parents=True)
    (plan.out / "summary.json").write_text("somebody's")
    with pytest.raises(UsageError, match=r"holds summary\.json, which no demo made"), enter(plan):
        pass
    assert (plan.out / "summary.json").read_text() == "somebody's"


def test_two_demos_in_one_folder_are_refused(plan) -> None:
    with enter(plan), pytest.raises(HostError, match="a demo is at work"), enter(plan):
        pass
    with enter(plan):
        pass


def test_a_process_of_a_demo_that_was_killed_keeps_the_folder(plan) -> None:
    with enter(plan) as lock:
        wait_for_end = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        survivor = subprocess.Popen(wait_for_end, stdin=subprocess.PIPE, pass_fds=(lock,))
    try:
        with pytest.raises(HostError, match="still ending"), enter(plan):
            pass
    finally:
        survivor.communicate(timeout=20)
    with enter(plan):
        pass


def test_a_full_disk_is_told_with_numbers(plan) -> None:
    with pytest.raises(HostError, match=r"GB free and the demo needs 1000000 GB"), enter(plan, needed_bytes=10**15):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_told(plan) -> None:
    plan.out.mkdir(parents=True, mode=0o500)
    with pytest.raises(HostError, match="cannot be used"), enter(plan):
        pass
