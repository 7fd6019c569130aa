"""The learner's child processes: what each is started with, and what it must be told before it is of use.

None of them is trusted with more than it needs: only the trainer writes, and only into the run's folder; the scorer
runs in the sandbox; no child has the run's keys or its network.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio

from rollmesh_learner import terms
from rollmesh_learner.config import LearnerConfig
from rollmesh_learner.training.client import TrainerClient
from rollmesh_learner.training.settings import TrainingSettings
from rollmesh_peer import faults
from rollmesh_peer.children.confinement import AnswerLimits
from rollmesh_peer.children.frames import Body
from rollmesh_peer.children.process import Child, ChildSpec, kept_environment, python_argv
from rollmesh_peer.children.scoring import (
    ENVIRONMENT_VARIABLES,
    Confinement,
    EnvironmentChoice,
    open_scorer,
    scorer_spec,
)
from rollmesh_peer.children.supervisor import Supervisor
from rollmesh_peer.models.folder import Json, ModelFolder
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.limits import MIB

_log = logging.getLogger("rollmesh.learner")

CHECKPOINTS: Final = "checkpoints"
"""The folder of checkpoints in that of the run."""
_START_S: Final = 120.0
_OPEN_S: Final = 600.0
_TORCH_ENVIRONMENT: Final = {
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait must not spin on the cores that nodes and trainer share
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class PrompterFacts:
    """What the prompter knows of the model's tokenizer."""

    stop_tokens: tuple[int, ...] = ()
    vocabulary: int = 0
    digest: bytes = bytes(32)


@dataclass(kw_only=True)
class Crew:
    """The running children, and what they told when they opened."""

    trainer: TrainerClient
    prompter: Supervisor
    scorer: Supervisor
    auditor: Supervisor
    layout: Layout
    parameters: int
    vocabulary: int
    facts: PrompterFacts
    confinement: str

    def states(self) -> tuple[str, ...]:
        """One sentence for each, for ``status``."""
        return (
            self.trainer.state,
            f"auditor: {self.auditor.state}",
            f"prompter: {self.prompter.state}",
            f"scorer: {self.scorer.state}; {self.confinement}",
        )


@asynccontextmanager
async def open_crew(config: LearnerConfig, *, model: ModelFolder, folder: Path) -> AsyncIterator[Crew]:
    """Start all children and wait until trainer, prompter and scorer are ready; they end with the block.

    Raises:
        UsageError, Refused, HostError, ChildFailed: one of them says that it cannot do what the config asks of it (in
            an exception group; of the auditor it may come later).
    """
    facts = PrompterFacts()
    told: list[Confinement] = []
    trainer = make_trainer(config, model=model.path, checkpoints=folder / CHECKPOINTS)
    prompter = make_prompter(config, model=model.path, facts=facts)
    scorer = make_scorer(config, hidden=(folder,), note=told.append)
    async with trio.open_nursery() as nursery:
        for child in (trainer, prompter, scorer):
            nursery.start_soon(child.run)
        async with trio.open_nursery() as opening:
            opening.start_soon(trainer.wait_accepted)
            for child in (prompter, scorer):
                opening.start_soon(partial(child.wait_accepted, deadline_s=_OPEN_S))
        _log.info("%s", told[-1])
        layout = read_layout(trainer.opened)
        auditor = make_auditor(config, model_config=model.config, layout=layout)
        nursery.start_soon(auditor.run)
        nursery.start_soon(_demand, auditor)
        yield Crew(
            trainer=trainer,
            prompter=prompter,
            scorer=scorer,
            auditor=auditor,
            layout=layout,
            parameters=_number(trainer.opened, "parameters"),
            vocabulary=_number(trainer.opened, "vocabulary"),
            facts=facts,
            confinement=str(told[-1]),
        )
        nursery.cancel_scope.cancel()


async def _demand(auditor: Supervisor) -> None:
    """End the program for an auditor that says it cannot begin; one that dies makes audits wait, who say so."""
    try:
        await auditor.wait_accepted(deadline_s=_OPEN_S)
    except ChildFailed as error:
        _log.warning("%s", error.detail)


