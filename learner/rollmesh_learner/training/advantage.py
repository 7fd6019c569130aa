"""Group-relative advantages (GRPO): how much better a sample did than the other samples of its prompt.

Pure numpy. Invariant: the advantages of a group sum to zero, and a group whose rewards are all equal gets exact zeros,
so that it carries no gradient. It knows nothing of tokens; spreading an advantage over them is the batch's work.

Source: DeepSeekMath (arXiv 2402.03300), section 4.1; without division by the deviation: Dr. GRPO (arXiv 2503.20783).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

EPSILON: Final = 1e-6
"""Added to the deviation; far below that of any group with variance (rewards 0 and 1, 256 samples: 0.06)."""
EQUAL: Final = 1e-9
"""Rewards of a group that differ by no more than this count as equal: it is rounding of a mean of rewards."""


def group_advantages(
    rewards: Sequence[float] | NDArray[np.float64], *, groups: Sequence[Hashable], scale: Literal["std", "none"]
) -> NDArray[np.float64]:
    """Return one advantage per reward, float64 [n], in the given order.

    ``groups[i]`` names the group of ``rewards[i]``. ``scale="std"`` divides by the population deviation + ``EPSILON``.
    Raises ``ValueError`` for rewards that are not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) != len(groups):
        raise ValueError(f"{len(values)} rewards for {len(groups)} group names")
    if not np.isfinite(values).all():
        raise ValueError("a reward is not finite")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = np.zeros_like(values)
    for indices in members.values():
        own = values[indices]
        if own.max() - own.min() <= EQUAL:
            continue
        centred = own - own.mean()
        advantages[indices] = centred / (own.std() + EPSILON) if scale == "std" else centred
    return advantages
