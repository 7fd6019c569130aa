"""`rollmesh learner calibrate` with real children on the tiny model, and a learner's start with what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh_learner.audit.calibrate import calibrate
from rollmesh_learner.audit.calibration import FILE, adopt, read_calibration
from rollmesh_learner.cli import _calibrate
from rollmesh_learner.config import LearnerConfig, load_config
from rollmesh_peer.models.folder import ModelFolder
from rollmesh_peer.testing.tiny_model import prepare_tiny
from rollmesh_protocol.errors import UsageError

ROLLOUTS = 96


@pytest.fixture
def config(tmp_path: Path) -> LearnerConfig:
    prepare_tiny(tmp_path / "model", seed=3)
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "tiny"\nfolder = "run"\n[model]\nsource = "model"\n[[environments]]\nname = "addition"\n'
        "[rollouts]\nmax_new_tokens = 8\n[audit]\nthreads = 1\nhigh_margin = 0.9\n"
    )
    return load_config(path, environ={})


@pytest.mark.slow
@pytest.mark.timeout(900)  # five processes load torch
async def test_what_is_measured_is_what_the_learner_goes_by(config, tmp_path, capsys) -> None:
    assert await _calibrate(config, ROLLOUTS) == 0
    said = capsys.readouterr().out
    folder = tmp_path / "run"
    assert "bfloat16, batch 64: 48 of 48 rollouts" in said
    assert "float32, batch 1: 4 of 4 rollouts" in said
    assert f"written to {folder / FILE}" in said
    assert [path.name for path in folder.iterdir()] == [FILE], "nothing else is left behind"

    found = read_calibration(folder)
    assert found is not None
    assert {(cell.dtype, cell.batch): cell.rollouts for cell in found.cells} == {
        ("bfloat16", 64): 48, ("bfloat16", 8): 16, ("bfloat16", 1): 4,
        ("float32", 64): 16, ("float32", 8): 8, ("float32", 1): 4,
    }  # fmt: skip
    assert all(0 < cell.tokens <= 8 * cell.rollouts and cell.exact_share > 0.8 for cell in found.cells)
    assert {"torch", "transformers", "device", "threads"} <= set(found.versions)
    assert found.longest_tokens == 8

    adopted, drift = await adopt(config, folder=folder, model=ModelFolder.open(tmp_path / "model"))
    assert drift == found.drift
    assert adopted.audit.low_margin == found.low_margin
    assert adopted.audit.any_margin == found.any_margin
    assert adopted.audit.high_margin == 0.9, "what was set by hand wins"
    assert adopted.training.delta == found.delta

    other = prepare_tiny(tmp_path / "other", seed=4)
    with pytest.raises(UsageError, match="was made with another model"):
        await adopt(config, folder=folder, model=ModelFolder.open(other))


async def test_too_few_rollouts_are_refused_before_anything_starts(config, tmp_path) -> None:
    with pytest.raises(UsageError, match="at least 24 rollouts"):
        await calibrate(config, folder=tmp_path, rollouts=5, tell=print)


async def test_a_file_that_is_no_calibration_is_refused(config, tmp_path) -> None:
    model = ModelFolder.open(tmp_path / "model")
    assert await adopt(config, folder=tmp_path, model=model) == (config, None)
    (tmp_path / FILE).write_text(json.dumps({"format": 1}))
    with pytest.raises(UsageError, match="calibrate again, or delete it"):
        await adopt(config, folder=tmp_path, model=model)
