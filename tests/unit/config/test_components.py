"""The configurations of learner and node: defaults, and values that do not go together."""

from __future__ import annotations

import pytest

from rollmesh_learner.config import Audit, Environment, LearnerConfig, Rollouts, Run, load_config
from rollmesh_learner.config import Model as BaseModel
from rollmesh_node.config import NodeConfig
from rollmesh_node.config import load_config as load_node_config
from rollmesh_protocol.errors import UsageError

LEAST = "[run]\nname = 'r'\n[model]\nsource = 'hub:o/m'\n[[environments]]\nname = 'addition'\n"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(LEAST)
    return path


def test_a_run_needs_a_name_a_model_and_an_environment(path):
    assert load_config(path, environ={}) == LearnerConfig(
        run=Run(name="r"), model=BaseModel(source="hub:o/m"), environments=(Environment(name="addition"),)
    )
    path.write_text("")
    with pytest.raises(UsageError) as caught:
        load_config(path, environ={})
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == [
        "run is missing",
        "model is missing",
        "environments is missing",
    ]


def test_a_node_needs_nothing():
    assert load_node_config(None, environ={}) == NodeConfig()
    assert load_node_config(None, environ={"ROLLMESH_NODE__ENGINE__THREADS": "2"}).engine.threads == 2


def test_the_variables_of_one_side_do_not_reach_the_other(path):
    assert load_config(path, environ={"ROLLMESH_NODE__ENGINE__THREADS": "2"}) == load_config(path, environ={})


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["rollouts.temperature=0.7"], "--set rollouts.temperature: rollouts.temperature: must be 1: "),
        (["rollouts.publish_every=4"], "{path}: rollouts: publish_every = 4 needs a staleness of at least 3: "),
        (["rollouts.samples_per_group=1"], "--set rollouts.samples_per_group: rollouts.samples_per_group must be at"),
        (["leases.min_duration_s=700"], "{path}: leases: min_duration_s must not exceed max_duration_s"),
        (["admission.mode=allowlist"], "{path}: admission: mode allowlist and a list in allow go together"),
        (["admission.allow=me"], "--set admission.allow: admission.allow.0: 'me' is not the peer id"),
        (["training.microbatch_tokens=1000"], "{path}: training.microbatch_tokens = 1000 cannot hold one rollout"),
        (["weights.keep_versions=3"], "{path}: weights.keep_versions = 3 must be at least rollouts.staleness + 2 = 4"),
        (["run.name=Ärger"], "--set run.name: run.name must match "),
        (["network.listen="], "--set network.listen: network.listen must have at least 1 entries"),
        (["audit.rate_steady=3"], "--set audit.rate_steady: audit.rate_steady must be at most 1, not 3"),
    ],
)
def test_values_that_cannot_work_are_refused_with_the_reason(path, overrides, sentence):
    with pytest.raises(UsageError) as caught:
        load_config(path, overrides=overrides, environ={})
    assert str(caught.value).startswith(sentence.format(path=path))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("staleness", "publish_every"), [(0, 1), (1, 2), (2, 1), (2, 3)])
def test_a_rollout_can_be_fresh_until_the_next_publication(staleness, publish_every):
    assert Rollouts(staleness=staleness, publish_every=publish_every).publish_every == publish_every


def test_the_default_verdicts_are_those_of_the_design():
    audit = Audit()
    assert (audit.margin_hard, audit.margin_high, audit.margin_soft, audit.high_per_rollout) == (3.0, 1.0, 0.5, 3)
    assert (audit.window_tokens, audit.high_share, audit.soft_share) == (200, 0.01, 0.01)
    assert (audit.rate_new, audit.new_rollouts) == (1.0, 10)
    assert (audit.rate_probation, audit.probation_rollouts, audit.rate_steady) == (0.5, 50, 0.03)
