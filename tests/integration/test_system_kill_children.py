"""kill -9 of every child of the learner, and a trainer that hangs: the daemon says so, and nothing is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio

from rollmesh_learner.training.client import TrainerClient
from rollmesh_peer.children.process import ChildSpec, kept_environment, python_argv
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed
from tests.support.chronicle import Chronicle
from tests.support.system import System, children_of, command_of, open_system

ROOT = Path(__file__).parents[2]
PATIENCE_S = 100.0
"""Of one wait; a quiet machine needs two or three seconds."""
TRAINER = "rollmesh_learner.training.trainer"
ASKS_THE_TRAINER = ("training step", "saving a checkpoint of step", "publishing the weights of step")
"""What a status says while the learner waits for an answer of the trainer."""
OTHERS = {
    "auditor": "rollmesh_learner.audit.process",
    "prompter": "rollmesh_learner.work.prompter",
    "scorer": "rollmesh_peer.children.scorer",
    "weights worker": "rollmesh_peer.weights.worker",
}


@pytest.mark.timeout(600)
async def test_a_learner_whose_children_die_goes_on(tmp_path: Path) -> None:
    with open_system(tmp_path, "training.checkpoint_every=3", "training.lr=1e-4", steps=100_000) as system:
        chronicle = Chronicle(system)
        node = await system.add_node("north")
        await _grow(system)
        await _stop_the_trainer_and_kill_it(system)
        chronicle.look()
        for name, module in OTHERS.items():
            (pid,) = system.learner.children(module)
            os.kill(pid, signal.SIGKILL)
            await system.learner.until_logged(f"the {name} process (pid {pid}) was killed", timeout_s=PATIENCE_S)
            await _grow(system)
            assert pid not in system.learner.children(module)
            chronicle.look()
        system.learner.kill(signal.SIGINT)
        assert await system.learner.wait(PATIENCE_S) == 0
        chronicle.look()
        assert node.is_alive
        assert "Traceback" not in system.learner.log + node.log
        assert system.summary()["audits_failed"] == 0
        ((lost,),) = system.rows("SELECT count(*) FROM rollouts WHERE state = 'void'")
        assert lost == 0


async def test_what_is_asked_of_a_trainer_is_never_done_by_the_next_one(tmp_path: Path) -> None:
    """It dies after its answer, and another with older weights stands there when the next question is asked."""
    spec = ChildSpec(
        name="trainer",
        argv=python_argv("tests.support.scripted_trainer"),
        environment=kept_environment(os.environ, {"PYTHONPATH": str(ROOT)}),
    )
    trainer = TrainerClient(spec, opening={}, checkpoints=tmp_path / "checkpoints", kept=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trainer.run)
        life = await trainer.wait_ready()
        await trainer.train(0, [], life=life)
        await trainer.train(1, [], life=life)
        assert (await trainer.checkpoint(2, carry={}, life=life)).name == "step-00000002"
        await trainer.train(2, [], life=life)
        (pid,) = [pid for pid in children_of(os.getpid()) if "scripted_trainer" in command_of(pid)]
        os.kill(pid, signal.SIGKILL)
        with trio.fail_after(PATIENCE_S):
            while trainer.life == life:
                await trio.sleep(0.02)
        for asked in (
            lambda: trainer.checkpoint(3, carry={}, life=life),
            lambda: trainer.export(tmp_path / "image", life=life),
            lambda: trainer.train(3, [], life=life),
        ):
            with pytest.raises(ChildFailed, match="was replaced"):
                await asked()
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
        assert not (tmp_path / "image").exists()
        assert (trainer.opened_at_step, trainer.opened_from) == (2, tmp_path / "checkpoints" / "step-00000002")
        before = trainer.life
        await trainer.train(2, [], life=before)
        await trainer.restart()
        assert await trainer.wait_ready() == before + 1
        assert trainer.is_alive
        nursery.cancel_scope.cancel()


async def _stop_the_trainer_and_kill_it(system: System) -> None:
    """Stopped, it hangs in the middle of a step: the rest of the learner must not. Killed, the step is made again."""
    (pid,) = system.learner.children(TRAINER)
    os.kill(pid, signal.SIGSTOP)
    await trio.sleep(1.5 * limits.STATUS_EVERY_S)  # what was built before is told for so long
    run = await system.until_run(lambda run: run.state.startswith(ASKS_THE_TRAINER), timeout_s=PATIENCE_S)
    for _ in range(3):
        asked = trio.current_time()
        later = await system.until_run(lambda _: True)
        assert later.state == run.state, "it says what it waits for"
        assert later.step == run.step
        assert trio.current_time() - asked < 5, "a hanging trainer keeps the daemon from answering"
        await trio.sleep(1.1 * limits.STATUS_EVERY_S)
    (peer,) = later.peers
    assert peer.last_seen_s < 10, "the node is heard while the trainer hangs"
    os.kill(pid, signal.SIGKILL)
    await system.learner.until_logged(f"the trainer process (pid {pid}) was killed", timeout_s=PATIENCE_S)
    await system.learner.until_logged("is lost: the trainer process", timeout_s=PATIENCE_S)
    await _grow(system)


async def _grow(system: System) -> None:
    """Wait until two more steps are made than there were, and the last publication is that of a new step."""
    before = await system.until_run(lambda run: run.step > 0, timeout_s=PATIENCE_S)
    await system.until_run(
        lambda run: run.step >= before.step + 3 and run.head.version > before.head.version, timeout_s=PATIENCE_S
    )
