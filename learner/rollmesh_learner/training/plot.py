"""The curve of a run as a picture: ``python -m rollmesh_learner.training.plot METRICS PICTURE``, a child process.

It reads the learner's metrics.jsonl and writes a PNG. A process of its own, because matplotlib costs a daemon 60 MB.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

WINDOW: Final = 5
"""Steps of the smoothed curve."""
DOTS_PER_INCH: Final = 160
INK: Final = "#1f4e79"
FAINT: Final = "#9bb8d3"
GREY: Final = "#5c6670"

Column = NDArray[np.float64]


def smooth(values: Column, *, window: int = WINDOW) -> Column:
    """The mean of each value and the ``window`` - 1 before it, of fewer at the beginning: float64 [n]."""
    sums = np.cumsum(np.concatenate([np.zeros(1), values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    mean: Column = (sums[ends] - sums[starts]) / (ends - starts)
    return mean


def draw(steps: Column, rewards: Column, ages: Column, *, title: str) -> Figure:
    """The reward of each step, and below it how old the rollouts were; float64 [n] each."""
    figure = Figure(figsize=(8, 5.2), dpi=DOTS_PER_INCH, layout="constrained")
    reward, age = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
    reward.plot(steps, rewards, color=FAINT, marker="o", markersize=3, linewidth=0.8, label="one step")
    reward.plot(steps, smooth(rewards), color=INK, linewidth=2.2, label=f"mean of {WINDOW} steps")
    reward.set(ylabel="mean reward", ylim=(min(0.0, rewards.min()) - 0.02, max(1.0, rewards.max()) + 0.02))
    reward.set_title(title, loc="left", fontsize=11, color="#20262c")
    reward.legend(loc="upper left", frameon=False, fontsize=9)
    age.bar(steps, ages, width=0.8, color=FAINT)
    age.set(xlabel="step", ylabel="rollouts' age\n(steps)", ylim=(0, max(1.0, ages.max() * 1.1)))
    for axes in (reward, age):
        axes.grid(axis="y", color="#e3e7ea", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#b8c0c7")
        axes.tick_params(colors=GREY, labelsize=9)
        axes.yaxis.label.set_color(GREY)
        axes.xaxis.label.set_color(GREY)
    figure.align_ylabels([reward, age])
    return figure


def main(metrics: Path, picture: Path) -> None:
    """Read ``metrics`` and write ``picture``."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise SystemExit(f"{metrics} holds no step yet")
    by_step = {int(line["step"]): line for line in lines}  # a step that was done again counts as it was last
    ordered = [by_step[step] for step in sorted(by_step)]
    steps, rewards, ages = (
        np.array([float(line[name]) for line in ordered]) for name in ("step", "reward", "age_mean")
    )
    first, last = rewards[:5].mean(), rewards[-10:].mean()
    title = f"Mean reward over {len(steps)} steps: {first:.2f} in the first 5, {last:.2f} in the last 10"
    draw(steps + 1, rewards, ages, title=title).savefig(picture, metadata={"Software": "rollmesh"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
