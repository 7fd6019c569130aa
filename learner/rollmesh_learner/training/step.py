"""One training step: rollouts in, other weights and figures out.

With one optimiser step per batch, the policy of the forward pass *is* pi_old, so the pass that makes the gradient
also makes the old log-probabilities, and rollouts that carry no gradient (their group has no variance) get a forward
pass only. With several, pi_old comes from a pass of its own.

Invariants: every rollout gets its figures of layer L4, gradient or not; weights and moments change only when some
group carries gradient and the gradient is finite; whatever fails before the optimiser's step leaves them untouched.
It knows no folders and no pipes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollmesh_learner.training import figures, forest, packing, vocabulary
from rollmesh_learner.training.advantage import group_advantages
from rollmesh_learner.training.batch import Sample, split_groups
from rollmesh_learner.training.figures import StepReport, Tally
from rollmesh_learner.training.flat import FlatBatch, flatten
from rollmesh_learner.training.loss import Objective, is_clipped, policy_loss
from rollmesh_learner.training.optimiser import MasterOptimiser
from rollmesh_learner.training.settings import TrainingSettings
from rollmesh_peer.models.logprobs import output_head
from rollmesh_protocol.verdicts.logprobs import LARGEST_EXPONENT, LogprobLimits

DRIFT_SAMPLES: Final = 8
"""Samples at most on which the effect of a step is measured."""
DRIFT_SHARE: Final = 16
"""And one in so many, so that it costs some two percent of a step: a forward pass over them."""


class PolicyTrainer:
    """Changes a model by rollouts. ``reference`` is the base model where the objective has a KL term."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        optimiser: MasterOptimiser,
        settings: TrainingSettings,
        normaliser: float,
        limits: LogprobLimits,
        generator: np.random.Generator,
        reference: PreTrainedModel | None = None,
    ) -> None:
        if bool(settings.kl) != (reference is not None):
            raise ValueError("a KL term and a reference model go together")
        self._model = model
        self._head = output_head(model)
        self._chunk = vocabulary.chunk_tokens(_rows(self._head), logits_bytes=settings.logits_bytes)
        self._optimiser = optimiser
        self._settings = settings
        self._normaliser = normaliser
        self._limits = limits
        self._generator = generator
        self._reference = reference
        packing.enable(model)
        if reference is not None:
            packing.enable(reference)

    def train(self, samples: Sequence[Sample]) -> StepReport:
        """Make the step. Raises ``ValueError`` without samples. For the figures see :func:`.figures.report`."""
        if not samples:
            raise ValueError("a step needs rollouts")
        started = time.perf_counter()
        tally = Tally()
        groups = [sample.group for sample in samples]
        advantages = group_advantages([s.reward for s in samples], groups=groups, scale=self._settings.scale)
        carrying = [i for i in range(len(samples)) if advantages[i] or self._settings.kl]
        batch = flatten(
            samples, advantages=advantages, device=self._model.device, has_reference=self._reference is not None
        )
        if self._reference is not None:
            assert batch.reference is not None
            with tally.timed("old"):
                self._evaluate(self._reference, batch, range(len(samples)), into=batch.reference, tally=tally)
        if self._settings.single_update:
            idle = sorted(set(range(len(samples))) - set(carrying))
            with tally.timed("old"):
                self._evaluate(self._model, batch, idle, into=batch.old, tally=tally)
            self._update(batch, carrying, parts=1, tally=tally)
        else:
            with tally.timed("old"):
                self._evaluate(self._model, batch, range(len(samples)), into=batch.old, tally=tally)
            for _ in range(self._settings.epochs):
                self._epoch(batch, carrying, tally=tally)
        if tally.updates:
            with tally.timed("drift"):
                tally.drift = self._drift(batch, tally=tally)
        tally.seconds["total"] = time.perf_counter() - started
        return figures.report(
            batch,
            advantages=advantages,
            tally=tally,
            objective=self._objective(1),
            limits=self._limits,
            lr=self._settings.lr_at(max(1, self._optimiser.updates)),
        )

    def _passes(self, batch: FlatBatch, indices: Sequence[int]) -> Iterator[list[int]]:
        chosen = [batch.samples[i] for i in indices]
        for micro in forest.micro_batches(chosen, max_tokens=self._settings.micro_batch_tokens):
            yield [indices[i] for i in micro]

    @torch.no_grad()
    def _evaluate(
        self, model: PreTrainedModel, batch: FlatBatch, indices: Sequence[int], *, into: Tensor, tally: Tally
    ) -> None:
        """Write the log-probabilities of some samples under ``model`` into their places of ``into``."""
        for micro in self._passes(batch, indices):
            states, nodes = packing.completion_states(model, [batch.samples[i] for i in micro])
            where = batch.where(micro)
            into[where] = vocabulary.logprobs(
                output_head(model), states=states, tokens=batch.ids[where], chunk=self._chunk
            )
            tally.nodes += nodes

    def _drift(self, batch: FlatBatch, *, tally: Tally) -> float:
        """How far the step has moved the policy: half the mean squared change of its log-probabilities, in nats.

        That is the k2 estimate of the divergence, over the tokens of a few samples. k3 would explode for one rare token
        that was rewarded and became likely.
        """
        count = len(batch.samples)
        few = range(0, count, -(-count // min(DRIFT_SAMPLES, -(-count // DRIFT_SHARE))))
        now = torch.zeros_like(batch.old)
        self._evaluate(self._model, batch, few, into=now, tally=tally)
        where = batch.where(few)
        difference = (now - batch.old)[where].double().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
        return float(difference.square().mean() / 2)

    def _epoch(self, batch: FlatBatch, carrying: Sequence[int], *, tally: Tally) -> None:
        parts = split_groups(
            [batch.samples[i] for i in carrying], parts=self._settings.minibatches, generator=self._generator
        )
        for part in parts:
            self._update(batch, [carrying[i] for i in sorted(part)], parts=len(parts), tally=tally)

    def _update(self, batch: FlatBatch, indices: Sequence[int], *, parts: int, tally: Tally) -> None:
        """Make one optimiser step from some samples, one of ``parts`` of the batch; none of no samples."""
        if not indices:
            return
        objective = self._objective(parts)
        with tally.timed("gradient"):
            for micro in self._passes(batch, indices):
                self._differentiate(batch, micro, objective=objective, tally=tally)
        with tally.timed("optimiser"):
            norm = self._optimiser.step()
        if math.isfinite(norm):
            tally.updates += 1
            tally.norm = max(tally.norm, norm)
        else:
            tally.refused += 1

    def _differentiate(self, batch: FlatBatch, micro: Sequence[int], *, objective: Objective, tally: Tally) -> None:
        where = batch.where(micro)
        known = batch.tokens[where]
        old = None if self._settings.single_update else batch.old[where]
        reference = None if batch.reference is None else batch.reference[where]

        def loss_of(values: Tensor, part: slice) -> Tensor:
            return policy_loss(
                values,
                pi_old=values.detach() if old is None else old[part],
                tokens=known[part],
                objective=objective,
                reference=None if reference is None else reference[part],
            )

        states, nodes = packing.completion_states(self._model, [batch.samples[i] for i in micro])
        values, loss = vocabulary.backward(
            self._head, states=states, tokens=batch.ids[where], loss_of=loss_of, chunk=self._chunk
        )
        if old is None:
            batch.old[where] = values
        else:
            clipped = is_clipped(values, pi_old=old, advantage=known.advantage, objective=objective)
            tally.clipped += int(clipped.sum())
        tally.loss += float(loss)
        tally.differentiated += len(values)
        tally.nodes += nodes

    def _objective(self, parts: int) -> Objective:
        chosen = self._settings
        return Objective(
            clip_low=chosen.clip_low,
            clip_high=chosen.clip_high,
            importance_cap=chosen.importance_cap,
            delta=chosen.delta,
            kl=chosen.kl,
            normaliser=self._normaliser / parts,
        )


def _rows(head: nn.Module) -> int:
    assert isinstance(head, nn.Linear)  # every architecture that the loader admits
    return head.out_features
