"""The run card says how the run judges: what its calibration found, and what its operator has set."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from rollmesh_learner import terms
from rollmesh_learner.audit.calibration import (
    FILE,
    Calibration,
    adopt,
    model_digest,
    read_calibration,
    write_calibration,
)
from rollmesh_learner.beginning import make_card
from rollmesh_learner.config import LearnerConfig, load_config
from rollmesh_learner.crew import Crew
from rollmesh_peer.models.folder import ModelFolder
from rollmesh_protocol.errors import UsageError
from rollmesh_protocol.messages import RunCard
from rollmesh_protocol.verdicts.judging import Judging
from tests.unit.node.cards import LAYOUT, LEARNER, RUN


@pytest.fixture
def model(tmp_path: Path) -> ModelFolder:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return ModelFolder.open(folder)


@pytest.fixture
def config(tmp_path: Path) -> LearnerConfig:
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "tiny"\n[model]\nsource = "model"\n[[environments]]\nname = "addition"\n'
        "[audit]\nhigh_margin = 0.9\nwindow_tokens = 300\n[trust]\nkl = 0.2\n"
    )
    return load_config(path, environ={})


def calibration(model: ModelFolder, **fields: float) -> Calibration:
    values: dict[str, object] = {
        "made_at": "today", "software": "test", "versions": {}, "model_source": "model",
        "model_digest": model_digest(model.path), "longest_tokens": 16, "hard_rate_per_life": 1e-3,
        "life_rollouts": 10_000, "soft_rate_per_rollout": 1e-5, "low_margin": 0.66, "high_margin": 1.1,
        "any_margin": 2.5, "drift_clip": 0.34, "drift_reference": 0.0035, "drift_exponent": 5.5, "drift_alarm": 17.5,
        "delta": 0.4, "cells": (),
    }  # fmt: skip
    return Calibration.model_validate(values | fields)


async def card_of(config: LearnerConfig, *, folder: Path, model: ModelFolder) -> RunCard:
    """As the learner makes it at its start."""
    adopted, drift = await adopt(config, folder=folder, model=model)
    facts = SimpleNamespace(stop_tokens=(2,), digest=bytes(32))
    hands = cast(Crew, SimpleNamespace(parameters=16, layout=LAYOUT, vocabulary=100, facts=facts))
    return make_card(
        adopted, run=RUN, learner=LEARNER.peer, model=model, base_root=bytes(32), hands=hands,
        judging=terms.judging(adopted, drift=drift),
    )  # fmt: skip


async def test_a_calibrated_run_says_what_was_found(config, model, tmp_path) -> None:
    found = calibration(model)
    write_calibration(found, folder=tmp_path)
    judging = Judging.read((await card_of(config, folder=tmp_path, model=model)).checks)
    assert judging.drift == found.drift and judging.origin == "this run's calibration"
    assert (judging.thresholds.low_margin, judging.thresholds.any_margin) == (0.66, 2.5)
    assert judging.thresholds.high_margin == 0.9, "what the operator has set wins"
    assert (judging.thresholds.window_tokens, judging.logprobs.kl) == (300, 0.2)


async def test_a_run_without_one_says_what_was_set(config, model, tmp_path) -> None:
    judging = Judging.read((await card_of(config, folder=tmp_path, model=model)).checks)
    assert judging.drift is None and judging.origin.startswith("set for this run")
    assert (judging.thresholds.high_margin, judging.thresholds.low_margin) == (0.9, 0.5)


async def test_a_new_calibration_gives_another_card_of_the_same_run(config, model, tmp_path) -> None:
    before = await card_of(config, folder=tmp_path, model=model)
    write_calibration(calibration(model, drift_exponent=0.0), folder=tmp_path)
    after = await card_of(config, folder=tmp_path, model=model)
    assert after != before and after.is_same_run(before)


@pytest.mark.parametrize("field", ["drift_clip", "drift_reference", "drift_exponent", "drift_alarm"])
def test_a_calibration_that_fits_no_card_is_none(field: str, model: ModelFolder, tmp_path: Path) -> None:
    text = calibration(model).model_dump_json()
    value = str(getattr(calibration(model), field))
    (tmp_path / FILE).write_text(text.replace(f'"{field}":{value}', f'"{field}":1e9'))
    with pytest.raises(UsageError, match="calibrate again, or delete it"):
        read_calibration(tmp_path)
