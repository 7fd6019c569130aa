"""How much work nodes that are audited much may hold while audits are slower than they are (layer L7). Pure.

Invariant: rollouts that wait for an audit, and those expected to once open leases of nodes that deliver come in, are
together at most the bound, as far as nodes below full standing are concerned; every node that has delivered nothing yet
may add one group. Those in full standing are never held back by it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AuditLoad:
    """What the auditor has before it, in rollouts; ``most`` is the bound on both together."""

    waiting: int
    expected: float
    """Samples on open leases of nodes below full standing that deliver, each times its node's audit rate."""
    most: int
    sharers: int
    """Nodes below full standing that are at work, who share what is left."""


def audit_allowance(earned: int, *, holding: int, rate: float, load: AuditLoad, least: int) -> int:
    """How many samples a node below full standing may hold, of the ``earned`` ones.

    ``rate`` is its audit rate and ``holding`` what it holds already. No sharer may take more than an equal part of the
    bound, but ``least`` where there is room for it at all.
    """
    if rate <= 0:
        return earned
    room = int((load.most - load.waiting - load.expected) / rate)
    part = max(least, int(load.most / rate) // max(1, load.sharers))
    return min(earned, part, holding + max(0, room))
