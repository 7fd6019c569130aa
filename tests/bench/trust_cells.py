"""The cells of `make bench-trust` and what is kept of each: margins of every token. No torch here.

Each file OUT/cells/NAME/FIRST.npz holds a part of a cell, in the order of the rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

NEW_TOKENS: Final = 16
"""Length at which rollouts are cut; sums end earlier by themselves."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way of making rollouts."""

    name: str
    rollouts: int
    rows: int = 64
    dtype: str = "bfloat16"
    cheat: str = ""
    engine: str = "transformers"


HONEST: Final = (
    Cell(name="bf16-1", rollouts=416, rows=1),
    Cell(name="bf16-8", rollouts=512, rows=8),
    Cell(name="bf16-64", rollouts=8832, rows=64),
    Cell(name="fp32-1", rollouts=160, rows=1, dtype="float32"),
    Cell(name="fp32-8", rollouts=128, rows=8, dtype="float32"),
    Cell(name="fp32-64", rollouts=256, rows=64, dtype="float32"),
    Cell(name="vllm-1", rollouts=96, rows=1, engine="vllm"),
    Cell(name="vllm-8", rollouts=256, rows=8, engine="vllm"),
    Cell(name="vllm-64", rollouts=1024, rows=64, engine="vllm"),
)
CHEATS: Final = (
    Cell(name="int8 weights, per row", rollouts=640, cheat="int8"),
    Cell(name="wrong seed", rollouts=64, cheat="seed"),
    Cell(name="best of 4", rollouts=64, cheat="best"),
    Cell(name="T = 0.7", rollouts=64, cheat="T0.7"),
    Cell(name="T = 0.9", rollouts=128, cheat="T0.9"),
    Cell(name="top-p 0.95", rollouts=128, cheat="p0.95"),
    Cell(name="top-k 50", rollouts=128, cheat="k50"),
    Cell(name="int4 weights, groups of 32", rollouts=64, cheat="int4"),
    Cell(name="2 % of tokens resampled", rollouts=128, cheat="r0.02"),
    Cell(name="5 % of tokens resampled", rollouts=128, cheat="r0.05"),
    Cell(name="2 % edited to the runner-up", rollouts=128, cheat="e0.02"),
    Cell(name="5 % edited to the runner-up", rollouts=128, cheat="e0.05"),
    Cell(name="smaller model (15 of 30 layers)", rollouts=64, cheat="layers15"),
    Cell(name="model without 2 of 30 layers", rollouts=64, cheat="layers28"),
    Cell(name="early end", rollouts=128, cheat="eos"),
    Cell(name="int8, embedding too", rollouts=256, cheat="int8all"),
    Cell(name="every weight moved by 1e-5", rollouts=128, cheat="noise1e-5"),
    Cell(name="weights 1 step old", rollouts=128, cheat="step1"),
    Cell(name="weights 4 steps old", rollouts=128, cheat="step4"),
    Cell(name="weights 8 steps old", rollouts=128, cheat="step8"),
)


@dataclass(frozen=True, kw_only=True)
class Cases:
    """The rollouts of one cell, in the order in which they were made."""

    margins: list[np.ndarray]
    """Per rollout, float32 [t]."""
    gaps: list[np.ndarray]
    """|claimed - exact log-probability|, per rollout, float32 [t], nats."""
    nats: float
    """Mean of -log p of the tokens under the exact weights."""
    samples: int
    """Rollouts of one prompt, which stand next to each other."""

    def half(self, part: int) -> Cases:
        """Every other pair of prompts (a sum and a story): no prompt is in both halves."""
        kept = [at for at in range(len(self.margins)) if at // self.samples // 2 % 2 == part]
        return Cases(
            margins=[self.margins[at] for at in kept],
            gaps=[self.gaps[at] for at in kept],
            nats=self.nats,
            samples=self.samples,
        )


def samples_of(cell: Cell) -> int:
    """Rollouts of one prompt."""
    return min(8, max(1, cell.rows // 2))


def load(out: Path, cell: Cell) -> Cases | None:
    """What is there of a cell; None where nothing is."""
    parts = [np.load(path) for path in sorted((out / "cells" / cell.name).glob("*.npz"))]
    if not parts:
        return None
    ends = np.cumsum(np.concatenate([part["lengths"] for part in parts]))[:-1]
    return Cases(
        margins=np.split(np.concatenate([part["margins"] for part in parts]), ends),
        gaps=np.split(np.concatenate([part["gaps"] for part in parts]), ends),
        nats=float(-np.concatenate([part["exact"] for part in parts]).mean()),
        samples=samples_of(cell),
    )
