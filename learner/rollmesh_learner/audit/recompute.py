"""What an auditor tells about each rollout: figures and exact log-probabilities, without a verdict.

Invariant: the figures are those of the weights that were loaded last, whose bits the reload check has compared with
the image; a rollout that cannot be recomputed (a token beyond the vocabulary, too long for the model) is an error, for
cheap checks have let it through, never a pass.

Not here: verdicts and thresholds (:mod:`rollmesh_protocol.verdicts.margins`), the loop that decides what is audited
(:mod:`.auditor`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from rollmesh_peer.models.folder import Json
from rollmesh_peer.models.image import check_reload, copy_image_into
from rollmesh_peer.models.loader import best_device, build_model
from rollmesh_peer.models.margins import Claim, recompute
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Case:
    """One rollout as its node reported it."""

    claim: Claim
    logprobs: NDArray[np.float32]
    """As claimed, one per completion token."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What recomputing one rollout found."""

    tokens: int
    exact: int
    """Tokens that our own kernels draw as well (margin 0)."""
    margins: NDArray[np.float32]
    """Of every token, in nats."""
    exact_logprobs: NDArray[np.float32]
    """The log-probabilities of the claimed tokens under the weights: the exact mu."""
    logprob_gap_median: float
    """Of the absolute differences between claimed and exact log-probabilities."""
    logprob_gap_largest: float


class Recomputer:
    """Holds one model and fills it with the weights that are asked for."""

    def __init__(self, config: Json, *, layout: Layout, device: str = "auto") -> None:
        """Raises ``Refused("card.model")`` for a config that is not loaded."""
        self._layout = layout
        self._model: PreTrainedModel = build_model(config, device=best_device() if device == "auto" else device)
        self._held: tuple[str, int, int, int] | None = None
        self.spent_s = 0.0
        """Seconds of recomputation so far, loading left out."""

    def load(self, image: Path) -> None:
        """Take the weights of an image, unless they are held already. ``ChildFailed`` when they do not fit."""
        stat = image.stat()
        identity = (str(image), stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if identity == self._held:
            return
        self._held = None
        copy_image_into(self._model, layout=self._layout, image=image)
        check_reload(self._model, layout=self._layout, image=image)
        self._held = identity

    def audit(self, cases: Sequence[Case]) -> list[Outcome]:
        """Return the outcome of every case, in order. ``ChildFailed("audit.rollout")`` names one that cannot be."""
        assert self._held is not None  # load comes first
        for case in cases:
            self._check(case)
        started = time.perf_counter()
        found = recompute(self._model, [case.claim for case in cases])
        self.spent_s += time.perf_counter() - started
        return [
            self._outcome(case, margins=one.margins, exact=one.logprobs) for case, one in zip(cases, found, strict=True)
        ]

    def _outcome(self, case: Case, *, margins: NDArray[np.float32], exact: NDArray[np.float32]) -> Outcome:
        gaps = np.abs(case.logprobs - exact)
        return Outcome(
            tokens=len(margins),
            exact=int((margins == 0).sum()),
            margins=margins,
            exact_logprobs=exact,
            logprob_gap_median=float(np.median(gaps)),
            logprob_gap_largest=float(gaps.max()),
        )

    def _check(self, case: Case) -> None:
        prompt, completion = case.claim.prompt, case.claim.completion
        config = self._model.config
        if not len(prompt) or not len(completion) or len(case.logprobs) != len(completion):
            raise ChildFailed("a rollout to audit is empty or lacks log-probabilities", code="audit.rollout")
        if len(prompt) + len(completion) > config.max_position_embeddings:
            raise ChildFailed("a rollout to audit is longer than the model allows", code="audit.rollout")
        if max(int(prompt.max()), int(completion.max())) >= config.vocab_size:
            raise ChildFailed("a rollout to audit has a token beyond the vocabulary", code="audit.rollout")


def set_threads(threads: int) -> None:
    """Compute with so many threads; 0 leaves the choice to torch."""
    if threads:
        torch.set_num_threads(threads)
