"""What a step did, in numbers: figures for the metrics file, and layer L4 for every rollout.

Invariant: every figure is a finite float, or it is left out and counted. It computes nothing that the step needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollmesh_learner.training.flat import FlatBatch
from rollmesh_learner.training.loss import Objective, importance
from rollmesh_protocol.verdicts.logprobs import LARGEST_EXPONENT, LogprobLimits, Mismatch, k3, mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step did."""

    updated: bool
    """Whether any weight may have changed."""
    metrics: dict[str, float]
    """Figures by name; see :func:`report`."""
    mismatches: tuple[tuple[str, Mismatch], ...]
    """Layer L4 by rollout id, in the batch's order."""


@dataclass(slots=True)
class Tally:
    """What a step adds up while it runs."""

    loss: float = 0.0
    norm: float = 0.0
    updates: int = 0
    refused: int = 0
    clipped: int = 0
    differentiated: int = 0
    drift: float | None = None
    """KL of the policy before the step from the one after it, nats per token; None where nobody looked."""
    nodes: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"old": 0.0, "gradient": 0.0, "optimiser": 0.0, "drift": 0.0}
    )

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of the block to a part of the step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - started


def report(
    batch: FlatBatch,
    *,
    advantages: NDArray[np.float64],
    tally: Tally,
    objective: Objective,
    limits: LogprobLimits,
    lr: float,
) -> StepReport:
    """Sum up a step.

    Metrics: ``loss``; ``gradient_norm`` (largest, before clipping; left out without an update); ``lr``;
    ``kl_behaviour`` (k3, nats, of pi_old from the mu that came with the rollouts) and its tokens'
    ``logprob_error_median`` and ``_p99``; ``clamped_fraction`` of claimed tokens; ``importance_mean``;
    ``clip_fraction``; ``kl_update`` (k2, nats, of the policy after the step from pi_old, on a few of its rollouts; left
    out without an update); ``figures_not_finite`` (how many are left out for that); ``surprisal`` (mean -pi_old, nats);
    ``tokens``; ``computed_tokens`` (all passes, shared beginnings once); ``groups``; ``groups_with_gradient``;
    ``updates``; ``updates_refused``; ``seconds_old``, ``_gradient``, ``_optimiser``, ``_drift`` and ``_total``.
    """
    old, mu = batch.old.cpu().numpy(), batch.tokens.mu.cpu().numpy()
    spans = [slice(a, b) for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]
    mismatches = tuple(
        (sample.id, mismatch(mu[span], own=old[span], limits=limits))
        for sample, span in zip(batch.samples, spans, strict=True)
    )
    difference = np.clip((old - mu).astype(np.float64), -LARGEST_EXPONENT, LARGEST_EXPONENT)
    claimed = ~batch.tokens.exact.cpu().numpy()
    weights = importance(batch.tokens, pi_old=batch.old, objective=objective)
    names = [sample.group for sample in batch.samples]
    metrics = {
        "loss": tally.loss,
        "lr": lr,
        "kl_behaviour": float(k3(difference).mean()),
        "logprob_error_median": float(np.median(np.abs(difference))),
        "logprob_error_p99": float(np.quantile(np.abs(difference), 0.99)),
        "clamped_fraction": _share(np.abs(difference[claimed]) > objective.delta),
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
    if tally.drift is not None:
        metrics["kl_update"] = tally.drift
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return StepReport(
        updated=tally.updates > 0,
        metrics={**finite, "figures_not_finite": float(len(metrics) - len(finite))},
        mismatches=mismatches,
    )


def _share(mask: NDArray[np.bool_]) -> float:
    return float(mask.mean()) if mask.size else 0.0
