"""Shares of a batch (layer L7): below full standing no node makes more than its share of what a step trains on.

The share is max(cap, 1.5 / n) with n the effective number of nodes at work, ``(sum mu)^2 / sum mu^2`` over their
accepted speeds: identities that deliver nothing do not count, so they can neither tighten the cap of the others nor
stop a run by promising work. It is held where work is leased, so that none is wasted, and looked at again when a batch
is taken. Within a group that several nodes fill, the same share holds for the group. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from rollmesh_learner.work.groups import Group, Sample

SLACK: Final = 1.5
"""A node may deliver so many times an equal share: nodes differ in speed."""
_ROUNDING: Final = 1e-9
_NO_LIMIT: Final = 1_000_000


def effective_nodes(speeds: Sequence[float]) -> float:
    """How many nodes of one speed would deliver as evenly; 1 where nobody has delivered yet."""
    squares = sum(speed * speed for speed in speeds)
    return sum(speeds) ** 2 / squares if squares > 0 else 1.0


def share_of_batch(*, cap: float, nodes: float) -> float:
    """The largest share of a batch for one node below full standing, with ``nodes`` effective nodes at work."""
    return min(1.0, max(cap, SLACK / max(1.0, nodes)))


def most_samples(share: float, size: int) -> int:
    """So many of ``size`` samples are a share: rounded down, but never below an equal part rounded up.

    Else five nodes with a share of 1.8 samples each, and so one each, could not fill a batch of six.
    """
    return max(1, math.floor(share * size + _ROUNDING), math.ceil(share * size / SLACK - _ROUNDING))


def holder_of(sample: Sample, lease_nodes: Callable[[bytes], str]) -> str:
    """The node that holds or has filled a sample; empty for an open one."""
    if sample.rollout is not None:
        return sample.rollout.node
    return lease_nodes(sample.lease_id) if sample.lease_id is not None else ""


class Room:
    """What one node may still take of the batches to come: ``groups`` in lease order, ``groups_per_step`` a batch."""

    def __init__(
        self,
        node: str,
        groups: Sequence[Group],
        *,
        groups_per_step: int,
        samples_per_group: int,
        share: float,
        lease_nodes: Callable[[bytes], str],
    ) -> None:
        self._node = node
        self._per_step = groups_per_step
        self._group_most = most_samples(share, samples_per_group)
        self._batch_most = most_samples(share, samples_per_group * groups_per_step)
        self._is_free = share >= 1.0
        self._lease_nodes = lease_nodes
        self._held: Counter[int] = Counter()
        """By batch from now, samples that the node holds or has filled."""
        for position, group in enumerate(groups):
            self._held[position // groups_per_step] += self._own(group)

    def of_group(self, position: int, group: Group) -> int:
        """How many open samples of the group at ``position`` the node may have."""
        size = len(group.samples)
        if self._is_free:
            return size
        others = any(self._holder(sample) not in ("", self._node) for sample in group.samples)
        in_group = self._group_most - self._own(group) if others else size
        return max(0, min(in_group, self.of_batch(position)))

    def of_batch(self, position: int) -> int:
        """How many samples the node may have of the batch that the group at ``position`` will be in."""
        if self._is_free:
            return _NO_LIMIT
        return max(0, self._batch_most - self._held[position // self._per_step])

    def took(self, position: int, samples: int) -> None:
        """The node is given ``samples`` of the group at ``position``."""
        self._held[position // self._per_step] += samples

    def _holder(self, sample: Sample) -> str:
        return holder_of(sample, self._lease_nodes)

    def _own(self, group: Group) -> int:
        return sum(1 for sample in group.samples if self._holder(sample) == self._node)


def choose_batch(
    groups: Sequence[Group],
    *,
    size: int,
    share_of: Callable[[str], float],
    lease_nodes: Callable[[bytes], str],
) -> tuple[list[Group], int]:
    """The next ``size`` groups in lease order, and how many samples among them are above their nodes' shares.

    A group that would take a node above its share is put behind others that are under way, complete or not: what is
    complete decides nothing, for that would favour short answers. Where too few others are under way lease order alone
    decides, and the excess is told: a run is not stopped for it.
    """
    first = list(groups[:size])
    if len(first) < size:
        return first, 0
    chosen: list[Group] = []
    taken: Counter[str] = Counter()
    for group in groups:
        theirs = Counter(filter(None, (holder_of(sample, lease_nodes) for sample in group.samples)))
        if all(taken[node] + count <= _most(node, share_of, first, size) for node, count in theirs.items()):
            chosen.append(group)
            taken += theirs
            if len(chosen) == size:
                return chosen, 0
    return first, _excess(first, size=size, share_of=share_of, lease_nodes=lease_nodes)


def _most(node: str, share_of: Callable[[str], float], groups: Sequence[Group], size: int) -> int:
    return most_samples(share_of(node), size * len(groups[0].samples))


def _excess(
    groups: Sequence[Group], *, size: int, share_of: Callable[[str], float], lease_nodes: Callable[[bytes], str]
) -> int:
    taken = Counter(filter(None, (holder_of(sample, lease_nodes) for group in groups for sample in group.samples)))
    return sum(max(0, count - _most(node, share_of, groups, size)) for node, count in taken.items())
