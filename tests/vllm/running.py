"""Running a backend to the end, and judging what it drew by teacher-forced recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedModel

from rollmesh_node.engine.backend import Backend, GroupRequest, Partial, Rollout, SampleRequest
from rollmesh_peer.models.margins import Claim, recompute


def finish(backend: Backend, requests: Sequence[GroupRequest] = ()) -> list[Rollout]:
    """Add ``requests`` and return every rollout, ordered by group and index."""
    backend.add(requests)
    rollouts: list[Rollout] = []
    while backend.in_flight:
        rollouts += backend.step()
    return sorted(rollouts, key=lambda rollout: (rollout.key, rollout.index))


def tokens_of(rollouts: Iterable[Partial]) -> list[list[int]]:
    return [rollout.tokens.tolist() for rollout in rollouts]


def going_on(
    requests: Sequence[GroupRequest], partials: Sequence[Partial], *, kept: int | None = None
) -> list[GroupRequest]:
    """The same groups, with their unfinished samples' tokens (the first ``kept``) as begun."""
    begun: dict[int, list[SampleRequest]] = {}
    samples = {(request.key, sample.index): sample for request in requests for sample in request.samples}
    for partial in sorted(partials, key=lambda partial: (partial.key, partial.index)):
        sample = samples[partial.key, partial.index]
        tokens = np.concatenate([sample.begun, partial.tokens])[:kept]
        begun.setdefault(partial.key, []).append(replace(sample, begun=tokens))
    return [replace(request, samples=tuple(begun[request.key])) for request in requests if request.key in begun]


def measure(
    model: PreTrainedModel, requests: Sequence[GroupRequest], rollouts: Sequence[Partial]
) -> tuple[np.ndarray, np.ndarray]:
    """Return (margins, absolute differences of log-probs) of all drawn tokens under ``model``."""
    groups = {request.key: request for request in requests}
    claims, reported, own = [], [], []
    for rollout in rollouts:
        request = groups[rollout.key]
        sample = next(one for one in request.samples if one.index == rollout.index)
        completion = np.concatenate([sample.begun, rollout.tokens])
        claims.append(Claim(prompt=request.prompt, completion=completion, seed=sample.seed))
        reported.append(rollout.logprobs)
        own.append(len(sample.begun))
    found = recompute(model, claims)
    margins = np.concatenate([one.margins[begun:] for one, begun in zip(found, own, strict=True)])
    gaps = np.concatenate(
        [np.abs(one.logprobs[begun:] - mine) for one, begun, mine in zip(found, own, reported, strict=True)]
    )
    return margins, gaps


def assert_honest(model: PreTrainedModel, requests: Sequence[GroupRequest], rollouts: Sequence[Partial]) -> None:
    """Every token is the draw of these weights up to the rounding of kernels (trust.md), and its log-prob too."""
    margins, gaps = measure(model, requests, rollouts)
    print(
        f"\n{len(margins)} tokens: margin 0 for {(margins == 0).mean():.3f}, largest {margins.max():.3f}; "
        f"log-prob difference median {np.median(gaps):.4f}, 99.9 % {np.quantile(gaps, 0.999):.3f}"
    )
    assert (margins > 0).sum() < 3 + 0.1 * len(margins)
    assert (margins > 0.5).sum() < 1 + 0.002 * len(margins)
    assert margins.max() < 1.0
    assert len(gaps) < 50 or np.median(gaps) < 0.1, "logits of about 20 in bfloat16 are a sixteenth apart"
    assert np.quantile(gaps, 0.99) < 0.4
