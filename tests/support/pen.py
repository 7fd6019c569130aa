"""Completions drawn token by token with the plainest means: what an engine does, without any of its code.

A pen goes on from tokens that are already drawn, under whatever weights it was given last: so a test makes rollouts of
several segments, honest ones and others.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rollmesh_peer.models.image import copy_image_into
from rollmesh_peer.models.loader import build_model
from rollmesh_peer.models.sampling import draw
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.rollout import Result, SampleResult, Segment


@dataclass
class Draft:
    """One completion on the way."""

    seed: int
    tokens: list[int]
    logprobs: list[float]
    is_done: bool = False


@dataclass(frozen=True)
class Part:
    """From which token on which weights draw, and which are named; the same unless the node lies."""

    first: int
    image: Path
    named: bytes


class Pen:
    """One model on the CPU."""

    def __init__(self, config: dict, layout: Layout) -> None:
        self._layout = layout
        self._model = build_model(config, device="cpu")
        names = inspect.signature(self._model.base_model.forward).parameters
        self._cache = "cache" if "cache" in names else "past_key_values"

    def answer(self, lease: Lease, parts: Sequence[Part], *, stop: frozenset[int]) -> Result:
        """The whole work of a lease, every completion in these parts as far as it is long enough."""
        drafts = [Draft(sample.seed, [], []) for sample in lease.samples]
        ends = [*(part.first for part in parts[1:]), lease.max_new_tokens]
        for part, end in zip(parts, ends, strict=True):
            copy_image_into(self._model, layout=self._layout, image=part.image)
            self._write(lease.prompt_ids, [draft for draft in drafts if not draft.is_done], end=end, stop=stop)
        samples = tuple(
            sample_of_draft(sample.index, draft, parts) for sample, draft in zip(lease.samples, drafts, strict=True)
        )
        return Result(lease_id=lease.lease_id, samples=samples, engine="pen", generate_s=0.1)

    @torch.no_grad()
    def _write(self, prompt: np.ndarray, drafts: list[Draft], *, end: int, stop: frozenset[int]) -> None:
        """Draw on, all side by side, up to ``end`` tokens each. They are of one length when this is called."""
        if not drafts:
            return
        rows = np.array([[*prompt, *draft.tokens] for draft in drafts], dtype=np.int64)
        output = self._model(torch.from_numpy(rows), use_cache=True)
        for position in range(len(drafts[0].tokens), end):
            seeds = [draft.seed for draft in drafts]
            drawn = draw(output.logits[:, -1], seeds=seeds, positions=[position] * len(drafts))
            for draft, token, logprob in zip(drafts, drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True):
                if not draft.is_done:
                    draft.tokens.append(token)
                    draft.logprobs.append(logprob)
                    draft.is_done = token in stop
            if all(draft.is_done for draft in drafts):
                return
            cache = {self._cache: output.past_key_values}
            output = self._model(drawn.tokens[:, None], use_cache=True, **cache)


def sample_of_draft(index: int, draft: Draft, parts: Sequence[Part]) -> SampleResult:
    """What is reported of one completion."""
    return SampleResult(
        index=index,
        tokens=np.asarray(draft.tokens, "<u4").tobytes(),
        logprobs=np.asarray(draft.logprobs, "<f4").tobytes(),
        finish="stop" if draft.is_done else "length",
        segments=tuple(
            Segment(first_token=part.first, root=part.named) for part in parts if part.first < len(draft.tokens)
        ),
    )
