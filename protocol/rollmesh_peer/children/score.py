"""What scoring an answer gives, and how an untrusted process writes it down. Pure; shared by sandbox and daemon."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

REWARD: Final = struct.Struct("<d")
ERROR_CHARS: Final = 200
"""Of a scorer's exception, type and message: enough to recognise it, too little to fill a log."""
TOO_SLOW: Final = "no reward within"
TOO_MUCH: Final = "more than"
NO_MEMORY: Final = MemoryError.__name__
"""How the reason begins where an answer used too much: time on the clock, CPU or memory, memory that it was denied."""
FAILED: Final = "score failed: "
NOT_A_NUMBER: Final = "score failed: the reward is not a number"
BATCH: Final = 16
"""Answers that share a process; more would save less than a millisecond each."""
RESULT_BYTES: Final = BATCH * (REWARD.size + 4 * ERROR_CHARS + 4)
"""Most that is read of one process: a number and an error's line of UTF-8 for each answer. Fits into a pipe's 64 KiB,
so that writing it never waits."""


@dataclass(frozen=True)
class Score:
    """The reward of one answer in [0, 1], and why it is 0 when scoring failed."""

    reward: float
    error: str | None = None

    @property
    def is_over_limits(self) -> bool:
        """True when scoring ended for the time or the memory that it used."""
        return (self.error or "").removeprefix(FAILED).startswith((TOO_SLOW, TOO_MUCH, NO_MEMORY))


def write_results(outcomes: Sequence[float | str]) -> bytes:
    """Rewards, or the texts of errors: float64 for each, then one line for each error. Pure."""
    told = [NOT_A_NUMBER if isinstance(outcome, float) and math.isnan(outcome) else outcome for outcome in outcomes]
    rewards = b"".join(REWARD.pack(math.nan if isinstance(outcome, str) else outcome) for outcome in told)
    lines = [_printable(outcome) for outcome in told if isinstance(outcome, str)]
    return rewards + "\n".join(lines).encode("utf-8", "replace")


def read_results(result: bytes, count: int) -> list[Score] | None:
    """The scores in what a process wrote, or None where that is not ``count`` of them. Pure; trusts nothing."""
    if not REWARD.size * count <= len(result) <= RESULT_BYTES:
        return None
    rewards = [REWARD.unpack_from(result, REWARD.size * place)[0] for place in range(count)]
    lines = iter(result[REWARD.size * count :].decode("utf-8", "replace").split("\n"))
    scores = []
    for reward in rewards:
        if math.isnan(reward):
            scores.append(Score(0.0, _printable(next(lines, "")) or NOT_A_NUMBER))
        elif 0.0 <= reward <= 1.0:
            scores.append(Score(reward))
        else:
            scores.append(Score(0.0, f"score failed: the reward {reward:g} is not in [0, 1]"))
    return scores


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)[:ERROR_CHARS]
