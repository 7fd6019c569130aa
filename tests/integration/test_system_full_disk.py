"""A disk that is full under a running learner: it says what it waits for, loses nothing, and room mends it all."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest

from tests.integration.test_weights_full_disk import can_mount
from tests.support.system import System, open_system

PATIENCE_S = 100.0
"""Of one wait; a quiet machine needs a few seconds."""
DISKS = {"checkpoints": "the checkpoint of step", "published": "the publication of step", ".": "the ledger cannot"}
"""Folders of the run that are small disks of their own, and what is said when one is full."""
MOUNT = """
for disk in . checkpoints published; do
    mkdir -p "$0/$disk" && mount -t tmpfs -o size=24m,mode=700 none "$0/$disk" || exit 9
done
exec "$@"
"""


@pytest.mark.timeout(400)
@pytest.mark.skipif(not can_mount(), reason="needs root and unshare(1) to mount a small disk")
async def test_a_learner_waits_for_room_and_goes_on(tmp_path: Path) -> None:
    within = ("unshare", "--mount", "sh", "-c", MOUNT, str(tmp_path / "run"))
    with open_system(tmp_path, "training.lr=1e-4", steps=100_000, within=within) as system:
        node = await system.add_node("north")
        await system.until_run(lambda run: run.step >= 3, timeout_s=PATIENCE_S)
        run_folder = Path(f"/proc/{system.learner.pid}/root{system.run_folder}")  # as the learner sees it
        for folder, said in DISKS.items():
            filler = run_folder / folder / "filler"
            _fill(filler)
            full = await system.until_run(lambda run, said=said: said in run.state, timeout_s=PATIENCE_S)
            assert "full" in full.state or "No space left" in full.state
            assert system.learner.is_alive
            assert node.is_alive
            filler.unlink()
            later = await system.until_run(
                lambda run, full=full, said=said: said not in run.state and run.step >= full.step + 4,
                timeout_s=PATIENCE_S,
            )
            assert later.head.version > full.head.version
        assert "back at step" not in system.learner.log, "nothing had to be made again"
        await _stops_all_the_same(system, run_folder / "filler")
        assert "Traceback" not in system.learner.log + node.log


async def _stops_all_the_same(system: System, filler: Path) -> None:
    """The first Ctrl-C waits for the step under way, which waits for room; the second one ends everything."""
    _fill(filler)
    await system.until_run(lambda run: "full" in run.state, timeout_s=PATIENCE_S)
    system.learner.kill(signal.SIGINT)
    await system.learner.until_logged("once more to stop at once", timeout_s=PATIENCE_S)
    if system.learner.is_alive:
        system.learner.kill(signal.SIGINT)
    assert await system.learner.wait(PATIENCE_S) in (1, 130)


def _fill(path: Path) -> None:
    """Leave not a byte of the disk."""
    for block in (1 << 20, 4096, 1):
        with path.open("ab", buffering=0) as file:
            try:
                while file.write(bytes(block)) == block:
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
