"""Rewards as a cheat claims them. The wire has no field for a reward, so the claim rides in a result's engine text.

The learner of the product shows that text and believes nothing of it; :mod:`.trusting_learner` believes it all. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from rollmesh_protocol.rollout import Result

WORD: Final = "claims"


def claim_text(rewards: Sequence[float]) -> str:
    """The engine text of a result whose samples, in their order, are said to have earned ``rewards``."""
    return " ".join([WORD, *(f"{reward:g}" for reward in rewards)])


def read_claims(result: Result) -> dict[int, float]:
    """The claimed rewards by sample index; none for a result without a claim for each of its samples."""
    word, *figures = result.engine.split(" ")
    if word != WORD or len(figures) != len(result.samples):
        return {}
    with suppress(ValueError):
        return {sample.index: float(figure) for sample, figure in zip(result.samples, figures, strict=True)}
    return {}
