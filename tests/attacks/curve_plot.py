"""The picture of `make bench-cheats`: ``python -m tests.attacks.curve_plot FIGURES.json PICTURE.png``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from rollmesh_learner.training.plot import smooth

DOTS_PER_INCH: Final = 120
GREY: Final = "#5c6670"
LOOKS: Final = {
    "honest": ("#1f4e79", "honest nodes only"),
    "cheats": ("#4f8a5b", "30 % of the work by cheats, checks on"),
    "unchecked": ("#c0562f", "the same cheats, checks off"),
}


def draw(figures: dict) -> Figure:
    """The mean over seeds of each arm's curve, smoothed over 5 steps, with each seed's own behind it."""
    figure = Figure(figsize=(8, 4.6), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    for arm, (colour, label) in LOOKS.items():
        curves = [np.array(run["curve"], dtype=float) for run in figures["runs"] if run["arm"] == arm]
        if not curves:
            continue
        seeds = [smooth(_filled(curve)) for curve in curves]
        steps = np.arange(1, len(seeds[0]) + 1)
        for seed in seeds:
            axes.plot(steps, seed, color=colour, linewidth=0.8, alpha=0.4)
        axes.plot(steps, np.mean(seeds, axis=0), color=colour, linewidth=2.4, label=f"{label} (seeds: {len(seeds)})")
    axes.set(xlabel="step", ylabel="true mean reward of honest nodes' rollouts", ylim=(-0.02, 1.02))
    axes.set_title("Mean of 5 steps; thin lines are single seeds", loc="left", fontsize=10)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    axes.grid(color="#e3e7ea", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=GREY, labelsize=9)
    return figure


def _filled(curve: np.ndarray) -> np.ndarray:
    """Steps without a value take that of the step before, the first ones that of the first known."""
    known = np.flatnonzero(~np.isnan(curve))
    if not len(known):
        return np.zeros_like(curve)
    places = np.maximum.accumulate(np.where(np.isnan(curve), 0, np.arange(len(curve))))
    return curve[np.maximum(places, known[0])]


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text())).savefig(sys.argv[2])
