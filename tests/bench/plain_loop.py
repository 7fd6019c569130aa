"""The loop that Rollmesh is measured against: GRPO in one process, as a competent person would write it.

    python tests/bench/plain_loop.py --model FOLDER [--steps 20] [--threads 2] [--seed 0]

Same task, batch, optimiser and precision as the demo: "What is a + b?", 8 prompts x 8 samples of at most 12 tokens,
bf16 weights, fp32 masters, fused AdamW. It uses transformers' ``generate`` with a KV cache, one padded forward pass per
micro-batch, and logits of completion positions only; on policy with one update per batch, so the ratio is 1 and the old
log-probabilities are those of the same pass. Nothing of Rollmesh is imported. One line per step; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

PROMPTS = 8
SAMPLES = 8
NEW_TOKENS = 12
LEARNING_RATE = 1e-5
MAX_GRADIENT_NORM = 1.0
CLIP = 0.2


@dataclass
class Seconds:
    """Where each step's time went."""

    generate: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)


@dataclass
class Rollouts:
    """A batch of B completions; prompts are padded on the left, completions on the right."""

    ids: Tensor
    """int64 [B, P + T]."""
    mask: Tensor
    """int64 [B, P + T]: 1 for real tokens."""
    real: Tensor
    """bool [B, T]: completion tokens up to and including the first end-of-text."""
    rewards: Tensor
    """float32 [B]."""


def draw_prompts(generator: random.Random) -> list[tuple[str, int]]:
    """Return questions and their answers."""
    pairs = [(generator.randint(1, 20), generator.randint(1, 20)) for _ in range(PROMPTS)]
    return [(f"What is {a} + {b}? Answer with a number only.", a + b) for a, b in pairs]


def reward(text: str, answer: int) -> float:
    """1 if the last integer of the text is the answer."""
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and int(numbers[-1]) == answer)


@torch.no_grad()
def roll_out(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, generator: random.Random) -> Rollouts:
    """Sample a batch with temperature 1 and nothing cut off."""
    questions = draw_prompts(generator)
    chats = [[{"role": "user", "content": question}] for question, _ in questions for _ in range(SAMPLES)]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    prompts = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    ids = model.generate(
        **prompts, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    completions = ids[:, prompts["input_ids"].shape[1] :]
    ended = (completions == tokenizer.eos_token_id).int().cumsum(-1)
    real = (ended == 0) | ((ended == 1) & (completions == tokenizer.eos_token_id))
    answers = [answer for _, answer in questions for _ in range(SAMPLES)]
    words = tokenizer.batch_decode(completions, skip_special_tokens=True)
    rewards = torch.tensor([reward(text, answer) for text, answer in zip(words, answers, strict=True)])
    return Rollouts(ids=ids, mask=torch.cat([prompts["attention_mask"], real.long()], -1), real=real, rewards=rewards)


def token_logprobs(model: PreTrainedModel, ids: Tensor, mask: Tensor, new: int) -> Tensor:
    """Return log-probabilities of the last ``new`` tokens of each row, float32 [B, new]."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=new + 1, use_cache=False
    ).logits[:, :-1]
    targets = ids[:, -new:]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return -losses.view(targets.shape)


class Masters:
    """fp32 copies that AdamW works on; the model's bf16 weights follow."""

    def __init__(self, model: PreTrainedModel, *, masters: list[torch.nn.Parameter] | None = None) -> None:
        self.parameters = list(model.parameters())
        self.masters = masters or [torch.nn.Parameter(p.detach().float()) for p in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def set_learning_rate(self, rate: float) -> None:
        """Use another learning rate from the next step on."""
        for group in self.adam.param_groups:
            group["lr"] = rate

    def step(self) -> float:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, MAX_GRADIENT_NORM))
        self.adam.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)
        return norm


def train(model: PreTrainedModel, optimiser: Masters, batch: Rollouts, *, micro_batch: int) -> bool:
    """Make one GRPO step; without variance in any group there is none. Returns whether there was one."""
    grouped = batch.rewards.view(PROMPTS, SAMPLES)
    centred = grouped - grouped.mean(-1, keepdim=True)
    advantages = (centred / (grouped.std(-1, correction=0, keepdim=True) + 1e-6)).flatten()
    if not advantages.any():
        return False
    new = batch.real.shape[1]
    for start in range(0, len(batch.ids), micro_batch):
        part = slice(start, start + micro_batch)
        logprobs = token_logprobs(model, batch.ids[part], batch.mask[part], new)
        ratio = (logprobs - logprobs.detach()).exp()
        advantage = advantages[part, None]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        loss = -(gain * batch.real[part]).sum() / (PROMPTS * SAMPLES * NEW_TOKENS)
        loss.backward()
    optimiser.step()
    return True


def main() -> None:
    """Run the loop and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model folder in Hugging Face form")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--micro-batch", type=int, default=16, help="sequences of one forward pass")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(chosen.seed)
    generator = random.Random(chosen.seed)
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(chosen.model, padding_side="left")
    optimiser = Masters(model)
    seconds, rewards = Seconds(), []
    for step in range(chosen.steps):
        started = time.perf_counter()
        batch = roll_out(model, tokenizer, generator)
        sampled = time.perf_counter()
        updated = train(model, optimiser, batch, micro_batch=chosen.micro_batch)
        ended = time.perf_counter()
        seconds.generate.append(sampled - started)
        seconds.train.append(ended - sampled)
        rewards.append(float(batch.rewards.mean()))
        times = f"generate {seconds.generate[-1]:.2f} s  train {seconds.train[-1]:.2f} s"
        note = "" if updated else "  (no group with variance, no update)"
        print(f"step {step:3d}  reward {rewards[-1]:.3f}  {times}{note}", flush=True)
    last = slice(1, None) if chosen.steps > 1 else slice(None)  # the first step pays for warming up
    generate, training = statistics.mean(seconds.generate[last]), statistics.mean(seconds.train[last])
    print(
        json.dumps(
            {
                "steps": chosen.steps,
                "threads": chosen.threads,
                "s_per_step": generate + training,
                "generate_s": generate,
                "train_s": training,
                "s_per_step_median": statistics.median(
                    g + t for g, t in zip(seconds.generate[last], seconds.train[last], strict=True)
                ),
                "reward_first5": statistics.mean(rewards[:5]),
                "reward_last5": statistics.mean(rewards[-5:]),
                "rewards": rewards,
            }
        )
    )


if __name__ == "__main__":
    main()
