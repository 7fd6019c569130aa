"""Whether a node's word on its log-probabilities is true, once the exact ones are known.

A claim moves the loss by delta at most, so a false one is no way to poison a run; but every one costs an audit of work
that was consumed already (layer L4). A node that goes on with it is audited before, like a new one: a soft offence.

Invariant: honest noise does not add up. Of 11,680 honest rollouts six were further from the exact log-probabilities
than layer L4 allows; each counts one, each other one takes a tenth off, and at three the node has been untruthful.
Kept in memory: a restart forgives what had not yet come to three.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollmesh_protocol.verdicts.logprobs import LogprobLimits, mismatch

UNTRUTHFUL: Final = 3.0
FORGIVEN: Final = 0.1
"""What a rollout with true claims takes off: who lies less often than in one of eleven costs next to nothing."""
KEPT_NODES: Final = 4096


class Claims:
    """What was seen of each node's claims lately."""

    def __init__(self, limits: LogprobLimits | None = None) -> None:
        self._limits = limits or LogprobLimits()
        self._counts: OrderedDict[str, float] = OrderedDict()

    def add(self, node: str, claimed: NDArray[np.float32], *, exact: NDArray[np.float32]) -> str:
        """One more rollout; both [t], nats. Why its node is untruthful, if it is now, and it begins anew; else empty.

        Raises ``ValueError`` for empty or unequal lengths.
        """
        found = mismatch(claimed, own=exact, limits=self._limits)
        count = self._counts.pop(node, 0.0) + (1.0 if found.verdict == "audit" else -FORGIVEN)
        if count >= UNTRUTHFUL:
            return f"its log-probabilities are not those of its tokens: off by {found.median:.0%} (median)"
        if count > 0:
            self._counts[node] = count
            if len(self._counts) > KEPT_NODES:
                self._counts.popitem(last=False)
        return ""
