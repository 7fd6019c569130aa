"""The trainer as a real child process: its verbs, its refusals, and going on exactly where another left off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh_learner.training.settings import TrainingSettings
from rollmesh_peer.children.launch import ChildSpec, kept_environment, python_argv
from rollmesh_peer.children.process import Child, open_child
from rollmesh_peer.testing.tiny_model import prepare_tiny
from rollmesh_protocol.errors import ChildFailed, RollmeshError
from tests.unit.training.samples import random_samples, record

SPEC = ChildSpec(
    name="trainer",
    argv=python_argv("rollmesh_learner.training.trainer"),
    environment=kept_environment(os.environ, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_tiny(tmp_path_factory.mktemp("tiny"))


def opening(folder: Path, checkpoint: Path | None = None, **settings: object) -> dict[str, object]:
    return {
        "model_folder": str(folder),
        "checkpoint": str(checkpoint) if checkpoint else None,
        "settings": TrainingSettings(**({"lr": 1e-3} | settings)).model_dump(),
        "threads": 1,
        "seed": 3,
        "device": "cpu",
        "batch": {"samples": 12, "new_tokens": 9},
        "checks": {"median": 0.1, "kl": 0.1, "least_ratio": 1e-4},
    }


def batch(step: int) -> dict[str, object]:
    samples = random_samples(step)
    return {"step": step, "rollouts": [record(s, number=n).model_dump() for n, s in enumerate(samples)]}


async def call(child: Child, verb: str, body: dict[str, object]) -> dict[str, object]:
    return await child.call(verb, body, deadline_s=60)


async def test_the_verbs(folder: Path, tmp_path: Path) -> None:
    async with open_child(SPEC) as child:
        opened = await call(child, "open", opening(folder))
        assert opened["step"] == 0
        assert opened["vocabulary"] == 260
        assert opened["parameters"] > 90_000
        assert opened["layout"][0] == {"name": "model.embed_tokens.weight", "dtype": "bf16", "shape": [260, 64]}
        trained = await call(child, "train", batch(0))
        assert trained["updated"] is True
        assert trained["step"] == 1
        assert trained["metrics"]["tokens"] == sum(len(s.tokens) for s in random_samples(0))
        assert [m["id"] for m in trained["mismatches"]] == [r["id"] for r in batch(0)["rollouts"]]
        assert set(trained["mismatches"][0]) == {"id", "tokens", "median", "kl", "least_ratio", "verdict"}
        exported = await call(child, "export", {"path": str(tmp_path / "image")})
        assert exported["step"] == 1
        assert (tmp_path / "image").stat().st_size > 180_000
        saved = await call(child, "checkpoint", {"folder": str(tmp_path / "step-00000001"), "carry": {"n": 1}})
        assert saved["step"] == 1


async def test_refusals_come_as_sentences_and_the_trainer_lives_on(folder: Path, tmp_path: Path) -> None:
    async with open_child(SPEC) as child:
        for verb, body, code, sentence in (
            ("train", batch(0), "trainer.step", "was not opened"),
            ("open", opening(folder) | {"surprise": 1}, "trainer.request", "surprise"),
            ("open", opening(folder) | {"settings": {"lr": -1.0}}, "trainer.request", "settings.lr"),
            ("open", opening(tmp_path / "nowhere"), "usage", "no model folder"),
            ("open", opening(folder, tmp_path / "nowhere"), "trainer.checkpoint", "nowhere"),
        ):
            with pytest.raises(RollmeshError, match=sentence) as caught:
                await call(child, verb, body)
            assert caught.value.code == code
        await call(child, "open", opening(folder))
        with pytest.raises(ChildFailed, match="at step 0 and was asked for step 3") as refused:
            await call(child, "train", batch(3))
        assert refused.value.code == "trainer.step"
        assert (await call(child, "train", batch(0)))["updated"] is True


@pytest.mark.parametrize("settings", [{}, {"epochs": 2, "minibatches": 2, "warmup_steps": 5, "weight_decay": 0.1}])
async def test_another_process_goes_on_bit_for_bit(folder: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    """Three steps, a checkpoint, four more; the same four in a new process from the checkpoint give the same bits."""
    saved = tmp_path / "step-00000003"
    files = ("image", "end/masters.safetensors", "end/optimiser.safetensors", "end/state.json")
    async with open_child(SPEC) as child:
        await call(child, "open", opening(folder, **settings))
        for step in range(3):
            await call(child, "train", batch(step))
        await call(child, "checkpoint", {"folder": str(saved), "carry": {}})
        first = [await call(child, "train", batch(step)) for step in range(3, 7)]
        await call(child, "export", {"path": str(tmp_path / "one" / "image")})
        await call(child, "checkpoint", {"folder": str(tmp_path / "one" / "end"), "carry": {}})
    async with open_child(SPEC) as child:
        opened = await call(child, "open", opening(folder, saved, **settings))
        assert opened["step"] == 3
        second = [await call(child, "train", batch(step)) for step in range(3, 7)]
        await call(child, "export", {"path": str(tmp_path / "two" / "image")})
        await call(child, "checkpoint", {"folder": str(tmp_path / "two" / "end"), "carry": {}})
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    for left, right in zip(first, second, strict=True):
        assert left["metrics"]["loss"] == right["metrics"]["loss"]
        assert left["mismatches"] == right["mismatches"]


async def test_a_step_that_fails_half_way_ends_the_process(folder: Path, tmp_path: Path) -> None:
    """A real failure: the process may not have the memory that the step needs."""
    program = (
        "import rollmesh_learner.training.step as step\n"
        "def fail(*a, **k): raise MemoryError('no room')\n"
        "step.packing.completion_states = fail\n"
        "from rollmesh_learner.training.trainer import main\n"
        "main()\n"
    )
    spec = ChildSpec(name="trainer", argv=(sys.executable, "-P", "-c", program), environment=SPEC.environment)
    async with open_child(spec) as child:
        await call(child, "open", opening(folder))
        with pytest.raises(ChildFailed, match="MemoryError: no room"):
            await call(child, "train", batch(0))
        with pytest.raises(ChildFailed):
            await call(child, "train", batch(0))


def test_importing_the_trainer_or_its_settings_loads_no_torch() -> None:
    program = (
        "import sys, rollmesh_learner.training.trainer, rollmesh_learner.training.settings\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
