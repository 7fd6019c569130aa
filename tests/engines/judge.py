"""Whether rollouts are what the weights draw: by teacher-forced margins, or by the scripted engine's own function.

A model's judge holds the weights twice, in float32 and in bf16. The difference between the two is the calibrated noise:
what rounding alone does to these log-probs, on these tokens. An engine that computes in bf16 may be a few times as far
from float32 in its own way, and no farther.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rollmesh_node.engine.backend import GroupRequest, Partial, Rollout, SampleRequest, Weights
from rollmesh_node.engine.scripted_backend import Script, ScriptedBackend
from rollmesh_peer.models.loader import load_model
from rollmesh_peer.models.margins import Claim, Recomputed, recompute

SCRIPT = Script(heeds_weights=True)
EXACT = 1e-3
"""Nats of rounding between two float32 computations."""


class Judge(Protocol):
    """Compares what an engine drew with what it had to draw."""

    def agree(self, requests: Sequence[GroupRequest], drawn: Sequence[Partial]) -> None:
        """Assert it of every token; rollouts and partials alike, ``begun`` before them."""

    def differ(self, requests: Sequence[GroupRequest], drawn: Sequence[Partial]) -> bool:
        """Whether this was plainly drawn from other weights."""


class ModelJudge:
    """Of engines that compute the model in ``dtype``."""

    def __init__(self, weights: Weights, *, dtype: str, routed: bool) -> None:
        self._models = [
            load_model(weights.config, layout=weights.layout, image=weights.image, arithmetic=arithmetic)
            for arithmetic in ("float32", "bfloat16")
        ]
        self._dtype = dtype
        self._routed = routed

    def agree(self, requests: Sequence[GroupRequest], drawn: Sequence[Partial]) -> None:
        places, claims = _claims(requests, drawn)
        if not claims:
            return
        exact = recompute(self._models[0], claims)
        margins, errors = _own(places, exact)
        if self._dtype == "float32":
            assert margins.max() < EXACT
            assert errors.max() < EXACT
            return
        rounded = recompute(self._models[1], claims)
        noise = np.concatenate([np.abs(a.logprobs - b.logprobs) for a, b in zip(exact, rounded, strict=True)])
        assert np.median(errors) <= 2 * np.median(noise) + 0.01
        assert (margins == 0).mean() > 0.9 - 5 / len(margins)
        # Where two experts nearly tie, rounding decides which one is asked: few tokens, but by more than noise.
        worst = 0.98 if self._routed else 1.0
        assert np.quantile(errors, worst) <= 4 * noise.max() + 0.05
        assert np.quantile(margins, worst) <= 4 * noise.max() + 0.1

    def differ(self, requests: Sequence[GroupRequest], drawn: Sequence[Partial]) -> bool:
        places, claims = _claims(requests, drawn)
        margins, _ = _own(places, recompute(self._models[0], claims))
        return bool((margins > 1).mean() > 0.1)


class ScriptedJudge:
    """Of the scripted engine: every sample again, alone, in an engine of its own."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def agree(self, requests: Sequence[GroupRequest], drawn: Sequence[Partial]) -> None:
        assert not self._unequal(requests, drawn)

    def differ(self, requests: Sequence[GroupRequest], drawn: Sequence[Partial]) -> bool:
        return self._unequal(requests, drawn) > len(drawn) / 2

    def _unequal(self, requests: Sequence[GroupRequest], drawn: Sequence[Partial]) -> int:
        engine = ScriptedBackend(SCRIPT)
        engine.load(self._weights)
        unequal = 0
        for one in drawn:
            request, sample = _asked(requests, one)
            alone = SampleRequest(index=0, seed=sample.seed)
            engine.add([
                GroupRequest(
                    key=0, prompt=request.prompt, samples=(alone,), max_new_tokens=request.max_new_tokens,
                    stop=request.stop,
                )
            ])  # fmt: skip
            (whole,) = engine.step()
            rest = slice(len(sample.begun), len(sample.begun) + len(one.tokens))
            same = np.array_equal(whole.tokens[rest], one.tokens) and np.array_equal(whole.logprobs[rest], one.logprobs)
            unequal += not same
        return unequal


def _claims(
    requests: Sequence[GroupRequest], drawn: Sequence[Partial]
) -> tuple[list[tuple[Partial, int]], list[Claim]]:
    """Every drawn sample that has tokens, with the length of what had begun before; and the claim of the whole."""
    places, claims = [], []
    for one in drawn:
        request, sample = _asked(requests, one)
        if len(one.tokens):
            places.append((one, len(sample.begun)))
            whole = np.concatenate([sample.begun, one.tokens])
            claims.append(Claim(prompt=request.prompt, completion=whole, seed=sample.seed))
    return places, claims


def _own(places: Sequence[tuple[Partial, int]], found: Sequence[Recomputed]) -> tuple[np.ndarray, np.ndarray]:
    """Margins, and errors of the reported log-probs, of the tokens that the engine drew itself."""
    margins = np.concatenate([one.margins[begun:] for one, (_, begun) in zip(found, places, strict=True)])
    errors = [np.abs(one.logprobs[begun:] - drawn.logprobs) for one, (drawn, begun) in zip(found, places, strict=True)]
    return margins, np.concatenate(errors)


def _asked(requests: Sequence[GroupRequest], one: Partial) -> tuple[GroupRequest, SampleRequest]:
    (request,) = (request for request in requests if request.key == one.key)
    (sample,) = (sample for sample in request.samples if sample.index == one.index)
    return request, sample


def is_prefix(drawn: Partial, whole: Rollout) -> bool:
    return np.array_equal(whole.tokens[: len(drawn.tokens)], drawn.tokens)
