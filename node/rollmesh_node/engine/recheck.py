"""What a node's own selfcheck recomputes, as the learner's auditor does: ``python -m rollmesh_node.engine.recheck``.

    open     {config_json: str, layout: bytes (Layout.encode), threads: int?, device: 'auto'|'cpu'|'cuda'?} -> {device}
    load     {image: str} -> {}
    recheck  {rollouts: [{prompt, tokens, seed, first: int?}], temperature: float?, top_k: int?, top_p: float?}
             -> {rollouts: [{margins: bytes, logprobs: bytes}]} in this order

``prompt`` and ``tokens`` are little-endian uint32, the rest little-endian float32; ``first`` is the place of the first
of ``tokens`` in its completion (0), where ``prompt`` ends with the tokens before it. The three options ask what the
margins would be if the sampler had altered the logits so before it drew: that names what an engine does wrong.

Invariant: the arithmetic is the auditor's (bf16 weights whose bits the reload check has compared with the image), so
what is honest there is honest here. Not here: any verdict, and which weights these are (the caller knows their root).
"""

from __future__ import annotations

import os

from rollmesh_peer.children.child import run_child, take_pipes

if __name__ == "__main__":
    take_pipes()
    # Read when torch loads its OpenMP: threads that wait must not spin (on busy cores that was 20 times slower).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh_node.engine import memory
from rollmesh_node.engine.pipe import Body
from rollmesh_peer.models.image import check_reload, copy_image_into
from rollmesh_peer.models.loader import best_device, build_model
from rollmesh_peer.models.logprobs import output_head
from rollmesh_peer.models.margins import Claim, recompute
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Altered:
    """What a sampler may do to logits before it draws; the defaults do nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def is_nothing(self) -> bool:
        """True for the sampler of the protocol."""
        return self == Altered()

    def of(self, logits: Tensor) -> Tensor:
        """The logits [n, V] that such a sampler draws from: float32, -inf where it never would."""
        values = logits.float() / self.temperature
        if self.top_k:
            least = values.topk(min(self.top_k, values.shape[-1]), dim=-1).values[:, -1:]
            values = values.masked_fill(values < least, -math.inf)
        if self.top_p < 1:
            ordered = values.softmax(-1).sort(dim=-1, descending=True)
            beyond = ordered.values.cumsum(-1) - ordered.values >= self.top_p
            values = values.masked_fill(torch.zeros_like(beyond).scatter(-1, ordered.indices, beyond), -math.inf)
        return values


class Rechecker:
    """The state between calls: the model, once it is opened."""

    def __init__(self) -> None:
        self._model: PreTrainedModel | None = None
        self._layout: Layout | None = None
        self._is_loaded = False

    def open(self, body: Body) -> Body:
        """Build the model; ``HostError`` with the numbers where it does not fit."""
        config, layout, threads = body.get("config_json"), body.get("layout"), body.get("threads") or 0
        if not isinstance(config, str) or not isinstance(layout, bytes) or not isinstance(threads, int):
            raise _wrong("config_json, layout or threads")
        if threads:
            torch.set_num_threads(threads)
        wanted = str(body.get("device") or "auto")
        device = best_device() if wanted == "auto" else wanted
        self._layout = Layout.decode(layout, limit=limits.CARD_BYTES)
        memory.require(self._layout.image_bytes, device=device)
        self._model = build_model(json.loads(config), device=device)
        return {"device": device}

    def load(self, body: Body) -> Body:
        """Take the weights of an image."""
        model, image = self._opened(), Path(str(body.get("image")))
        assert self._layout is not None
        self._is_loaded = False
        copy_image_into(model, layout=self._layout, image=image)
        check_reload(model, layout=self._layout, image=image)
        self._is_loaded = True
        return {}

    def recheck(self, body: Body) -> Body:
        """Recompute some rollouts."""
        model, rollouts = self._opened(), body.get("rollouts")
        if not self._is_loaded:
            raise ChildFailed("there are no weights to recompute with", code="child.weights")
        if not isinstance(rollouts, list) or not rollouts:
            raise _wrong("rollouts")
        claims = [_claim(rollout, model) for rollout in rollouts]
        with _altering(model, _altered(body)):
            found = recompute(model, claims)
        return {
            "rollouts": [
                {"margins": one.margins.astype("<f4").tobytes(), "logprobs": one.logprobs.astype("<f4").tobytes()}
                for one in found
            ]
        }

    def _opened(self) -> PreTrainedModel:
        if self._model is None:
            raise ChildFailed("the check was not opened", code="child.request")
        return self._model


@contextlib.contextmanager
def _altering(model: PreTrainedModel, altered: Altered) -> Iterator[None]:
    """Inside the block the model's head gives the altered logits."""
    if altered.is_nothing:
        yield
        return
    hook = output_head(model).register_forward_hook(lambda _head, _inputs, logits: altered.of(logits))
    try:
        yield
    finally:
        hook.remove()


def _altered(body: Body) -> Altered:
    temperature, top_k, top_p = (body.get(name) or 0 for name in ("temperature", "top_k", "top_p"))
    if not isinstance(temperature, int | float) or not isinstance(top_k, int) or not isinstance(top_p, int | float):
        raise _wrong("temperature, top_k or top_p")
    return Altered(temperature=temperature or 1.0, top_k=top_k, top_p=top_p or 1.0)


def _claim(value: object, model: PreTrainedModel) -> Claim:
    if not isinstance(value, dict):
        raise _wrong("a rollout")
    prompt, tokens, seed = value.get("prompt"), value.get("tokens"), value.get("seed")
    if not isinstance(prompt, bytes) or not isinstance(tokens, bytes) or len(prompt) % 4 or len(tokens) % 4:
        raise _wrong("prompt or tokens")
    first = value.get("first") or 0
    if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise _wrong("seed")
    if not isinstance(first, int) or not 0 <= first < limits.MAX_NEW_TOKENS:
        raise _wrong("first")
    claim = Claim(prompt=np.frombuffer(prompt, "<u4"), completion=np.frombuffer(tokens, "<u4"), seed=seed, first=first)
    if not prompt or not tokens or len(prompt) + len(tokens) > 4 * model.config.max_position_embeddings:
        raise _wrong("a rollout that is empty, or longer than the model allows")
    if max(int(claim.prompt.max()), int(claim.completion.max())) >= model.config.vocab_size:
        raise _wrong("a token beyond the vocabulary")
    return claim


def _wrong(what: str) -> ChildFailed:
    return ChildFailed(f"the check's pipe carried a wrong value: {what}", code="child.request")


if __name__ == "__main__":
    rechecker = Rechecker()
    run_child({"open": rechecker.open, "load": rechecker.load, "recheck": rechecker.recheck})
