"""What a batch's sequences have in common, computed once: the tokens of a micro-batch as a forest of prefixes.

A node is one token after one particular beginning, so two samples that begin alike share nodes as far as they do:
the chat template, a group's prompt, and the first words of similar answers. Nodes stand in depth-first order, which
makes ancestry a comparison of two integers: node j is node i or above it exactly if ``j <= i < ends[j]``.

Invariant: a node sees itself and its ancestors, at the positions that they have in their own sequences. Under causal
attention the states at a sample's nodes are therefore those of the sample alone, and gradients of shared nodes add up;
only rounding differs. (SmolLM2, 64 samples of 12 tokens on 8 prompts of 45: 793 nodes instead of 3,616 tokens.)

Pure numpy: :mod:`.packing` computes with it. Source of the idea: tree attention for shared prefixes, here in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollmesh_learner.training.batch import Sample, TokenIds

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """N nodes in depth-first order, and where each of the K completion tokens is predicted."""

    tokens: Indices
    """[N] token ids."""
    positions: Indices
    """[N] position of the token in its sequence."""
    ends: Indices
    """[N] one past the last node below."""
    sources: Indices
    """[K] node whose state predicts each completion token, sample after sample in the given order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Neighbouring nodes with the same ancestors outside the block: one small attention, not rows of a large one."""

    first: int
    last: int
    """One past the last node."""
    above: Indices
    """[A] the ancestors that all of them see, ascending."""


def grow(samples: Sequence[Sample]) -> Forest:
    """Build the forest of some samples. What a sample reads is its prompt and all completion tokens but the last."""
    paths: list[Indices] = [np.empty(0, np.int64)] * len(samples)
    tokens: list[TokenIds] = []
    positions: list[Indices] = []
    ends: list[int] = []
    previous, path = np.empty(0, np.uint32), np.empty(0, np.int64)
    for index in lexicographic(samples):
        read = samples[index].read
        shared = common_prefix(previous, read)
        count = len(ends)
        for node in path[shared:]:
            ends[node] = count
        fresh = np.arange(count, count + len(read) - shared)
        ends.extend([0] * len(fresh))
        tokens.append(read[shared:])
        positions.append(np.arange(shared, len(read)))
        path = np.concatenate([path[:shared], fresh])
        paths[index], previous = path, read
    for node in path:
        ends[node] = len(ends)
    return Forest(
        tokens=np.concatenate(tokens).astype(np.int64),
        positions=np.concatenate(positions),
        ends=np.array(ends, dtype=np.int64),
        sources=np.concatenate([p[len(s.prompt) - 1 :] for p, s in zip(paths, samples, strict=True)]),
    )


def micro_batches(samples: Sequence[Sample], *, max_tokens: int) -> list[list[int]]:
    """Return lists of positions in ``samples``, each ascending, whose forests have at most ``max_tokens`` nodes.

    Similar samples come together. A sample longer than ``max_tokens`` gets a micro-batch of its own.
    """
    batches: list[list[int]] = []
    nodes, previous = 0, np.empty(0, np.uint32)
    for index in lexicographic(samples):
        read = samples[index].read
        extra = len(read) - common_prefix(previous, read)
        if not batches or nodes + extra > max_tokens:
            batches.append([])
            nodes, extra = 0, len(read)
        batches[-1].append(index)
        nodes, previous = nodes + extra, read
    return [sorted(batch) for batch in batches]


def blocks(forest: Forest, *, max_nodes: int) -> list[Block]:
    """Cut the forest into blocks in node order: subtrees of at most ``max_nodes`` nodes and the trunks above them."""
    ends = forest.ends
    found: list[Block] = []
    pending = [(0, len(ends), np.empty(0, np.int64))]  # ranges of siblings with their subtrees, and what is above them
    while pending:
        at, stop, above = pending.pop()
        first = at
        while at < stop:
            end = int(ends[at])
            if end - at > max_nodes or end - first > max_nodes:
                if at > first:
                    found.append(Block(first=first, last=at, above=above))
                first = at
            if end - at > max_nodes:
                forks = np.flatnonzero(ends[at:end] != end)
                trunk = at + (int(forks[0]) if forks.size else end - at)
                found.append(Block(first=at, last=trunk, above=above))
                if trunk < end:
                    pending.append((trunk, end, np.concatenate([above, np.arange(at, trunk)])))
                first = end
            at = end
        if stop > first:
            found.append(Block(first=first, last=stop, above=above))
    return sorted(found, key=lambda block: block.first)


def visible(forest: Forest, *, block: Block) -> NDArray[np.bool_]:
    """Return whether each node of the block sees each of its keys (``above``, then the block), bool [n, A + n]."""
    nodes = np.arange(block.first, block.last)
    inside = (nodes[None, :] <= nodes[:, None]) & (nodes[:, None] < forest.ends[None, block.first : block.last])
    return np.concatenate([np.ones((len(nodes), len(block.above)), dtype=np.bool_), inside], axis=1)


def lexicographic(samples: Sequence[Sample]) -> list[int]:
    """Return the positions of ``samples`` in the order of what they read; equal ones in their own order."""
    keys = [sample.read.astype(">u4").tobytes() for sample in samples]
    return sorted(range(len(samples)), key=lambda index: (keys[index], index))


def common_prefix(left: TokenIds, right: TokenIds) -> int:
    """Return how many first tokens two sequences share."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if different.size else length
