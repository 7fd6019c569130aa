"""A model of 100,000 parameters made from a seed, in a folder as any other model: the whole stack runs in seconds.

A llama of 2 layers with random bf16 weights and a byte-level tokenizer whose ids are bytes, with SmolLM2's chat
markers. It is written with numpy and json alone, so a daemon's test need not load torch, and the bytes of the folder
depend on the seed alone. Its text is noise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

HIDDEN: Final = 64
LAYERS: Final = 2
HEADS: Final = 4
KEY_VALUE_HEADS: Final = 2
HEAD_SIZE: Final = 16
INTERMEDIATE: Final = 128
POSITIONS: Final = 2048
END_OF_TEXT: Final = 256
TURN_START: Final = 257
TURN_END: Final = 258
VOCABULARY: Final = 260
"""256 bytes, 3 markers, and one id that no text has; a multiple of 4 as most are."""
SPREAD: Final = 0.16
"""Standard deviation of matrices."""
EMBEDDING_SPREAD: Final = 0.25
"""Of the tied embedding: logits spread by about 2, and the last token does not outweigh what came before it."""
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MARKERS: Final = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": TURN_START, "<|im_end|>": TURN_END}


def prepare_tiny(folder: Path, *, seed: int = 0) -> Path:
    """Write the model folder and return it. Existing files of these names are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": TURN_START,
        "eos_token_id": TURN_END,
        "pad_token_id": END_OF_TEXT,
        "dtype": "bfloat16",
    }
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": [END_OF_TEXT, TURN_END]})
    _write_json(folder / "tokenizer.json", tokenizer())
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (folder / "model.safetensors").write_bytes(safetensors(random_weights(seed)))
    return folder


def random_weights(seed: int) -> dict[str, NDArray[np.uint16]]:
    """Return the weights by name, sorted by name, as the bits of bf16."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (KEY_VALUE_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (KEY_VALUE_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
            f"{prefix}mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    generator = np.random.Generator(np.random.PCG64(seed))
    weights = {}
    for name in sorted(shapes):
        spread = EMBEDDING_SPREAD if "embed" in name else SPREAD
        normal = generator.standard_normal(shapes[name]) * spread
        weights[name] = _bf16(1.0 + 0.1 * normal if len(shapes[name]) == 1 else normal)
    return weights


def safetensors(weights: dict[str, NDArray[np.uint16]]) -> bytes:
    """Return a safetensors file of bf16 tensors: an 8-byte length, a JSON table, the bytes."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, bits in weights.items():
        table[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [start, start + bits.nbytes]}
        start += bits.nbytes
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    body = b"".join(bits.astype("<u2").tobytes() for bits in weights.values())
    return len(header).to_bytes(8, "little") + header + body


def tokenizer() -> dict[str, object]:
    """Return the object of the tokenizer.json: byte-level BPE without merges, so that ids 0 to 255 are bytes."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())} | _MARKERS
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number, "content": text, "special": True,
                "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            }
            for text, number in _MARKERS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip


def _byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in byte-level tokenizers (the GPT-2 table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _bf16(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; finite values only."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
