"""The tiny model is a model like any other: the libraries read it, and its bytes depend on the seed alone."""

from __future__ import annotations

import hashlib

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollmesh_peer.models.folder import ModelFolder
from rollmesh_peer.testing import tiny_model


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_folder_depends_on_the_seed_alone(tmp_path):
    first, again, other = (
        digest(tiny_model.prepare_tiny(tmp_path / str(n), seed=seed)) for n, seed in enumerate((4, 4, 5))
    )
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_text_survives_the_tokenizer(tiny):
    tokenizer = Tokenizer.from_file(str(ModelFolder.open(tiny.folder).tokenizer))
    text = "<|im_start|>user\nWas ist 3 + 4? \u00e9\u20ac\U0001f600\t\n<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(ids) < tiny_model.VOCABULARY
    assert ids[0] == tiny_model.TURN_START
    assert ids[-1] == tiny_model.TURN_END


def test_transformers_loads_it_to_the_same_logits(tiny):
    theirs = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.bfloat16)
    ids = torch.arange(60)[None]
    assert torch.equal(theirs(ids).logits, tiny.bf16(ids).logits)


def test_its_chat_template_renders(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_it_is_neither_certain_nor_indifferent(tiny):
    logits = tiny.fp32(torch.arange(200)[None]).logits[0]
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert 0.5 < entropy.mean() < 5
