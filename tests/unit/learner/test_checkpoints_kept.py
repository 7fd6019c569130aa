"""Which checkpoints stay on the disk: the newest, and one that is old enough to go back to; with a real child."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import trio

from rollmesh_learner.training import client
from rollmesh_learner.training.client import TrainerClient, discard_beyond
from rollmesh_peer.children.process import ChildSpec, kept_environment, python_argv
from rollmesh_protocol.errors import HostError

ROOT = Path(__file__).parents[3]
SPEC = ChildSpec(
    name="trainer",
    argv=python_argv("tests.support.scripted_trainer"),
    environment=kept_environment(os.environ, {"PYTHONPATH": str(ROOT)}),
)


@pytest.mark.parametrize(
    ("every", "kept", "reach", "expected"),
    [
        (1, 2, 0, [11, 12]),
        (1, 2, 3, [9, 10, 11, 12]),
        (2, 2, 3, [8, 10, 12]),
        (4, 1, 5, [4, 8, 12]),
        (6, 1, 5, [6, 12]),
        (1, 9, 3, [4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (12, 1, 5, [12]),
    ],
)
async def test_one_that_is_old_enough_stays(
    tmp_path: Path, every: int, kept: int, reach: int, expected: list[int]
) -> None:
    trainer = TrainerClient(SPEC, opening={}, checkpoints=tmp_path, kept=kept, reach=reach)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trainer.run)
        life = await trainer.wait_ready()
        for step in range(12):
            await trainer.train(step, [], life=life)
            if (step + 1) % every == 0:
                await trainer.checkpoint(step + 1, carry={}, life=life)
        assert trainer.saved_steps() == expected
        nursery.cancel_scope.cancel()


async def test_a_trainer_opens_what_a_rollback_left(tmp_path: Path) -> None:
    trainer = TrainerClient(SPEC, opening={}, checkpoints=tmp_path, kept=9)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trainer.run)
        life = await trainer.wait_ready()
        for step in range(4):
            await trainer.train(step, [], life=life)
            await trainer.checkpoint(step + 1, carry={}, life=life)
        for step in (2, 0):
            await trainer.stop()
            assert not trainer.is_alive
            await trainer.discard_beyond(step)
            assert trainer.saved_steps() == list(range(1, step + 1))
            await trainer.restart()
            await trainer.wait_ready()
            assert (trainer.opened_at_step, trainer.opened_from) == (step, trainer.newest)
        nursery.cancel_scope.cancel()


async def test_a_deletion_that_was_interrupted_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 4, 6, 8):
        (tmp_path / f"step-{step:08d}" / "inner").mkdir(parents=True)

    delete = shutil.rmtree

    def half(folder: Path) -> None:
        delete(folder / "inner")
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(client.shutil, "rmtree", half)
        with pytest.raises(HostError, match="step-00000008 cannot be deleted"):
            await discard_beyond(tmp_path, 4)
    await discard_beyond(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]
    await discard_beyond(tmp_path / "nowhere", 4)
