"""The trainer process: ``python -m rollmesh_learner.training.trainer``, a child of the learner.

    open        {model_folder, checkpoint: path | None, settings, threads, seed, device,
                 batch: {samples, new_tokens}, checks: {median, kl, least_ratio}}
                                                 -> {step, parameters, vocabulary, layout: [{name, dtype, shape}]}
    train       {step, rollouts: [RolloutRecord]} -> {updated, step, metrics, mismatches: [{id, verdict, ...}]}
    export      {path}                            -> {path, step}
    checkpoint  {folder, carry}                   -> {folder, step}

``step`` is the number of steps that the weights are made of: a fresh trainer is at 0, and ``train`` takes the step it
is at. Invariant: a request that is refused has changed nothing; a step that fails half-way ends the process, because
nobody can say what its weights are, and the daemon starts another from the last checkpoint. The module itself loads no
torch, so that the pipes are safe before a library prints.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from rollmesh_learner.training.batch import RolloutRecord
from rollmesh_learner.training.settings import TrainingSettings
from rollmesh_peer.children.child import leave, run_child, take_pipes
from rollmesh_peer.children.frames import Body
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.verdicts.logprobs import LogprobLimits

if TYPE_CHECKING:
    from rollmesh_learner.training.session import Session


HALF_WAY_STATUS: Final = 4
"""Exit status after a step that failed half-way; its traceback is on stderr."""


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


R = TypeVar("R", bound=_Request)


class BatchShape(_Request):
    """What the loss is divided by: the batch's samples times the longest completion."""

    samples: int = Field(ge=1)
    new_tokens: int = Field(ge=1)


class OpenRequest(_Request):
    """Load the base model, or go on from a checkpoint of it."""

    model_folder: str
    checkpoint: str | None = None
    settings: TrainingSettings
    threads: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0, lt=2**63)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    batch: BatchShape
    checks: dict[Literal["median", "kl", "least_ratio"], float] = Field(default_factory=dict)


class TrainRequest(_Request):
    """Make one step."""

    step: int = Field(ge=0)
    rollouts: list[RolloutRecord] = Field(min_length=1)


class ExportRequest(_Request):
    """Write the image of the present weights."""

    path: str


class CheckpointRequest(_Request):
    """Make everything durable; ``carry`` comes back in state.json."""

    folder: str
    carry: dict[str, JsonValue] = Field(default_factory=dict)


class Trainer:
    """The verbs, over one session."""

    def __init__(self) -> None:
        self._session: Session | None = None

    def open(self, body: Body) -> Body:
        """Open a session in place of the one there was."""
        from rollmesh_learner.training.session import Session

        asked = _read(OpenRequest, body)
        self._session = None
        self._session = session = Session.open(
            Path(asked.model_folder),
            checkpoint_folder=None if asked.checkpoint is None else Path(asked.checkpoint),
            settings=asked.settings,
            limits=LogprobLimits(**asked.checks),
            normaliser=float(asked.batch.samples * asked.batch.new_tokens),
            threads=asked.threads,
            seed=asked.seed,
            device=asked.device,
        )
        return {
            "step": session.step,
            "parameters": session.num_parameters,
            "vocabulary": session.vocabulary,
            "layout": [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in session.layout.tensors],
        }

    def train(self, body: Body) -> Body:
        """Make one step."""
        asked = _read(TrainRequest, body)
        session = self._opened()
        try:
            report = session.train(asked.rollouts, step=asked.step)
        finally:
            if session.is_broken:
                traceback.print_exc()
                leave(HALF_WAY_STATUS)  # the daemon finds the traceback in our last words
        return {
            "updated": report.updated,
            "step": session.step,
            "metrics": report.metrics,
            "mismatches": [{"id": name, **found.as_record()} for name, found in report.mismatches],
        }

    def export(self, body: Body) -> Body:
        """Write the image of the present weights."""
        asked = _read(ExportRequest, body)
        session = self._opened()
        session.export(Path(asked.path))
        return {"path": asked.path, "step": session.step}

    def checkpoint(self, body: Body) -> Body:
        """Save a checkpoint."""
        asked = _read(CheckpointRequest, body)
        session = self._opened()
        session.checkpoint(Path(asked.folder), carry=asked.carry)
        return {"folder": asked.folder, "step": session.step}

    def _opened(self) -> Session:
        if self._session is None:
            raise ChildFailed("the trainer was not opened", code="trainer.step")
        return self._session


def _read(kind: type[R], body: Mapping[str, object]) -> R:
    try:
        return kind.model_validate(dict(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ChildFailed(f"{kind.__name__}: {place}: {first['msg']}", code="trainer.request") from error


def main() -> NoReturn:
    """Serve the learner until it goes away."""
    take_pipes()
    trainer = Trainer()
    run_child(
        {"open": trainer.open, "train": trainer.train, "export": trainer.export, "checkpoint": trainer.checkpoint}
    )


if __name__ == "__main__":
    main()
