"""The list of attacks: what each one tries, and what its failure looks like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Key = dict[str, object]
"""What an attack is told: paths, ports and process ids that it may look for."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """``run`` returns 1.0 where the attack got what it wanted; otherwise it raises, or returns something else."""

    run: Callable[[dict], object]
    kind: str
    """``reach`` for something outside, ``hang`` or grow, or ``break`` the scoring."""
    works_outside: bool = False
    """It succeeds without a sandbox, which a control run shows."""
    is_told: bool = True
    """The kernel's refusal arrives as an error; false: it looks, and finds nothing."""


ATTACKS: dict[str, Attack] = {}


def reaches(*, works_outside: bool, is_told: bool = True) -> Callable:
    def add(run: Callable[[dict], object]) -> Callable:
        ATTACKS[run.__name__] = Attack(run=run, kind="reach", works_outside=works_outside, is_told=is_told)
        return run

    return add


def hangs(run: Callable[[dict], object]) -> Callable:
    ATTACKS[run.__name__] = Attack(run=run, kind="hang")
    return run


def breaks(run: Callable[[dict], object]) -> Callable:
    ATTACKS[run.__name__] = Attack(run=run, kind="break")
    return run
