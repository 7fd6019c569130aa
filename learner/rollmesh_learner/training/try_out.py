"""Asks a trained model a question: ``python -m rollmesh_learner.training.try_out CHECKPOINT QUESTION``, a child.

The checkpoint is loaded with ``transformers`` alone, as anybody would who gets the folder. The most likely answer is
printed as one JSON line, ``{"parameters": ..., "answer": ...}``. Nothing of ours is used, no code of the folder runs.
"""

from __future__ import annotations

import json
import sys
from typing import Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS: Final = 16


def answer(checkpoint: str, question: str) -> tuple[int, str]:
    """The number of parameters and the answer's text."""
    torch.set_num_threads(1)  # one short answer: threads would only wait for each other
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True, use_safetensors=True)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer(str(text), add_special_tokens=False, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    fresh = output[0, prompt["input_ids"].shape[1] :]
    return model.num_parameters(), str(tokenizer.decode(fresh, skip_special_tokens=True)).strip()


if __name__ == "__main__":
    parameters, text = answer(sys.argv[1], sys.argv[2])
    sys.stdout.write(json.dumps({"parameters": parameters, "answer": text}) + "\n")
