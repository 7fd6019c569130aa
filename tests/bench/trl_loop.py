"""The same job with TRL's GRPOTrainer, for `make bench-e2e`; run by the Python of an environment that has TRL.

    python tests/bench/trl_loop.py --model FOLDER [--steps 20] [--threads 2]

"What is a + b?", 8 prompts x 8 samples of at most 12 tokens, bf16 weights, AdamW at 1e-5, no KL, plain transformers
generation, as TRL does it by default on a machine without a GPU. Its last line is one JSON object. Nothing of Rollmesh
is imported.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS = 8
SAMPLES = 8
NEW_TOKENS = 12
LEARNING_RATE = 1e-5


class Clock(TrainerCallback):
    """When each optimiser step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_arguments: object, **_more: object) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_arguments: object, **_more: object) -> None:
        self.ends.append(time.perf_counter())
        print(f"step {len(self.ends) - 2:3d}  {self.ends[-1] - self.ends[-2]:.2f} s", flush=True)


def reward(completions: list, answer: list[int], **_more: object) -> list[float]:
    """1 where the last integer of the text is the answer."""
    texts = [completion[0]["content"] for completion in completions]
    found = [re.findall(r"-?\d+", text) for text in texts]
    return [float(bool(n) and int(n[-1]) == right) for n, right in zip(found, answer, strict=True)]


def main() -> None:
    """Train and tell the seconds per step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    generator = random.Random(chosen.seed)
    rows = []
    for _ in range(PROMPTS * chosen.steps):
        a, b = generator.randint(1, 20), generator.randint(1, 20)
        content = f"What is {a} + {b}? Answer with a number only."
        rows.append({"prompt": [{"role": "user", "content": content}], "answer": a + b})
    clock, rewards = Clock(), []

    def noted(completions: list, **columns: object) -> list[float]:
        values = reward(completions, columns["answer"])
        rewards.append(statistics.mean(values))
        return values

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.bfloat16),
            processing_class=AutoTokenizer.from_pretrained(chosen.model, padding_side="left"),
            reward_funcs=noted,
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=folder,
                max_steps=chosen.steps,
                per_device_train_batch_size=PROMPTS * SAMPLES,
                num_generations=SAMPLES,
                max_completion_length=NEW_TOKENS,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                beta=0.0,
                temperature=1.0,
                bf16=True,
                use_cpu=True,
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                seed=chosen.seed,
            ),
        )
        trainer.train()
    steps = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    counted = steps[1:] or steps  # the first step pays for warming up
    print(
        json.dumps(
            {
                "steps": len(steps),
                "threads": chosen.threads,
                "s_per_step": statistics.mean(counted),
                "s_per_step_median": statistics.median(counted),
                "reward_first5": statistics.mean(rewards[:5]),
                "reward_last5": statistics.mean(rewards[-5:]),
            }
        )
    )


if __name__ == "__main__":
    main()
