"""Samples that a node let go of, compared with those it delivered (layer L7's re-leased seeds make it possible).

A lease that ran out or came back goes to another node with the same seeds, so what it would have been is known once
that one is done. A node that lets go of what does badly shows: the leases it abandoned did worse, or were longer, than
those it delivered. One number a lease, because the samples of a group are not independent; ranks, because rewards are
not normal. It raises the node's audit rate and is shown; it rejects nothing: an honest slow node runs out of time on
long answers, too.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

LEAST_LEASES: Final = 8
"""Abandoned and delivered leases from which on there is something to compare."""
KEPT_LEASES: Final = 200
"""Of each kind and node, the newest."""
KEPT_NODES: Final = 4096
TELLING_Z: Final = 3.0
"""One-sided: about one honest node in 740 at any one look."""


@dataclass
class Mean:
    """The running mean of a lease's samples."""

    samples: int = 0
    reward: float = 0.0
    tokens: float = 0.0

    def add(self, reward: float, tokens: int) -> None:
        """One more sample."""
        self.samples += 1
        self.reward += (reward - self.reward) / self.samples
        self.tokens += (tokens - self.tokens) / self.samples


@dataclass(frozen=True, kw_only=True)
class Withheld:
    """What comparing a node's abandoned leases with its delivered ones gave. z > 0: the abandoned ones did worse."""

    abandoned: int
    delivered: int
    reward_z: float
    length_z: float

    @property
    def is_telling(self) -> bool:
        """True when chance does not explain it."""
        return max(self.reward_z, self.length_z) > TELLING_Z

    @property
    def words(self) -> str:
        """For ``status``; empty when there is nothing to say."""
        if not self.is_telling:
            return ""
        what = "had lower rewards" if self.reward_z >= self.length_z else "had longer answers"
        z = max(self.reward_z, self.length_z)
        return f"{self.abandoned} leases that it let go of {what} elsewhere (z {z:.1f})"


@dataclass
class _Leases:
    abandoned: OrderedDict[bytes, Mean] = field(default_factory=OrderedDict)
    delivered: OrderedDict[bytes, Mean] = field(default_factory=OrderedDict)


class WithheldBook:
    """What nodes delivered and abandoned lately, by lease. :func:`rank_z` judges it."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[str, _Leases] = OrderedDict()

    def delivered(self, node: str, lease_id: bytes, *, reward: float, tokens: int) -> None:
        """A sample of a lease that ``node`` delivered was scored."""
        _add(self._of(node).delivered, lease_id, reward, tokens)

    def abandoned(self, node: str, lease_id: bytes, *, reward: float, tokens: int) -> None:
        """A sample of a lease that ``node`` let go of was delivered by another node and scored."""
        _add(self._of(node).abandoned, lease_id, reward, tokens)

    def judge(self, node: str) -> Withheld:
        """The comparison as of now."""
        leases = self._nodes.get(node, _Leases())
        given_up, kept = list(leases.abandoned.values()), list(leases.delivered.values())
        return Withheld(
            abandoned=len(given_up),
            delivered=len(kept),
            reward_z=rank_z([mean.reward for mean in given_up], [mean.reward for mean in kept]),
            length_z=rank_z([-mean.tokens for mean in given_up], [-mean.tokens for mean in kept]),
        )

    def _of(self, node: str) -> _Leases:
        leases = self._nodes.setdefault(node, _Leases())
        self._nodes.move_to_end(node)
        if len(self._nodes) > KEPT_NODES:
            self._nodes.popitem(last=False)
        return leases


def rank_z(low: Sequence[float], high: Sequence[float]) -> float:
    """How far ``low`` lies below ``high``, in standard deviations under "no difference" (Mann and Whitney 1947).

    Normal approximation with the correction for ties; 0 with fewer than :data:`LEAST_LEASES` on either side.
    """
    few, many = len(low), len(high)
    if few < LEAST_LEASES or many < LEAST_LEASES:
        return 0.0
    ranks, ties = _ranks([*low, *high])
    total = few + many
    above = sum(ranks[:few]) - few * (few + 1) / 2
    variance = few * many / 12 * ((total + 1) - ties / (total * (total - 1)))
    return (few * many / 2 - above) / math.sqrt(variance) if variance > 0 else 0.0


def _ranks(values: Sequence[float]) -> tuple[list[float], float]:
    """The rank of each value from 1, equal ones sharing theirs, and the sum of t^3 - t over runs of t equal ones."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    ties = 0.0
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for place in order[start:end]:
            ranks[place] = (start + 1 + end) / 2
        run = end - start
        ties += run**3 - run
        start = end
    return ranks, ties


def _add(leases: OrderedDict[bytes, Mean], lease_id: bytes, reward: float, tokens: int) -> None:
    leases.setdefault(lease_id, Mean()).add(reward, tokens)
    if len(leases) > KEPT_LEASES:
        leases.popitem(last=False)
