"""Asks a trained model: ``python -m rollmesh_learner.training.try_out CHECKPOINT QUESTION...``, a child process.

The checkpoint is loaded with ``transformers`` alone, as anybody would who gets the folder. The most likely answers are
printed as one JSON line, ``{"parameters": ..., "answers": [...]}``. Nothing of ours is used; no code of it runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS: Final = 16


def ask(checkpoint: str, questions: Sequence[str]) -> tuple[int, list[str]]:
    """The number of parameters, and one answer for each question."""
    torch.set_num_threads(1)  # short answers: threads would only wait for each other
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True, use_safetensors=True)
    texts = [
        str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
            )
        )
        for question in questions
    ]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    prompts = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**prompts, max_new_tokens=NEW_TOKENS, do_sample=False)
    fresh = output[:, prompts["input_ids"].shape[1] :]
    answers = tokenizer.batch_decode(fresh, skip_special_tokens=True)
    return model.num_parameters(), [str(answer).strip() for answer in answers]


if __name__ == "__main__":
    parameters, said = ask(sys.argv[1], sys.argv[2:])
    sys.stdout.write(json.dumps({"parameters": parameters, "answers": said}) + "\n")
