"""`make bench-trust`: what the sampling audit refuses of honest work, and after how many tokens it finds each cheat.

Rollouts of SmolLM2-135M-Instruct are made once (:mod:`tests.bench.trust_data`, half an hour on two cores) and kept.
Thresholds, drift test and delta are derived as `rollmesh learner calibrate` does, from one half of the honest prompts,
and tried on the other half, both ways round; and from as few rollouts as that command makes by default. Printed are:
the cells; false rejections rule by rule, of single rollouts and of whole lives of 10,000 audited rollouts; audited
tokens until a node that cheats all the time is noticed, median and 95th percentile over lives that are drawn from its
rollouts; and how often blocks of so many tokens are noticed at a false-positive rate of 1e-3. The last line is one JSON
object: ``rows``, ``ok`` and ``misses``.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from rollmesh_learner.audit.calibrate import DEFAULT_ROLLOUTS, SHARES
from rollmesh_learner.audit.derive import CellData, Derived, derive
from rollmesh_protocol.verdicts.envelope import LIFE_ROLLOUTS, RATE, SOFT_RATE
from rollmesh_protocol.verdicts.margins import Thresholds
from tests.bench import trust_cells, trust_lives
from tests.bench.trust_cells import CHEATS, HONEST, Cases, Cell
from tests.bench.trust_vllm import PYTHON

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "tests" / "bench" / "results"
LONGEST: Final = 256
"""The longest completion of a run by default: thresholds hold their rates for it."""
LEAST_HONEST: Final = 10_000
LEAST_SINGLE: Final = 300
"""Honest rollouts at batch 1."""
INT8: Final = "int8 weights, per row"
INT8_TOKENS: Final = 10_000
STEADY: Final = 0.03
"""Share of a node's rollouts that is audited in good standing."""
MAKE_S: Final = 4 * 3600
OPERATORS: Final = 12
"""Calibrations with as many rollouts as the command makes by default, drawn from the transformers cells."""
LIVES_OF_OPERATOR: Final = 90


