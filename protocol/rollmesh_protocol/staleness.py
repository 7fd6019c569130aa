"""Bounded staleness: how old a rollout is, and how many groups may still be ordered.

``age = consuming step - step of the weights behind the oldest token``, queueing included. Step t is the optimiser
step that starts from the weights of step t and makes those of step t + 1. A rollout is consumed only when
``age <= S``; with S = 0 the run is synchronous.

The learner orders no more groups than can still be consumed: with weights of step h at the head and step t the next
one to be filled, work ordered now is admissible in steps t .. h + S, so at most ``(h + S - t + 1) * groups_per_step``
groups may be open or waiting at a time. This module is the one owner of that budget.
"""

from __future__ import annotations


def age(*, consuming_step: int, weights_step: int) -> int:
    """The age, in steps, of a rollout made with the weights of ``weights_step`` when it is consumed."""
    return consuming_step - weights_step


def is_admissible(*, consuming_step: int, weights_step: int, staleness: int) -> bool:
    """True when a rollout may be trained on: not from the future, and not older than ``staleness`` steps."""
    return 0 <= age(consuming_step=consuming_step, weights_step=weights_step) <= staleness


def group_budget(*, head_step: int, next_step: int, staleness: int, groups_per_step: int, open_groups: int) -> int:
    """How many more groups may be ordered now under the weights of ``head_step``.

    ``next_step`` is the lowest step whose batch is not yet assembled; ``open_groups`` counts the groups that are
    leased, in checks or waiting in the buffer.
    """
    steps = head_step + staleness - next_step + 1
    return max(0, steps * groups_per_step - open_groups)
