"""One engine for all attackers of a lab: the node's own decoder, in which each order may bend one thing.

Orders that wait are decoded together, as long as they want the same weights, so that a dozen attackers cost little more
than one. Without a change an order gives bit for bit what an honest node gives. Log-probabilities are those of the
weights that generated, at temperature 1, whatever the tokens were chosen by: an attacker has no reason to tell more.

Not here: the wire, and which change belongs to which attack (:mod:`.sampling`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
import trio
from torch import Tensor

from rollmesh_node.engine.backend import GroupRequest, SampleRequest, Stats
from rollmesh_node.engine.decoding import Decoder
from rollmesh_peer.models.image import copy_image_into, weights_of
from rollmesh_peer.models.margins import Claim, Recomputed, recompute
from rollmesh_peer.models.sampling import draw, noise
from rollmesh_protocol.lease import Lease
from tests.support.attacker import Studio

MOST_ROWS: Final = 64
GATHER_S: Final = 0.2
"""Orders that come within this are decoded together."""

Warp = Callable[[Tensor], Tensor]
"""Logits [V] of one position as the sampler shall see them."""
Reseed = Callable[[int, int], int]
"""(seed, position) -> the seed that is used there."""
Pick = Callable[[Tensor, Tensor], int]
"""(logits [V], sums of logits and noise [V]) -> the token."""
Change = Callable[[Mapping[str, Tensor]], None]
"""Alters weights in place, by name."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Which weights generate: a version that was at the head, and what was done to it."""

    root: bytes
    change: Change | None = None


@dataclass(frozen=True, kw_only=True)
class Order:
    """Samples of one prompt to draw, honestly unless a field says otherwise."""

    weights: Weights
    prompt: np.ndarray
    samples: tuple[SampleRequest, ...]
    max_new_tokens: int
    stop: frozenset[int]
    warp: Warp | None = None
    reseed: Reseed | None = None
    pick: Pick | None = None


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One completion as it will be reported."""

    index: int
    seed: int
    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass
class _Job:
    order: Order
    done: trio.Event = field(default_factory=trio.Event)
    drawn: list[Drawn] = field(default_factory=list)


def order_of(lease: Lease, *, stop: frozenset[int]) -> Order:
    """The honest order of a lease."""
    return Order(
        weights=Weights(root=lease.root),
        prompt=lease.prompt_ids,
        samples=tuple(SampleRequest(index=sample.index, seed=sample.seed) for sample in lease.samples),
        max_new_tokens=lease.max_new_tokens,
        stop=stop,
    )


class Forge:
    """Draws orders in one thread. :meth:`run` it in a nursery."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.tokens = 0
        self.busy_s = 0.0
        self._waiting: list[_Job] = []
        self._wake = trio.Event()
        self._held: Weights | None = None
        self._one_at_a_time = trio.CapacityLimiter(1)

    async def draw(self, order: Order) -> list[Drawn]:
        """The completions of ``order``, by index."""
        job = _Job(order)
        self._waiting.append(job)
        self._wake.set()
        await job.done.wait()
        return sorted(job.drawn, key=lambda drawn: drawn.index)

    async def recompute(self, weights: Weights, order: Order, drawn: list[Drawn]) -> list[Recomputed]:
        """What ``weights`` say of completions, as the auditor would."""
        claims = [Claim(prompt=order.prompt, completion=one.tokens, seed=one.seed) for one in drawn]
        return await trio.to_thread.run_sync(
            lambda: recompute(self._model(weights), claims), limiter=self._one_at_a_time
        )

    async def run(self) -> None:
        """Decode what waits, until cancelled."""
        while True:
            await self._wake.wait()
            await trio.sleep(GATHER_S)
            batch = self._next_batch()
            if not self._waiting:
                self._wake = trio.Event()
            started = time.perf_counter()
            await trio.to_thread.run_sync(self._decode, batch, limiter=self._one_at_a_time)
            self.busy_s += time.perf_counter() - started
            for job in batch:
                self.tokens += sum(len(one.tokens) for one in job.drawn)
                job.done.set()

    def _next_batch(self) -> list[_Job]:
        """The oldest job, and those that want the same weights, as far as the rows go."""
        weights = self._waiting[0].order.weights
        batch: list[_Job] = []
        rows = 0
        for job in [job for job in self._waiting if job.order.weights == weights]:
            rows += len(job.order.samples)
            if batch and rows > MOST_ROWS:
                break
            batch.append(job)
            self._waiting.remove(job)
        return batch

    def _decode(self, batch: list[_Job]) -> None:
        model = self._model(batch[0].order.weights)
        requests = [
            GroupRequest(
                key=key, prompt=job.order.prompt, samples=job.order.samples, max_new_tokens=job.order.max_new_tokens,
                stop=job.order.stop,
            )
            for key, job in enumerate(batch)
        ]  # fmt: skip
        decoder = BentDecoder(model, requests, orders=[job.order for job in batch])
        for rollout in decoder.run():
            job = batch[rollout.key]
            seed = next(sample.seed for sample in job.order.samples if sample.index == rollout.index)
            job.drawn.append(
                Drawn(index=rollout.index, seed=seed, tokens=rollout.tokens.copy(), logprobs=rollout.logprobs)
            )

    def _model(self, weights: Weights):
        """The one model in memory, holding ``weights``."""
        backend = self.studio._warm_up()
        if weights != self._held:
            self._held = None
            image = self.studio.images[weights.root]
            copy_image_into(backend._model, layout=self.studio.card.layout, image=image)
            if weights.change is not None:
                with torch.no_grad():
                    weights.change(weights_of(backend._model))
            for linear in backend._packed:
                linear.pack()
            self._held = weights
        return backend._model


