"""The configurations of learner and node: defaults, and values that do not go together."""

from __future__ import annotations

import dataclasses

import pytest

from rollmesh_learner.config import Audit, Environment, LearnerConfig, Rollouts, Run, Scoring, Trust, load_config
from rollmesh_learner.config import Model as BaseModel
from rollmesh_learner.members.standing import StandingRules
from rollmesh_learner.training.settings import TrainingSettings
from rollmesh_node.config import NodeConfig
from rollmesh_node.config import load_config as load_node_config
from rollmesh_peer.children.confinement import AnswerLimits
from rollmesh_protocol import limits
from rollmesh_protocol.errors import UsageError
from rollmesh_protocol.verdicts.logprobs import LogprobLimits
from rollmesh_protocol.verdicts.margins import Thresholds

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


def defaults_of(kind):
    return {field.name: field.default for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("section", "kind"), [(Audit(), Thresholds), (Audit(), StandingRules), (Trust(), LogprobLimits)]
)
def test_sections_become_the_components_own_terms(section, kind):
    made = section.to(kind)
    for name, default in defaults_of(kind).items():
        assert default in (dataclasses.MISSING, getattr(made, name))


@dataclasses.dataclass(frozen=True)
class Terms:
    rate_new: float
    secret: bytes


def test_what_is_no_setting_is_added():
    assert Audit().to(Terms, secret=b"x") == Terms(rate_new=1.0, secret=b"x")
    with pytest.raises(TypeError, match="secret"):
        Audit().to(Terms)


def test_the_rates_of_audits_are_those_of_the_design():
    audit = Audit()
    assert (audit.rate_new, audit.new_rollouts) == (1.0, 10)
    assert (audit.rate_probation, audit.probation_rollouts, audit.rate_steady) == (0.5, 50, 0.03)


def test_training_is_what_the_trainer_takes(path):
    training = load_config(path, overrides=["training.lr=1e-5", "training.threads=2"], environ={}).training
    settings = TrainingSettings.model_validate(training.model_dump(include=set(TrainingSettings.model_fields)))
    assert (settings.lr, settings.clip_low) == (1e-5, 0.2)
    assert settings == TrainingSettings(lr=1e-5)


def test_the_scorers_limits_are_those_of_the_sandbox():
    scoring, own = Scoring(), AnswerLimits()
    assert (scoring.cpu_s, scoring.wall_s, scoring.memory_mb * limits.MIB) == (own.cpu_s, own.wall_s, own.memory_bytes)