def main() -> int:
    """Make what is missing, judge, print tables and figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-trust"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm-python", type=Path, default=PYTHON, help="of an environment with vLLM; else without")
    parser.add_argument("--as-is", action="store_true", help="judge the rollouts that are there, and make no more")
    chosen = parser.parse_args()
    out = chosen.out.resolve()
    if not chosen.as_is:
        make_missing(out, threads=chosen.threads, vllm=chosen.vllm_python)
    honest = {cell: cases for cell in HONEST if (cases := trust_cells.load(out, cell))}
    cheats = {cell: cases for cell in CHEATS if (cases := trust_cells.load(out, cell))}
    figures = judge(honest, cheats)
    figures["made_at"] = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    RESULTS.joinpath("trust.json").write_text(json.dumps(figures, indent=1) + "\n")
    plot = [sys.executable, "-m", "tests.bench.trust_plot", str(RESULTS / "trust.json"), str(RESULTS / "trust.png")]
    subprocess.run(plot, check=True, cwd=ROOT)
    print(json.dumps({name: figures[name] for name in ("rows", "false_rejections", "ok", "misses")}))
    return 0


def make_missing(out: Path, *, threads: int, vllm: Path) -> None:
    """Generate and recompute in a process of its own; it keeps what is there."""
    command = [sys.executable, "-m", "tests.bench.trust_data", "--out", str(out), "--threads", str(threads)]
    command += ["--vllm-python", str(vllm)]
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}
    if subprocess.run(command, timeout=MAKE_S, check=False, cwd=ROOT, env=environ).returncode:
        raise SystemExit("the rollouts could not be made")


def judge(honest: dict[Cell, Cases], cheats: dict[Cell, Cases]) -> dict:
    """Every figure of the bench."""
    cells = [cell_row(cell, cases) for cell, cases in honest.items()]
    print_table("honest work", cells)
    halves = [{cell: cases.half(part) for cell, cases in honest.items()} for part in (0, 1)]
    derived = [derive_from(half) for half in halves]
    for name, one in zip(("even prompts", "odd prompts"), derived, strict=True):
        print(f"\nderived from {name}: {describe(one)}")
    wrong = false_rejections(halves, derived)
    print_table("\nfalse rejections: thresholds of one half, work of the other", wrong["by_cell"])
    print(f"lives of {LIFE_ROLLOUTS:,} honest rollouts: {json.dumps(wrong['lives'])}")
    operators = [derive(cells, rules=Thresholds(), longest=LONGEST) for cells in as_operators_measure(honest)]
    by_operators = operators_lives(list(honest.values()), operators)
    print(f"\nthe same by {OPERATORS} calibrations of {DEFAULT_ROLLOUTS} rollouts: {json.dumps(by_operators)}")
    whole = derive_from(honest)
    rows = [cheat_row(cell, cases, derived=whole, operators=operators) for cell, cases in cheats.items()]
    print_table("\naudited tokens until a cheat is noticed, median / 95th percentile (- : not within the cap)", rows)
    roc = trust_lives.roc(honest=halves[1], cheats=cheats, derived=derived[0])
    print_table(
        "\nshare of blocks noticed at a false-positive rate of 1e-3, by audited tokens in the block", roc["table"]
    )
    total = sum(cell["rollouts"] for cell in cells)
    misses = misses_of(cells, rows, wrong, operators=by_operators, total=total)
    return {
        "workload": f"SmolLM2-135M-Instruct, sums and stories by turns, up to {trust_cells.NEW_TOKENS} new tokens, "
        f"{total:,} honest rollouts, {sum(c['tokens'] for c in cells):,} tokens; auditor transformers bf16 on a CPU",
        "rates": {"hard_per_life": RATE, "life_rollouts": LIFE_ROLLOUTS, "soft_per_rollout": SOFT_RATE},
        "cells": cells,
        "absent": [cell.name for cell in HONEST if cell not in honest],
        "derived": {"all": as_plain(whole), "even": as_plain(derived[0]), "odd": as_plain(derived[1])},
        "operators": {
            "rollouts": DEFAULT_ROLLOUTS,
            "derived": [as_plain(one) for one in operators],
            "honest_lives": by_operators,
        },
        "defaults": as_plain_thresholds(Thresholds()),
        "false_rejections": wrong,
        "rows": rows,
        "roc": roc,
        "ok": not misses,
        "misses": misses,
    }


def misses_of(cells: list[dict], rows: list[dict], wrong: dict, *, operators: dict, total: int) -> list[str]:
    """What the design asks for and was not reached."""
    found = []
    if total < LEAST_HONEST:
        found.append(f"{total} honest rollouts, not {LEAST_HONEST}")
    if (single := sum(cell["rollouts"] for cell in cells if cell["batch"] == 1)) < LEAST_SINGLE:
        found.append(f"{single} honest rollouts at batch 1, not {LEAST_SINGLE}")
    if wrong["rejected"] > RATE * wrong["tested"]:
        found.append(f"{wrong['rejected']} of {wrong['tested']} honest rollouts rejected")
    if max(wrong["lives"]["hard"], wrong["lives"]["drift"]) > RATE:
        found.append(f"honest lives ended: {wrong['lives']}")
    if max(operators["hard"], operators["drift"]) > RATE:
        found.append(f"honest lives ended by calibrations of {DEFAULT_ROLLOUTS} rollouts: {operators}")
    careful = next((row for row in rows if row["cheat"] == INT8), None)
    if careful is None or not (careful["operators_out_p95"] or INT8_TOKENS + 1) <= INT8_TOKENS:
        found.append("int8 weights are not put out within 10,000 audited tokens")
    found += [f"{cell.name} was not measured" for cell in CHEATS if cell.name not in {row["cheat"] for row in rows}]
    return found


def derive_from(honest: dict[Cell, Cases]) -> Derived:
    """As the calibrate command derives, which generates with transformers: vLLM's work is judged by it all the same."""
    cells = [
        CellData(dtype=cell.dtype, batch=cell.rows, margins=cases.margins, gaps=cases.gaps)
        for cell, cases in honest.items()
        if cell.engine == "transformers"
    ]
    return derive(cells, rules=Thresholds(), longest=LONGEST)


def as_operators_measure(honest: dict[Cell, Cases]) -> Iterator[list[CellData]]:
    """What OPERATORS runs of the calibrate command with its default number of rollouts might have measured."""
    by_kind = {(c.dtype, c.rows): cases for c, cases in honest.items() if c.engine == "transformers"}
    random = np.random.default_rng(14)
    for _ in range(OPERATORS):
        cells = []
        for (dtype, batch), share in SHARES.items():
            cases = by_kind[dtype, batch]
            drawn = random.integers(0, len(cases.margins), max(1, round(share * DEFAULT_ROLLOUTS)))
            margins, gaps = ([kept[at] for at in drawn] for kept in (cases.margins, cases.gaps))
            cells.append(CellData(dtype=dtype, batch=batch, margins=margins, gaps=gaps))
        yield cells


def operators_lives(cells: list[Cases], operators: list[Derived]) -> dict[str, float]:
    """Shares of honest lives in which each rule fired, by the thresholds of every operator."""
    lives = [trust_lives.honest_lives(cells, one, lives=LIVES_OF_OPERATOR) for one in operators]
    return {name: round(float(np.mean([one[name] for one in lives])), 5) for name in lives[0]}


