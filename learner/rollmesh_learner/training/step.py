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
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollmesh_learner.training import forest, packing, vocabulary
from rollmesh_learner.training.advantage import group_advantages
from rollmesh_learner.training.batch import Sample, split_groups
from rollmesh_learner.training.checks import LogprobLimits, Mismatch, k3, mismatch
from rollmesh_learner.training.loss import Objective, Tokens, importance, is_clipped, policy_loss
from rollmesh_learner.training.optimiser import MasterOptimiser
from rollmesh_learner.training.settings import TrainingSettings
from rollmesh_peer.models.logprobs import output_head


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step did."""

    updated: bool
    """Whether any weight may have changed."""
    metrics: dict[str, float]
    """Figures by name; see :meth:`PolicyTrainer.train`."""
    mismatches: tuple[tuple[str, Mismatch], ...]
    """Layer L4 by rollout id, in the batch's order."""


@dataclass(slots=True)
class _Tally:
    """What a step adds up while it runs."""

    loss: float = 0.0
    norm: float = 0.0
    updates: int = 0
    refused: int = 0
    clipped: int = 0
    differentiated: int = 0
    nodes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"old": 0.0, "gradient": 0.0, "optimiser": 0.0})

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - started


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The batch with everything per completion token in flat tensors on the model's device."""

    samples: Sequence[Sample]
    offsets: NDArray[np.int64]
    """[n + 1] where each sample's tokens begin in the flat tensors."""
    ids: Tensor
    tokens: Tokens
    old: Tensor
    """float32: pi_old, filled in on the way."""
    reference: Tensor | None

    def where(self, indices: Sequence[int]) -> Tensor:
        """Return the flat positions of the tokens of some samples, in the samples' order."""
        spans = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in indices]
        return torch.from_numpy(np.concatenate(spans)).to(self.old.device)


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
        """Make the step. Raises ``ValueError`` without samples.

        Metrics: ``loss``; ``gradient_norm`` (largest, before clipping, left out when not finite); ``lr``;
        ``kl_behaviour`` (k3, nats, of pi_old from the mu that came with the rollouts) and its tokens'
        ``logprob_error_median`` and ``_p99``; ``clamped_fraction`` of claimed tokens; ``importance_mean``;
        ``clip_fraction``; ``surprisal`` (mean -pi_old, nats); ``tokens``; ``computed_tokens`` (forward passes, shared
        beginnings once); ``groups``; ``groups_with_gradient``; ``updates``; ``updates_refused``; ``seconds_old``,
        ``_gradient``, ``_optimiser`` and ``_total``.
        """
        if not samples:
            raise ValueError("a step needs rollouts")
        started = time.perf_counter()
        tally = _Tally()
        groups = [sample.group for sample in samples]
        advantages = group_advantages([s.reward for s in samples], groups=groups, scale=self._settings.scale)
        carrying = [i for i in range(len(samples)) if advantages[i] or self._settings.kl]
        batch = self._flatten(samples, advantages)
        self._optimiser.clear()
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
        tally.seconds["total"] = time.perf_counter() - started
        return self._report(batch, advantages, tally)

    def _flatten(self, samples: Sequence[Sample], advantages: NDArray[np.float64]) -> _Batch:
        lengths = np.array([len(sample.tokens) for sample in samples])
        ids = np.concatenate([sample.tokens for sample in samples]).astype(np.int64)
        device = self._model.device
        tokens = Tokens(
            mu=torch.from_numpy(np.concatenate([sample.mu for sample in samples])).to(device),
            exact=torch.from_numpy(np.repeat([sample.exact for sample in samples], lengths)).to(device),
            advantage=torch.from_numpy(np.repeat(advantages, lengths).astype(np.float32)).to(device),
        )
        return _Batch(
            samples=samples,
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            ids=torch.from_numpy(ids).to(device),
            tokens=tokens,
            old=torch.zeros(len(ids), device=device),
            reference=None if self._reference is None else torch.zeros(len(ids), device=device),
        )

    def _passes(self, batch: _Batch, indices: Sequence[int]) -> Iterator[list[int]]:
        chosen = [batch.samples[i] for i in indices]
        for micro in forest.micro_batches(chosen, max_tokens=self._settings.micro_batch_tokens):
            yield [indices[i] for i in micro]

    @torch.no_grad()
    def _evaluate(
        self, model: PreTrainedModel, batch: _Batch, indices: Sequence[int], *, into: Tensor, tally: _Tally
    ) -> None:
        """Write the log-probabilities of some samples under ``model`` into their places of ``into``."""
        for micro in self._passes(batch, indices):
            states, nodes = packing.completion_states(model, [batch.samples[i] for i in micro])
            where = batch.where(micro)
            into[where] = vocabulary.logprobs(
                output_head(model), states=states, tokens=batch.ids[where], chunk=self._chunk
            )
            tally.nodes += nodes

    def _epoch(self, batch: _Batch, carrying: Sequence[int], *, tally: _Tally) -> None:
        parts = split_groups(
            [batch.samples[i] for i in carrying], parts=self._settings.minibatches, generator=self._generator
        )
        for part in parts:
            self._update(batch, [carrying[i] for i in sorted(part)], parts=len(parts), tally=tally)

    def _update(self, batch: _Batch, indices: Sequence[int], *, parts: int, tally: _Tally) -> None:
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

    def _differentiate(self, batch: _Batch, micro: Sequence[int], *, objective: Objective, tally: _Tally) -> None:
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

    def _report(self, batch: _Batch, advantages: NDArray[np.float64], tally: _Tally) -> StepReport:
        old, mu = batch.old.cpu().numpy(), batch.tokens.mu.cpu().numpy()
        spans = [slice(a, b) for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]
        mismatches = tuple(
            (sample.id, mismatch(mu[span], own=old[span], limits=self._limits))
            for sample, span in zip(batch.samples, spans, strict=True)
        )
        difference = np.clip((old - mu).astype(np.float64), -80.0, 80.0)
        claimed = ~batch.tokens.exact.cpu().numpy()
        weights = importance(batch.tokens, pi_old=batch.old, objective=self._objective(1))
        names = [sample.group for sample in batch.samples]
        metrics = {
            "loss": tally.loss,
            "lr": self._settings.lr_at(max(1, self._optimiser.updates)),
            "kl_behaviour": float(k3(difference).mean()),
            "logprob_error_median": float(np.median(np.abs(difference))),
            "logprob_error_p99": float(np.quantile(np.abs(difference), 0.99)),
            "clamped_fraction": _share(np.abs(difference[claimed]) > self._settings.delta),
            "importance_mean": float(weights.mean()),
            "clip_fraction": tally.clipped / max(1, tally.differentiated),
            "surprisal": float(-old.mean()),
            "tokens": float(len(old)),
            "computed_tokens": float(tally.nodes),
            "groups": float(len(set(names))),
            "groups_with_gradient": float(len({n for n, a in zip(names, advantages, strict=True) if a})),
            "updates": float(tally.updates),
            "updates_refused": float(tally.refused),
            **{f"seconds_{part}": seconds for part, seconds in tally.seconds.items()},
        }
        if tally.updates:
            metrics["gradient_norm"] = tally.norm
        return StepReport(
            updated=tally.updates > 0,
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            mismatches=mismatches,
        )


def _share(mask: NDArray[np.bool_]) -> float:
    return float(mask.mean()) if mask.size else 0.0


def _rows(head: nn.Module) -> int:
    assert isinstance(head, nn.Linear)  # every architecture that the loader admits
    return head.out_features