class BentDecoder(Decoder):
    """The node's decoder, but for how the token of a row is chosen."""

    def __init__(self, model, groups, *, orders: list[Order]) -> None:
        super().__init__(model, groups, stats=Stats())
        self._orders = orders

    def _draw(self, logits: Tensor) -> None:
        rows = self._live()
        orders = [self._orders[row.group.key] for row in rows]
        positions = [len(row.tokens) for row in rows]
        seeds = [
            order.reseed(row.sample.seed, position) if order.reseed else row.sample.seed
            for row, order, position in zip(rows, orders, positions, strict=True)
        ]
        seen = logits.float()
        for at, order in enumerate(orders):
            if order.warp:
                seen[at] = order.warp(logits[at].float())
        tokens = draw(seen, seeds=seeds, positions=positions).tokens.tolist()
        every = torch.arange(logits.shape[-1])[None]
        for at, order in enumerate(orders):
            if order.pick:
                sums = seen[at].double() + noise(seeds=[seeds[at]], positions=[positions[at]], token_ids=every)[0]
                tokens[at] = order.pick(seen[at], sums)
        normalizer = logits.float().logsumexp(-1)
        for row, at, token in zip(rows, range(len(rows)), tokens, strict=True):
            row.tokens.append(token)
            row.logprobs.append(float(logits[at, token].float() - normalizer[at]))


# --- what can be done to weights -------------------------------------------------------------------------------------
def _linear(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The matrices of linear layers, which quantisers take; embeddings and norms stay as they are."""
    return [tensor for name, tensor in weights.items() if tensor.ndim == 2 and "embed" not in name]


def int8_rows(weights: Mapping[str, Tensor]) -> None:
    """Symmetric int8 with one scale a row: the careful quantiser."""
    for tensor in _linear(weights):
        _round(tensor, levels=127, width=tensor.shape[1])


def int4_groups(weights: Mapping[str, Tensor]) -> None:
    """Symmetric int4 with one scale for 32 weights."""
    for tensor in _linear(weights):
        _round(tensor, levels=7, width=32)


def without_layers(*layers: int) -> Change:
    """A smaller model: these layers add nothing to what passes through them."""

    def change(weights: Mapping[str, Tensor]) -> None:
        for layer in layers:
            for part in ("self_attn.o_proj", "mlp.down_proj"):
                weights[f"model.layers.{layer}.{part}.weight"].zero_()

    return change


def _round(tensor: Tensor, *, levels: int, width: int) -> None:
    groups = tensor.float().reshape(-1, width)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / levels
    tensor.copy_(((groups / scale).round() * scale).reshape(tensor.shape))


def reseeded(order: Order, shift: int) -> Order:
    """The same order with other seeds, which still name the same samples."""
    return replace(order, reseed=lambda seed, _position: (seed + shift) % (1 << 64))