def cell_row(cell: Cell, cases: Cases) -> dict:
    margins, gaps = np.concatenate(cases.margins), np.concatenate(cases.gaps)
    return {
        "cell": cell.name if cell.engine == "vllm" else f"{cell.engine} {cell.name}",
        "dtype": cell.dtype,
        "batch": cell.rows,
        "rollouts": len(cases.margins),
        "tokens": margins.size,
        "nats_per_token": round(cases.nats, 3),
        "exact": round(float((margins == 0).mean()), 4),
        "over_0.5": int((margins > 0.5).sum()),
        "over_1": int((margins > 1).sum()),
        "largest": round(float(margins.max()), 3),
        "mean_margin": round(float(margins.mean()), 5),
        "gap_median": round(float(np.median(gaps)), 4),
        "gap_p999": round(float(np.quantile(gaps, 0.999)), 3),
    }


def false_rejections(halves: list[dict[Cell, Cases]], derived: list[Derived]) -> dict:
    """Each half judged by what was derived from the other: rollouts one by one, and whole lives."""
    by_cell: dict[str, dict] = {}
    lives = []
    for derive_half, test_half in ((0, 1), (1, 0)):
        limits = derived[derive_half]
        for cell, cases in halves[test_half].items():
            row = by_cell.setdefault(cell.name, {"cell": cell.name, "tested": 0, "one_token": 0, "several": 0})
            scores = trust_lives.score(cases, limits)
            row["tested"] += len(cases.margins)
            row["one_token"] += int(scores.over_any.sum())
            row["several"] += int((~scores.over_any & scores.several).sum())
        lives.append(trust_lives.honest_lives(list(halves[test_half].values()), limits))
    rows = list(by_cell.values())
    return {
        "by_cell": rows,
        "tested": sum(row["tested"] for row in rows),
        "rejected": sum(row["one_token"] + row["several"] for row in rows),
        "lives": {name: round(float(np.mean([one[name] for one in lives])), 5) for name in lives[0]},
        "lives_simulated": trust_lives.HONEST_LIVES * len(lives),
    }


def cheat_row(cell: Cell, cases: Cases, *, derived: Derived, operators: list[Derived]) -> dict:
    """How long one cheat lasts: by thresholds of all honest work, and by those of operators who measured less."""
    margins, gaps = np.concatenate(cases.margins), np.concatenate(cases.gaps)
    row: dict = {
        "cheat": cell.name,
        "rollouts": len(cases.margins),
        "tokens": margins.size,
        "nats_per_token": round(cases.nats, 3),
        "exact": round(float((margins == 0).mean()), 4),
        "mean_margin": round(float(margins.mean()), 5),
        "largest": round(float(margins.max()), 2),
        "gap_median": round(float(np.median(gaps)), 4),
    }
    for rule, lengths in trust_lives.detection_lengths(cases, derived).items():
        row[f"{rule}_median"], row[f"{rule}_p95"] = (trust_lives.quantile(lengths, q) for q in (0.5, 0.95))
    every = [trust_lives.detection_lengths(cases, one, lives=LIVES_OF_OPERATOR) for one in operators]
    for rule in ("first", "out"):
        lengths = np.concatenate([one[rule] for one in every])
        row[f"operators_{rule}_median"] = trust_lives.quantile(lengths, 0.5)
        row[f"operators_{rule}_p95"] = trust_lives.quantile(lengths, 0.95)
    first = row["first_median"]
    row["generated_median_at_3_percent"] = round(first / STEADY) if first else None
    return row


def describe(derived: Derived) -> str:
    limits, drift = derived.thresholds, derived.drift
    return (
        f"margins {limits.low_margin:.2f} soft, {limits.high_margin:.2f} several, {limits.any_margin:.2f} one; "
        f"drift: clip {drift.clip:.3f}, reference {drift.reference:.5f}, exponent {drift.exponent:.2f}; "
        f"delta {derived.delta:.2f} nats"
    )


def as_plain(derived: Derived) -> dict:
    drift = derived.drift
    return as_plain_thresholds(derived.thresholds) | {
        "clip": drift.clip, "reference": drift.reference, "exponent": drift.exponent, "alarm": drift.alarm,
        "delta": derived.delta,
    }  # fmt: skip


def as_plain_thresholds(limits: Thresholds) -> dict:
    return {"low_margin": limits.low_margin, "high_margin": limits.high_margin, "any_margin": limits.any_margin}


def print_table(title: str, rows: list[dict]) -> None:
    print(title)
    if not rows:
        return
    shown = [{key: "-" if value is None else str(value) for key, value in row.items()} for row in rows]
    widths = {key: max(len(key), *(len(row[key]) for row in shown)) for key in shown[0]}
    for row in [{key: key for key in widths}, *shown]:
        print("  ".join(row[key].ljust(widths[key]) for key in widths))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
