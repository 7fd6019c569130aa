"""`make bench-cheats`: does a run learn as well with 30 % of its work by cheats as without them?

    python -m tests.attacks.curve [--steps N] [--seeds 0 1 2] [--arms ARM ...] [--out DIR] [--models DIR]
                                  [--results DIR] [--fresh]

For each seed the demo's run of SmolLM2-135M-Instruct is made three times, over real processes (:mod:`.curve_run`):
``honest``, honest nodes only; ``cheats``, the same beside the cheats of :mod:`.cheats`; ``unchecked``, the same cheats
with a learner that believes everybody (:mod:`.trusting_learner`): the control, which must not learn as well. Rewards
are computed afterwards from what honest nodes drew (:mod:`.curve_account`), and judged by :mod:`.curve_verdict`.

A run's figures are kept in OUT as soon as it is done and used again at the next start with the same settings, so that
what was interrupted goes on. Prints a table, and as its last line one JSON object: ``rows``, ``ok`` and ``misses``.
Exit status 0 unless something could not run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rollmesh_learner.members.standing import OFFENCES
from rollmesh_peer.models.base import import_base, write_base_image
from tests.attacks.attack import say
from tests.attacks.cheats import SHARE
from tests.attacks.curve_plot import draw
from tests.attacks.curve_run import Job, play
from tests.attacks.curve_verdict import ARMS, ERRORS, LAST, Row, as_json, judge, mean_in
from tests.attacks.place import SOURCE

STEPS: Final = 40
SEEDS: Final = (0, 1, 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was not run yet, and print the verdict."""
    chosen = _parser().parse_args(argv)
    out = chosen.out.resolve()
    cache = (chosen.models or out / "models").resolve()
    out.mkdir(parents=True, exist_ok=True)
    model = import_base(SOURCE, cache=cache)
    base = out / "base.image"
    write_base_image(model, image=base)
    runs = []
    for seed in chosen.seeds:
        for arm in chosen.arms:
            job = Job(arm=arm, seed=seed, steps=chosen.steps, model=model, cache=cache, base=base)
            runs.append(_result(job, out=out, fresh=chosen.fresh))
    figures = conclude(runs, steps=chosen.steps)
    if chosen.results:
        _publish(figures, folder=chosen.results)
    print(json.dumps({name: value for name, value in figures.items() if name != "runs"}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-cheats"))
    parser.add_argument("--models", type=Path, help="where the converted base model is kept (default: in OUT)")
    parser.add_argument("--results", type=Path, help="write cheats.json and cheats.png into this folder")
    parser.add_argument("--fresh", action="store_true", help="use no earlier result")
    return parser


def _result(job: Job, *, out: Path, fresh: bool) -> dict:
    """The figures of a job, from an earlier start where there are any."""
    path = out / f"{job.name}.json"
    settings = {"steps": job.steps, "share": SHARE}
    if path.exists() and not fresh:
        found = json.loads(path.read_text())
        if found["settings"] == settings:
            say(f"{job.name}: as found in {path}")
            return found
    say(f"{job.name}: {job.steps} steps, at most {job.deadline_s:.0f} s")
    found = play(job, out=out) | {"settings": settings}
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(found, indent=1) + "\n")
    unfinished.replace(path)
    return found


def conclude(runs: Sequence[dict], *, steps: int) -> dict[str, object]:
    """Print what came of all runs and return the figures."""
    for run in runs:
        run["last10"] = mean_in(run["curve"], range(max(0, steps - LAST), steps))
    curves = {arm: [run["curve"] for run in runs if run["arm"] == arm] for arm in ARMS}
    rows, misses = judge(curves, steps=steps)
    misses += [f"{run['arm']}-{run['seed']}: {what}" for run in runs for what in _doubts(run)]
    _print_runs(runs)
    _print_rows(rows)
    return {
        "workload": f"SmolLM2-135M-Instruct, the demo's run, {steps} steps; {SHARE:.0%} of offered rollouts by cheats",
        "rows": [as_json(row) for row in rows],
        "last10": {arm: [run["last10"] for run in runs if run["arm"] == arm] for arm in ARMS},
        "seconds": sum(run["seconds"] for run in runs),
        "ok": not misses,
        "misses": misses,
        "runs": list(runs),
    }


def _doubts(run: dict) -> list[str]:
    """What would make a run worthless as evidence. Honest work that came too late is no reason."""
    doubts = []
    if run["disagreements"]:
        doubts.append(f"{run['disagreements']} honest rewards are not what the learner gave")
    held_against = [code for code in run["honest"]["offences"] if OFFENCES.get(code) != "none"]
    if held_against:
        doubts.append(f"honest nodes were taken for cheats: {', '.join(held_against)}")
    if run["arm"] == "cheats" and not run["cheats"]["quarantined"]:
        doubts.append("no cheat was put out")
    if run["arm"] == "unchecked" and not run["cheats"]["consumed"]:
        doubts.append("nothing of the cheats was consumed")
    return doubts


def _print_runs(runs: Sequence[dict]) -> None:
    print("run          last 10  believed     s  share  identities   out  accepted  void  consumed  honest consumed")
    for run in runs:
        cheats, believed = run["cheats"], mean_in(run["curve_believed"][-LAST:], range(LAST))
        print(
            f"{run['arm'] + '-' + str(run['seed']):<12} {_number(run['last10']):>7}  {_number(believed):>8}  "
            f"{run['seconds']:>4}  {run['offered']['share']:>5.0%}  {cheats['identities']:>10}  "
            f"{cheats['quarantined']:>4}  {cheats['accepted']:>8}  {cheats['void']:>4}  {cheats['consumed']:>8}  "
            f"{run['honest']['consumed']:>15}"
        )


def _print_rows(rows: Sequence[Row]) -> None:
    print("arm         steps  reward  honest  difference  2 errors  within")
    for row in rows:
        within = {True: "yes", False: "no", None: "-"}[row.is_within]
        error = None if row.error is None else ERRORS * row.error
        print(
            f"{row.arm:<10}  {f'{row.first}-{row.last}':>5}  {row.reward:>6.3f}  {row.honest:>6.3f}  "
            f"{row.difference:>+10.3f}  {_number(error):>8}  {within}"
        )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _publish(figures: dict, *, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cheats.json").write_text(json.dumps(figures, indent=1) + "\n")
    draw(figures).savefig(folder / "cheats.png", metadata={"Software": "rollmesh"})


if __name__ == "__main__":
    sys.exit(main())
