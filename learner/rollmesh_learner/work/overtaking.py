"""When a sample that the next batch waits for is given to a second node as well. Pure.

Seeds are the lease's, so both nodes make the same rollout, and the first one that comes counts. It is done for a batch
that would wait, by nodes that have delivered and would have nothing to do.

Invariant: who holds work without delivering it, whatever it says and under however many names, holds a batch up for no
longer than :func:`patience_s` while another node is idle. Honest nodes that are slower than that lose a rollout now and
then, and no standing.
"""

from __future__ import annotations

from typing import Final

from rollmesh_learner.work.groups import LeaseRecord

LEAST_S: Final = 10.0
NEWCOMERS: Final = 2.0
"""Who has delivered nothing yet is waited for as long as the typical node takes for a lease, times this."""
OTHERS: Final = 4.0
OF_DURATION: Final = 0.5
"""A lease stands for several times what its work should take: nobody is waited for longer than this part of it."""


def patience_s(lease: LeaseRecord, *, has_delivered: bool, typical_s: float) -> float:
    """Seconds from its beginning after which ``lease`` may be overtaken.

    ``typical_s``: from lease to result, of the median node at work.
    """
    times = OTHERS if has_delivered else NEWCOMERS
    return min(OF_DURATION * lease.duration_s, max(LEAST_S, times * typical_s))