def make_trainer(config: LearnerConfig, *, model: Path, checkpoints: Path) -> TrainerClient:
    """The trainer child, opened on the base model or the newest checkpoint."""
    rollouts = config.rollouts
    opening: Body = {
        "model_folder": str(model),
        "settings": {name: getattr(config.training, name) for name in TrainingSettings.model_fields},
        "threads": config.training.threads,
        "seed": config.run.seed,
        "device": config.training.device,
        "batch": {
            "samples": rollouts.groups_per_step * rollouts.samples_per_group,
            "new_tokens": rollouts.max_new_tokens,
        },
        "checks": config.trust.model_dump(),
    }
    return TrainerClient(
        torch_spec("trainer", "rollmesh_learner.training.trainer", threads=config.training.threads),
        opening=opening,
        checkpoints=checkpoints,
        kept=config.training.checkpoints_kept,
        reach=terms.rollback_reach(config),
    )


def make_prompter(config: LearnerConfig, *, model: Path, facts: PrompterFacts) -> Supervisor:
    """The child that makes prompts and decodes answers; ``facts`` are filled in whenever it opens."""

    async def prepare(child: Child) -> None:
        opened = await child.call(
            "open",
            {
                "model_folder": str(model),
                "environments": [choice.to_plain() for choice in choices(config)],
                "seed": config.run.seed,
            },
            deadline_s=_OPEN_S,
        )
        stops, vocabulary, digest = opened["stop_tokens"], opened["vocabulary"], opened["tokenizer_digest"]
        if not isinstance(stops, list | tuple) or not isinstance(vocabulary, int) or not isinstance(digest, bytes):
            raise ChildFailed("the prompter opened without telling its tokenizer")
        facts.stop_tokens = tuple(int(stop) for stop in stops)
        facts.vocabulary = vocabulary
        facts.digest = digest

    spec = ChildSpec(
        name="prompter",
        argv=python_argv("rollmesh_learner.work.prompter"),
        environment=kept_environment(os.environ, ENVIRONMENT_VARIABLES),
        start_deadline_s=_START_S,
    )
    return Supervisor(spec, prepare)


def make_scorer(config: LearnerConfig, *, hidden: Sequence[Path], note: Callable[[Confinement], None]) -> Supervisor:
    """The sandboxed child that scores answers; ``note`` hears how it is confined whenever one opens."""

    async def prepare(child: Child) -> None:
        confinement = await open_scorer(
            child, choices(config), seed=config.run.seed, hidden=hidden, limits=answer_limits(config)
        )
        note(confinement)

    return Supervisor(scorer_spec(), prepare)


def make_auditor(config: LearnerConfig, *, model_config: Json, layout: Layout) -> Supervisor:
    """The child that recomputes rollouts."""

    async def prepare(child: Child) -> None:
        await child.call(
            "open",
            {
                "config_json": json.dumps(model_config),
                "layout": layout.encode(),
                "threads": config.audit.threads,
                "device": config.audit.device,
            },
            deadline_s=_OPEN_S,
        )

    return Supervisor(torch_spec("auditor", "rollmesh_learner.audit.process", threads=config.audit.threads), prepare)


def choices(config: LearnerConfig) -> list[EnvironmentChoice]:
    """The run's environments, in the order of the config, which is how the ledger names them."""
    return [
        EnvironmentChoice(name=environment.name, parameters=environment.parameters, weight=environment.weight)
        for environment in config.environments
    ]


def answer_limits(config: LearnerConfig) -> AnswerLimits:
    """What scoring one answer may use."""
    scoring = config.scoring
    return AnswerLimits(cpu_s=scoring.cpu_s, wall_s=scoring.wall_s, memory_bytes=scoring.memory_mb * MIB)


def read_layout(opened: Body) -> Layout:
    """The layout that a trainer told when it opened."""
    tensors = opened.get("layout")
    if not isinstance(tensors, Sequence):
        raise ChildFailed("the trainer opened without telling its layout")
    return Layout.read({"tensors": tuple(_tensor(tensor) for tensor in tensors)})


def _number(opened: Body, name: str) -> int:
    value = opened.get(name)
    if not isinstance(value, int) or value < 1:
        raise ChildFailed(f"the trainer opened without telling its {name}")
    return value


def _tensor(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ChildFailed("the trainer's layout has a tensor that is no map")
    return {"name": value["name"], "dtype": value["dtype"], "shape": tuple(value["shape"])}


def torch_spec(name: str, module: str, *, threads: int) -> ChildSpec:
    """A child that computes with torch; 0 threads leave the choice to it."""
    chosen = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return ChildSpec(
        name=name,
        argv=python_argv(module),
        environment=kept_environment(os.environ, _TORCH_ENVIRONMENT | chosen | faults.armed()),
        start_deadline_s=_START_S,
    )
