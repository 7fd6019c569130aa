"""A real disk that is really full: the weights in memory stay, nothing half-written counts, and room mends it all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.weights_programs import pack

ROOT = Path(__file__).parents[2]
MOUNT = (
    'mount -t tmpfs -o size=16m,mode=700 none "$0/disk" && exec "$1" -m tests.integration.weights_programs "$2" "$0"'
)


def can_mount() -> bool:
    """True for root with mount namespaces, where a small disk can be made that nobody else sees."""
    unshare = shutil.which("unshare")
    if unshare is None or os.getuid() != 0:
        return False
    return subprocess.run([unshare, "--mount", "true"], check=False, capture_output=True).returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="needs root and unshare(1) to mount a small disk")


def said_on_a_small_disk(folder: Path, program: str) -> list[str]:
    """The lines of a program of ``weights_programs`` that was given a disk of 16 MiB."""
    pack(folder, 5)
    (folder / "disk").mkdir()
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNT, folder, sys.executable, program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@needs_mount
def test_a_full_disk_keeps_the_weights_and_room_mends_it(tmp_path: Path) -> None:
    assert said_on_a_small_disk(tmp_path, "full") == [
        "chunk: a chunk of the weights cannot be written: the disk is full",
        "manifest: manifest.limits",
        "held 0 version 2",
        "took 3 True",
        "took 4",
    ]


@needs_mount
def test_a_working_copy_on_a_full_disk_is_what_it_was(tmp_path: Path) -> None:
    """Neither an undo log nor an image beside fits; then the log just fits, and the state once the log is gone."""
    assert said_on_a_small_disk(tmp_path, "full-disk") == [
        "took none: the undo log of the weights cannot be written: the disk is full",
        "held 2 True",
        "took none: disk/edges/4.payload cannot be copied to disk/weights/working/working.image.new: the disk is full",
        "held 2 True",
        "refused False ['lock', 'working.image', 'working.image.lock']",
        "took 3 True",
        "written 3 once made True",
    ]
