"""The real engine with one thing broken: ``python -m tests.support.broken_engine --how temperature``."""

from __future__ import annotations

import sys

from rollmesh_peer.children.child import take_pipes

if __name__ == "__main__":
    take_pipes()

from dataclasses import replace

import torch

from rollmesh_node.engine import decoding, host, transformers_backend
from rollmesh_peer.models.image import weights_of
from rollmesh_peer.models.sampling import draw
from rollmesh_protocol.errors import HostError


def shift_logprobs(logits, *, seeds, positions):
    drawn = draw(logits, seeds=seeds, positions=positions)
    return replace(drawn, logprobs=drawn.logprobs - 0.4)


def lose_logprobs(logits, *, seeds, positions):
    drawn = draw(logits, seeds=seeds, positions=positions)
    return replace(drawn, logprobs=drawn.logprobs * float("nan"))


def keep_fifty(logits, *, seeds, positions):
    values = logits.float()
    values = values.masked_fill(values < values.topk(50, dim=-1).values[:, -1:], -torch.inf)
    return draw(values, seeds=seeds, positions=positions)


def fail(logits, *, seeds, positions):
    raise HostError("the model's logits are not finite; the weights or the engine are broken")


DRAWS = {
    "temperature": lambda logits, seeds, positions: draw(logits.float() / 0.7, seeds=seeds, positions=positions),
    "greedy": lambda logits, seeds, positions: draw(logits.float() * 1000, seeds=seeds, positions=positions),
    "truncation": keep_fifty,
    "seed": lambda logits, seeds, positions: draw(logits, seeds=[s + 1 for s in seeds], positions=positions),
    "shift": shift_logprobs,
    "not_finite": lose_logprobs,
    "engine": fail,
}


LEVELS = {"weights": 7, "coarse": 127}
"""Above zero: weights in 4 bits, and in 8."""


def load_coarsely(*arguments, load_model=transformers_backend.load_model, **options):
    """Weights in few bits, one scale a row."""
    model = load_model(*arguments, **options)
    with torch.no_grad():
        for tensor in weights_of(model).values():
            if tensor.ndim == 2:
                scale = tensor.abs().amax(-1, keepdim=True) / LEVELS[how]
                tensor.copy_((tensor / scale).round() * scale)
    return model


if __name__ == "__main__":
    how = sys.argv[sys.argv.index("--how") + 1]
    if how in LEVELS:
        transformers_backend.load_model = load_coarsely
    else:
        decoding.draw = DRAWS[how]
    host.main([])
