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
    'mount -t tmpfs -o size=16m,mode=700 none "$0/disk" && exec "$1" -m tests.integration.weights_programs full "$0"'
)


def can_mount() -> bool:
    """True for root with mount namespaces, where a small disk can be made that nobody else sees."""
    unshare = shutil.which("unshare")
    if unshare is None or os.getuid() != 0:
        return False
    return subprocess.run([unshare, "--mount", "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs root and unshare(1) to mount a small disk")
def test_a_full_disk_keeps_the_weights_and_room_mends_it(tmp_path: Path) -> None:
    pack(tmp_path, 5)
    (tmp_path / "disk").mkdir()
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNT, tmp_path, sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "chunk: a chunk of the weights cannot be written: the disk is full",
        "manifest: manifest.limits",
        "held 0 version 2",
        "took 3 True",
        "took 4",
    ]
