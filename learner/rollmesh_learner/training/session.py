"""A trainer's memory between calls: one model, its masters and moments, and the step that they have come to.

Invariants: steps are made in order, each once; a step that failed half-way ends the session, because nobody can say
what its weights are; what :meth:`Session.export` writes is what :meth:`Session.checkpoint` would save as the model.
Weights come from safetensors only, and no code that comes with a model is run (:mod:`rollmesh_peer.models.loader`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollmesh_learner.training import checkpoint
from rollmesh_learner.training.batch import RolloutRecord, open_rollout
from rollmesh_learner.training.figures import StepReport
from rollmesh_learner.training.optimiser import MasterOptimiser
from rollmesh_learner.training.settings import TrainingSettings
from rollmesh_learner.training.step import PolicyTrainer
from rollmesh_peer.models.folder import ModelFolder
from rollmesh_peer.models.image import layout_of, weights_of, write_image
from rollmesh_peer.models.loader import build_model
from rollmesh_protocol.errors import ChildFailed, HostError
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.verdicts.logprobs import LogprobLimits

WRONG_STEP: Final = "trainer.step"
"""The code of a step that is not the next one."""


class Session:
    """One trainer, from :meth:`open` to the end of the process."""

    def __init__(
        self, model: PreTrainedModel, *, folder: ModelFolder, optimiser: MasterOptimiser, trainer: PolicyTrainer,
        generator: np.random.Generator, step: int,
    ) -> None:  # fmt: skip
        self._model = model
        self._folder = folder
        self._optimiser = optimiser
        self._trainer = trainer
        self._generator = generator
        self._broken = False
        self.step = step
        """Steps that the present weights are made of; also the number of the next one."""
        self.layout: Layout = layout_of(model)

    @classmethod
    def open(
        cls,
        model_folder: Path,
        *,
        checkpoint_folder: Path | None,
        settings: TrainingSettings,
        limits: LogprobLimits,
        normaliser: float,
        threads: int,
        seed: int,
        device: str,
    ) -> Self:
        """Load the base model, or go on from a checkpoint of it.

        ``normaliser`` is Z of the loss; ``threads`` 0 leaves torch's choice; ``device`` is auto, cpu or cuda.
        Raises ``UsageError`` or ``Refused`` for the model, ``ChildFailed`` for a checkpoint that does not fit it,
        ``HostError`` for a device that is not there.
        """
        if threads:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        generator = np.random.default_rng(seed)
        chosen = _device(device)
        folder = ModelFolder.open(model_folder)
        source = folder.path if checkpoint_folder is None else checkpoint_folder
        model = _load(folder, weights=source, device=chosen)
        optimiser = MasterOptimiser(_parameters(model), settings=settings)
        step = 0
        if checkpoint_folder is not None:
            state = checkpoint.load_state(checkpoint_folder)
            optimiser.restore(
                masters=checkpoint.load_tensors(checkpoint_folder / checkpoint.MASTERS),
                state=checkpoint.load_tensors(checkpoint_folder / checkpoint.OPTIMISER),
                updates=state.updates,
            )
            checkpoint.restore_random(state, generator=generator)
            step = state.step
        trainer = PolicyTrainer(
            model,
            optimiser=optimiser,
            settings=settings,
            normaliser=normaliser,
            limits=limits,
            generator=generator,
            reference=_load(folder, weights=folder.path, device=chosen) if settings.kl else None,
        )
        return cls(model, folder=folder, optimiser=optimiser, trainer=trainer, generator=generator, step=step)

    @property
    def is_broken(self) -> bool:
        """Whether a step failed half-way, so that nothing else can be done with this session."""
        return self._broken

    @property
    def vocabulary(self) -> int:
        """Token ids below this are in the model's vocabulary."""
        embeddings = self._model.get_input_embeddings()
        assert isinstance(embeddings, nn.Embedding)
        return embeddings.num_embeddings

    @property
    def num_parameters(self) -> int:
        """Trained numbers; a tied tensor counts once."""
        return sum(master.numel() for master in self._optimiser.masters.values())

    def train(self, rollouts: Sequence[RolloutRecord], *, step: int) -> StepReport:
        """Make step ``step`` (the weights' own step number) from a batch.

        Raises ``ChildFailed``: for a step that is not the next one or a rollout that cannot be read, which change
        nothing; and for every call after a step that failed half-way.
        """
        self._check()
        if step != self.step:
            raise ChildFailed(f"the trainer is at step {self.step} and was asked for step {step}", code=WRONG_STEP)
        if not rollouts:
            raise ChildFailed("a step needs rollouts", code="trainer.rollout")
        samples = [open_rollout(record, vocabulary=self.vocabulary) for record in rollouts]
        self._broken = True
        report = self._trainer.train(samples)
        self._broken = False
        self.step += 1
        return report

    def export(self, path: Path) -> None:
        """Write the image of the present weights, complete or not at all. ``HostError`` when the disk refuses."""
        self._check()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_image(self.weights(), layout=self.layout, image=path)
        except OSError as error:
            raise HostError(f"the weights cannot be written to {path}: {error}") from error

    def checkpoint(self, folder: Path, *, carry: Mapping[str, object]) -> None:
        """Make everything durable as ``folder``; see :func:`rollmesh_learner.training.checkpoint.save`."""
        self._check()
        torch_random, numpy_random = checkpoint.random_state(self._generator)
        state = checkpoint.State(
            step=self.step,
            updates=self._optimiser.updates,
            torch_random=torch_random,
            numpy_random=numpy_random,
            carry=carry,
        )
        checkpoint.save(folder, source=self, state=state, model_folder=self._folder.path)

    def weights(self) -> Mapping[str, Tensor]:
        """Return the model's tensors by name, in the layout's dtypes."""
        return weights_of(self._model)

    def masters(self) -> Mapping[str, Tensor]:
        """Return the float32 masters by parameter name."""
        return self._optimiser.masters

    def moments(self) -> Mapping[str, Tensor]:
        """Return AdamW's moments by ``<parameter>.<moment>``."""
        return self._optimiser.state()

    def _check(self) -> None:
        if self._broken:
            raise ChildFailed("an earlier step failed half-way; open the trainer again", code=WRONG_STEP)


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise HostError("the config asks for a CUDA device, and torch finds none")
    return wanted


def _parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    return {name: tensor for name, tensor in weights_of(model).items() if isinstance(tensor, nn.Parameter)}


def _load(folder: ModelFolder, *, weights: Path, device: str) -> PreTrainedModel:
    """Return the folder's model with the tensors of the safetensors files in ``weights``."""
    model = build_model(folder.config, device=device)
    missing = weights_of(model)
    for file in _weight_files(weights):
        for name, tensor in checkpoint.load_tensors(file).items():
            target = missing.pop(name, None)
            if target is None:
                continue
            if target.shape != tensor.shape:
                raise ChildFailed(f"{file}: the tensor {name} has another shape than the model", code=checkpoint.CODE)
            with torch.no_grad():
                target.copy_(tensor)
    if missing:
        raise ChildFailed(f"{weights} has no tensor {min(missing)}", code=checkpoint.CODE)
    return model


def _weight_files(folder: Path) -> list[Path]:
    whole = folder / checkpoint.MODEL
    if whole.is_file():
        return [whole]
    return sorted(file for file in folder.glob("*.safetensors") if file.name not in checkpoint.NOT_WEIGHTS)
