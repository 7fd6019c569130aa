"""An engine without Rollmesh: the library's own ``generate`` on the same prompts, in a process of its own.

Reads one JSON object per line: the settings first, then one per round (``prompts``: lists of token ids, ``samples``,
``tokens``), and answers each round with one: ``tokens`` and ``wall_s``. Every completion has exactly ``tokens`` tokens,
so that both engines do the same work. Nothing of Rollmesh is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

Round = Callable[[Sequence[Sequence[int]], int, int], int]
"""Prompts, samples of each, new tokens of each sample; returns the tokens that were generated."""


def main() -> None:
    # What libraries print goes to stderr; answers have the descriptor to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    run = {"transformers": transformers_rounds, "vllm": vllm_rounds}[settings["backend"]](settings)
    _say(answers, {"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        tokens = run(asked["prompts"], asked["samples"], asked["tokens"])
        _say(answers, {"tokens": tokens, "wall_s": time.perf_counter() - started})


def transformers_rounds(settings: dict) -> Round:
    """Batches of as many rows as ours, prompts of similar length together, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.bfloat16).to(device).eval()

    @torch.no_grad()
    def run(prompts: Sequence[Sequence[int]], samples: int, tokens: int) -> int:
        rows = sorted((prompt for prompt in prompts for _ in range(samples)), key=len)
        made = 0
        for start in range(0, len(rows), settings["rows"]):
            batch = rows[start : start + settings["rows"]]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
            out = model.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), do_sample=True, temperature=1.0, top_k=0,
                top_p=1.0, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0,
            )  # fmt: skip
            made += out[:, width:].numel()
        return made

    return run


def vllm_rounds(settings: dict) -> Round:
    """All requests at once; vLLM orders them itself."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if settings["threads"]:
        os.environ["OMP_NUM_THREADS"] = str(settings["threads"])
    import torch
    from vllm import LLM, SamplingParams

    size = (
        {"gpu_memory_utilization": settings["gpu_share"]}
        if torch.cuda.is_available()
        else {"kv_cache_memory_bytes": 1 << 30, "block_size": 32}
    )
    llm = LLM(
        model=settings["folder"], skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=settings["rows"], **size
    )

    def run(prompts: Sequence[Sequence[int]], samples: int, tokens: int) -> int:
        sampling = SamplingParams(
            n=samples, temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        outs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], sampling, use_tqdm=False)
        return sum(len(one.token_ids) for out in outs for one in out.outputs)

    return run


def _say(answers: TextIO, body: dict) -> None:
    answers.write(json.dumps(body) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
