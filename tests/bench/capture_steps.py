"""Real steps for the patch benchmark: bf16 snapshots of SmolLM2-135M before and after GRPO steps of the plain loop.

    python -m tests.bench.capture_steps --model FOLDER --out FOLDER

Four series of twenty steps each: learning rates 1e-6 and 1e-5, on the base model (whose weights were dequantised from
four bits, so that they start exactly on bf16 values) and on one that has left that grid (ten steps at 1e-4 before, fp32
masters kept). Steps 1, 7 and 20 of each are written as they are made, so an interrupted capture goes on where it was:

- ``layout.msgpack``: the :class:`~rollmesh_protocol.layout.Layout` of every image here;
- ``<series>/<step>.before``: the image before the step, raw;
- ``<series>/<step>.change``: its XOR with the image after the step, one zstandard frame.

About 270 MB a step on disk, and on two cores five minutes a series.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
import zstandard
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rollmesh_protocol.layout import Layout, TensorSpec
from tests.bench import plain_loop

STEPS: Final = (1, 7, 20)
"""Which steps of a series are kept, counted from 1: fresh optimiser state, warm, and settled."""
WARM_STEPS: Final = 10
WARM_RATE: Final = 1e-4
LAYOUT: Final = "layout.msgpack"


@dataclass(frozen=True)
class Series:
    """A base, a learning rate and a seed."""

    name: str
    learning_rate: float
    leaves_grid: bool

    def before(self, folder: Path, step: int) -> Path:
        """Where the image before ``step`` lies."""
        return folder / self.name / f"{step}.before"

    def change(self, folder: Path, step: int) -> Path:
        """Where the XOR of the images before and after ``step`` lies, compressed."""
        return folder / self.name / f"{step}.change"

    def is_complete(self, folder: Path) -> bool:
        """True when all of it was captured."""
        return all(self.change(folder, step).exists() for step in STEPS)


SERIES: Final = (
    Series("base-1e-6", 1e-6, leaves_grid=False),
    Series("base-1e-5", 1e-5, leaves_grid=False),
    Series("off-grid-1e-6", 1e-6, leaves_grid=True),
    Series("off-grid-1e-5", 1e-5, leaves_grid=True),
)


def layout_of(model: PreTrainedModel) -> Layout:
    """The table of the model's parameters, tied ones once."""
    return Layout(
        tensors=tuple(
            TensorSpec(name=name, dtype="bf16", shape=tuple(parameter.shape))
            for name, parameter in model.named_parameters()
        )
    )


def image_of(model: PreTrainedModel, layout: Layout) -> np.ndarray:
    """The image of the model's weights, uint8 [image_bytes]."""
    image = np.zeros(layout.image_bytes, dtype=np.uint8)
    for offset, (_, parameter) in zip(layout.offsets, model.named_parameters(), strict=True):
        raw = parameter.detach().contiguous().view(torch.uint8).flatten().numpy()
        image[offset : offset + len(raw)] = raw
    return image


def capture(series: Series, model_folder: Path, out: Path, *, seed: int) -> None:
    """Run one series and write its steps."""
    torch.manual_seed(seed)
    generator = random.Random(seed)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    layout = layout_of(model)
    (out / LAYOUT).write_bytes(layout.encode())
    optimiser = plain_loop.Masters(model)
    if series.leaves_grid:
        optimiser.set_learning_rate(WARM_RATE)
        for number in range(1, WARM_STEPS + 1):
            _step(series, f"warm {number}", model, tokenizer, optimiser, generator)
        optimiser = plain_loop.Masters(model, masters=optimiser.masters)
    optimiser.set_learning_rate(series.learning_rate)
    (out / series.name).mkdir(parents=True, exist_ok=True)
    for step in range(1, STEPS[-1] + 1):
        before = image_of(model, layout) if step in STEPS else None
        _step(series, f"step {step}", model, tokenizer, optimiser, generator)
        if before is None:
            continue
        change = zstandard.ZstdCompressor(level=3).compress((before ^ image_of(model, layout)).tobytes())
        before.tofile(series.before(out, step))
        unfinished = series.change(out, step).with_suffix(".unfinished")
        unfinished.write_bytes(change)
        unfinished.rename(series.change(out, step))


def _step(series, label, model, tokenizer, optimiser, generator) -> None:
    """Make one update; a batch in which no group has variance is drawn again."""
    started = time.perf_counter()
    while True:
        batch = plain_loop.roll_out(model, tokenizer, generator)
        if plain_loop.train(model, optimiser, batch, micro_batch=16):
            break
    figures = {"series": series.name, "at": label, "reward": float(batch.rewards.mean())}
    print(json.dumps(figures | {"s": round(time.perf_counter() - started, 1)}), file=sys.stderr, flush=True)


def main() -> int:
    """Capture what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="model folder in Hugging Face form")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    chosen.out.mkdir(parents=True, exist_ok=True)
    for series in SERIES:
        if not series.is_complete(chosen.out):
            capture(series, chosen.model, chosen.out, seed=chosen.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
