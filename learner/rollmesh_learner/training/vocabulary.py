"""From last hidden states to log-probabilities of the sampled tokens, and back, in pieces of bounded size.

Invariant: the float32 logits of no more than ``chunk`` tokens exist at one time, in either direction. The loss is a
sum over tokens, so each piece goes backward through the vocabulary as soon as its log-probabilities are known; nothing
is kept or computed twice, and the rest of the model goes backward once, from the collected gradient.

It knows no objective: the caller says what a piece's log-probabilities cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

LossOf = Callable[[Tensor, slice], Tensor]
"""Scalar loss of the log-probabilities (float32 [c], with gradient) of the tokens in a slice."""
LEAST_CHUNK: Final = 16
"""Tokens; a smaller piece would spend its time on reading the output matrix."""


def chunk_tokens(vocabulary: int, *, logits_bytes: int) -> int:
    """Return how many tokens' float32 logits fit into ``logits_bytes``."""
    return max(LEAST_CHUNK, logits_bytes // (4 * vocabulary))


@torch.no_grad()
def logprobs(head: nn.Module, *, states: Tensor, tokens: Tensor, chunk: int) -> Tensor:
    """Return log softmax(head(states))[token], float32 [K], of states [K, hidden] and int64 token ids [K]."""
    pieces = [
        _of_tokens(head(s), t) for s, t in zip(torch.split(states, chunk), torch.split(tokens, chunk), strict=True)
    ]
    return torch.cat(pieces)


def backward(head: nn.Module, *, states: Tensor, tokens: Tensor, loss_of: LossOf, chunk: int) -> tuple[Tensor, Tensor]:
    """Send the gradient of the loss into ``head`` and, through ``states`` [K, hidden], into the rest of the model.

    Returns the log-probabilities, float32 [K], and the loss, a scalar; both detached.
    """
    leaf = states.detach().requires_grad_()
    found, losses = [], []
    for start in range(0, len(tokens), chunk):
        part = slice(start, min(start + chunk, len(tokens)))
        values = _of_tokens(head(leaf[part]), tokens[part])
        loss = loss_of(values, part)
        torch.autograd.backward(loss)
        found.append(values.detach())
        losses.append(loss.detach())
    torch.autograd.backward(states, leaf.grad)
    return torch.cat(found), torch.stack(losses).sum()


def _of_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    values: Tensor = _TokenLogprobs.apply(logits, tokens)  # type: ignore[no-untyped-call]
    return values


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(logits)[token] in float32, with one float32 copy of the logits that the backward pass uses up."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, tokens: Tensor) -> Tensor:
        everything = logits.log_softmax(-1, dtype=torch.float32)
        ctx.everything, ctx.tokens, ctx.dtype = everything, tokens, logits.dtype  # type: ignore[attr-defined]
        return everything.gather(-1, tokens[:, None])[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        """D log p(t) / d logits = onehot(t) - p, times the incoming gradient."""
        slope = ctx.everything.exp_().mul_(-gradient[:, None])  # type: ignore[attr-defined]
        slope.scatter_add_(-1, ctx.tokens[:, None], gradient[:, None])  # type: ignore[attr-defined]
        return slope.to(ctx.dtype), None  # type: ignore[attr-defined]
