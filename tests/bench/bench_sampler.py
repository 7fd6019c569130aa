"""`make bench-sampler`: the statistics of the seeded noise over ten million draws, and what a sampled token costs.

First the battery of :mod:`tests.support.noise_battery` on the reference (which numpy and torch versions match number by
number), with its p-values and their combination; then the same on broken sources, each of which must be seen; then
draws over a vocabulary of 49,152 by the pruned version; then the chance of the lighter of two tokens, exact, beside
softmax: the tail that 24 bits cut. Last the cost of a token: the numpy reference, ours (pruned, on a CPU compiled),
torch with all the noise, against ``torch.multinomial`` and Gumbel noise of torch's own generator, in the same run (the
best of some turns: this machine has other things to do). The last line is one JSON object: ``rows``, ``ok`` and
``misses``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from rollmesh_peer.models import sampling as batched
from rollmesh_protocol import sampling as reference
from tests.support import noise_battery
from tests.support.noise_battery import FALSE_ALARMS, Finding, battery, broken, combined

VOCABULARY: Final = 49_152
SPREAD: Final = 3.0
"""Standard deviation of the logits, which are normal."""
ROWS: Final = (1, 8, 64)
TURNS: Final = {1: 9, 8: 5, 64: 3}
CONTROL_DRAWS: Final = 200_000
WIDE_DRAWS: Final = 20_480
GAPS: Final = (0.0, 5.0, 10.0, 15.0, 17.0, 19.0, 20.0, 20.18, 20.19)


def main() -> int:
    """Measure, print tables, and the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=10_000_000, help="rows of 32 tokens in the battery")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    costs = [row for rows in ROWS for row in cost(rows)]
    started, cpu = time.perf_counter(), time.process_time()
    findings = [*battery(noise_battery.reference, draws=chosen.draws, avalanche_inputs=20_000), wide_draws()]
    print(f"the battery over {chosen.draws:,} draws took {time.process_time() - cpu:.0f} s of CPU")
    for finding in findings:
        print(f"{finding.name:<52}{finding.count:>14,}  p = {finding.p:.4f}", flush=True)
    together = combined(findings)
    print(f"{len(findings)} tests, together p = {together:.4f}; of perfect sources at most {FALSE_ALARMS:.1%} fail")
    controls = {
        name: combined(battery(source, draws=CONTROL_DRAWS, avalanche_inputs=1000)) for name, source in broken().items()
    }
    for name, p in controls.items():
        print(f"control, {name:<43} together p = {p:.1e}", flush=True)
    tail = [(gap, noise_battery.chance_of_the_lighter(gap), 1 / (1 + math.exp(gap))) for gap in GAPS]
    for gap, lattice, exact in tail:
        print(f"{gap:5.2f} nats below: drawn with {lattice:.4e}, softmax {exact:.4e}, apart {abs(lattice - exact):.1e}")
    misses = [f"control: {name}" for name, p in controls.items() if p >= FALSE_ALARMS]
    misses += ["statistics"] if together <= FALSE_ALARMS else []
    misses += ["tail"] if any(abs(lattice - exact) > 2.0**-25 for _, lattice, exact in tail) else []
    misses += [f"{row['rows']} rows: {row['how']}" for row in costs if not row["same_tokens"]]
    figures = {
        "rows": costs,
        "statistics": {
            "draws": chosen.draws,
            "tests": [{"name": one.name, "count": one.count, "p": round(one.p, 5)} for one in findings],
            "combined_p": round(together, 5),
            "false_alarms_at_most": FALSE_ALARMS,
            "controls": controls,
            "tail": [{"nats_below": gap, "lattice": lattice, "softmax": exact} for gap, lattice, exact in tail],
            "seconds": round(time.perf_counter() - started, 1),
        },
    }
    print(json.dumps(figures | {"ok": not misses, "misses": misses}))
    return 0


def cost(rows: int) -> list[dict]:
    """One row of the table for each way to draw ``rows`` tokens."""
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows)) * SPREAD
    plain = logits.numpy()
    seeds, positions = [1000 + row for row in range(rows)], [row % 7 for row in range(rows)]
    ids = torch.arange(VOCABULARY).expand(rows, -1)
    generator = torch.Generator().manual_seed(0)

    def by_torchs_gumbel() -> torch.Tensor:
        return (logits.softmax(-1) / torch.empty_like(logits).exponential_(generator=generator)).argmax(-1)

    ways: dict[str, Callable[[], object]] = {
        "numpy reference": lambda: [reference.sample_token(*row) for row in zip(plain, seeds, positions, strict=True)],
        "torch, all noise": lambda: (
            logits.double() + batched.noise(seeds=seeds, positions=positions, token_ids=ids)
        ).argmax(-1),
        "pruned, compiled": lambda: batched.draw(logits, seeds=seeds, positions=positions).tokens,
        "torch.multinomial": lambda: torch.multinomial(logits.softmax(-1), 1, generator=generator),
        "Gumbel of torch's generator": by_torchs_gumbel,
    }
    honest = ways["numpy reference"]()
    found = []
    for how, draw in ways.items():
        drawn = draw()
        wall_s, cpu_s = [], []
        for _ in range(TURNS[rows]):
            wall, cpu = time.perf_counter(), time.process_time()
            draw()
            wall_s.append(time.perf_counter() - wall)
            cpu_s.append(time.process_time() - cpu)
        is_seeded = how in ("pruned, compiled", "torch, all noise")
        found.append(
            {
                "how": how,
                "rows": rows,
                "vocabulary": VOCABULARY,
                "wall_us_per_token": round(min(wall_s) / rows * 1e6, 1),
                "cpu_us_per_token": round(min(cpu_s) / rows * 1e6, 1),
                "same_tokens": drawn.tolist() == honest if is_seeded and isinstance(drawn, torch.Tensor) else True,
            }
        )
        print(
            f"{rows:3} rows  {how:<30}{found[-1]['cpu_us_per_token']:>10,.0f} us of CPU a token"
            f"{found[-1]['wall_us_per_token']:>10,.0f} us on the clock",
            flush=True,
        )
    return found


def wide_draws() -> Finding:
    """Draws over a model's vocabulary by the torch version that engines use, half over positions, half over seeds."""
    row = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1)) * SPREAD
    counts = np.zeros(VOCABULARY)
    for start in range(0, WIDE_DRAWS, 64):
        steps = list(range(start, start + 64))
        seeds, positions = ([77] * 64, steps) if start < WIDE_DRAWS // 2 else (steps, [0] * 64)
        tokens = batched.draw(row.expand(64, -1), seeds=seeds, positions=positions).tokens
        counts += np.bincount(tokens.numpy(), minlength=VOCABULARY)
    expected = WIDE_DRAWS * row.double().softmax(-1)[0].numpy()
    return Finding(
        "draws against softmax: 49,152 tokens, pruned", WIDE_DRAWS, noise_battery.chi_square_p(counts, expected)
    )


if __name__ == "__main__":
    sys.exit(main())
