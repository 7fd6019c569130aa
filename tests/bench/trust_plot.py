"""The picture of `make bench-trust`: ``python -m tests.bench.trust_plot FIGURES.json PICTURE.png``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

DOTS_PER_INCH: Final = 130
INK: Final = "#1f4e79"
WARM: Final = "#c0562f"
FAINT: Final = "#9bb8d3"
GREY: Final = "#5c6670"
CURVES: Final = 7
"""Of the cheats that are hardest to find, the first so many are drawn."""
COLOURS: Final = ("#1f4e79", "#c0562f", "#4f8a5b", "#8a5b8f", "#b08a2e", "#4aa3a8", "#5c6670")
CAP: Final = 40_000


def draw(figures: dict) -> Figure:
    """Left: how long each cheat lasts. Right: blocks noticed against honest blocks noticed."""
    figure = Figure(figsize=(11.5, 5.4), dpi=DOTS_PER_INCH, layout="constrained")
    lengths, curves = figure.subplots(1, 2, width_ratios=[1.55, 1])
    rows = sorted(figures["rows"], key=lambda row: (row["first_median"] or CAP, row["drift_median"] or CAP))
    for place, row in enumerate(rows):
        for rule, colour, shift, size in (("drift", FAINT, 0.2, 5), ("first", INK, -0.15, 6)):
            middle, late = row[f"{rule}_median"], row[f"{rule}_p95"]
            if middle is None:
                lengths.plot([CAP], [place + shift], ">", color=colour, markersize=size)
                continue
            lengths.plot([middle, late or CAP], [place + shift] * 2, color=colour, linewidth=2)
            lengths.plot([middle], [place + shift], "o", color=colour, markersize=size)
    lengths.plot([], [], "o-", color=INK, label="all rules together")
    lengths.plot([], [], "o-", color=FAINT, label="drift test alone")
    lengths.plot([], [], ">", color=GREY, label=f"not within {CAP:,} tokens")
    lengths.set_yticks(range(len(rows)), [row["cheat"] for row in rows], fontsize=8)
    lengths.set(xscale="log", xlabel="audited tokens until noticed: median to 95th percentile", xlim=(3, CAP * 1.4))
    lengths.axvline(10_000, color=WARM, linewidth=1, linestyle=":")
    lengths.legend(loc="lower right", frameon=False, fontsize=8)
    lengths.set_title("How long a cheat lasts", loc="left", fontsize=10)
    shown = rows[-CURVES:]
    for row, colour in zip(shown, COLOURS, strict=False):
        curves.plot(figures["roc"]["rates"], figures["roc"]["curves"][row["cheat"]], color=colour, marker=".",
                    linewidth=1.5, label=row["cheat"])  # fmt: skip
    curves.plot(figures["roc"]["rates"], figures["roc"]["rates"], color="#c9d0d5", linewidth=1)
    curves.set(xscale="log", xlabel="share of honest blocks noticed", ylabel="share of the cheat's blocks noticed")
    curves.legend(loc="upper left", frameon=False, fontsize=7)
    curves.set_ylim(-0.02, 1.45)
    curves.set_yticks([0, 0.25, 0.5, 0.75, 1])
    curves.set_title(f"Blocks of {figures['roc']['curve_tokens']} tokens, the hardest cheats", loc="left", fontsize=10)
    for axes in (lengths, curves):
        axes.grid(color="#e3e7ea", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=GREY, labelsize=8)
    return figure


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text())).savefig(sys.argv[2])
