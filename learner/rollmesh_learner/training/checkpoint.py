"""Checkpoints of a trainer: a model folder that anyone can load, and beside it what training needs to go on exactly.

    config.json, model.safetensors, tokenizer files    Hugging Face format, bfloat16 weights
    masters.safetensors                                float32 masters by parameter name
    optimiser.safetensors                              AdamW's moments by parameter name
    state.json                                         step, updates, random states, and what the caller wants carried

Invariant: a folder under its own name is complete and on the disk; an interrupted one has another name, and the next
save removes it. Nothing is pickled. Which checkpoint counts, and how many are kept, is the daemon's decision.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollmesh_protocol.errors import ChildFailed, HostError

MODEL: Final = "model.safetensors"
MASTERS: Final = "masters.safetensors"
OPTIMISER: Final = "optimiser.safetensors"
STATE: Final = "state.json"
NOT_WEIGHTS: Final = frozenset({MASTERS, OPTIMISER})
"""Files of tensors that a checkpoint has besides the model's."""
FORMAT: Final = 1
"""Of state.json; a reader refuses others."""
COPIED: Final = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "LICENSE",
)  # fmt: skip
"""What is taken over from the base model's folder where it is there."""
_PARTIAL: Final = ".partial-"
CODE: Final = "trainer.checkpoint"


class Source(Protocol):
    """What is saved: tensors on any device, by name."""

    def weights(self) -> Mapping[str, Tensor]: ...
    def masters(self) -> Mapping[str, Tensor]: ...
    def moments(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything of a checkpoint that is no tensor."""

    step: int
    """Steps that these weights are made of."""
    updates: int
    """How many of them changed the weights."""
    torch_random: bytes
    numpy_random: Mapping[str, object]
    carry: Mapping[str, object]
    """The caller's own counters; plain JSON values."""


def save(folder: Path, *, source: Source, state: State, model_folder: Path) -> None:
    """Write a checkpoint that appears as ``folder`` when it is complete.

    One of the same name is replaced; a kill between the two renames leaves neither, and the one before counts.

    Raises ``HostError`` when the disk does not take it, ``ChildFailed`` when ``state.carry`` is not plain JSON.
    """
    text = _encode(state)
    partial = folder.with_name(f"{_PARTIAL}{folder.name}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left_over in folder.parent.glob(f"{_PARTIAL}*"):
            shutil.rmtree(left_over)
        partial.mkdir()
        for name in COPIED:
            if (model_folder / name).is_file():
                shutil.copyfile(model_folder / name, partial / name)
        _write(partial / MODEL, source.weights())
        _write(partial / MASTERS, source.masters())
        _write(partial / OPTIMISER, source.moments())
        (partial / STATE).write_text(text, encoding="utf-8")
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        old = folder.with_name(f"{_PARTIAL}old-{folder.name}")
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        _sync(folder.parent)
        if old.exists():
            shutil.rmtree(old)
    except (OSError, SafetensorError) as error:
        raise HostError(f"the checkpoint {folder} cannot be written: {error}") from error


def load_state(folder: Path) -> State:
    """Read ``state.json``. Raises ``ChildFailed`` when it is missing or not what this version writes."""
    try:
        fields = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise ChildFailed(f"{folder} was written by another version of rollmesh", code=CODE)
        return State(
            step=int(fields["step"]),
            updates=int(fields["updates"]),
            torch_random=base64.b64decode(fields["torch_random"], validate=True),
            numpy_random=fields["numpy_random"],
            carry=fields["carry"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ChildFailed(f"{folder} is not a checkpoint: {error}", code=CODE) from error


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file into memory. Raises ``ChildFailed`` when it is missing or damaged."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise ChildFailed(f"{file} cannot be read: {error}", code=CODE) from error


def random_state(generator: np.random.Generator) -> tuple[bytes, Mapping[str, object]]:
    """Return the states of torch's default generator and of ``generator``."""
    return torch.get_rng_state().numpy().tobytes(), cast(Mapping[str, object], generator.bit_generator.state)


def restore_random(state: State, *, generator: np.random.Generator) -> None:
    """Put both generators where they were. Raises ``ChildFailed`` when their kind has changed."""
    try:
        torch.set_rng_state(torch.frombuffer(bytearray(state.torch_random), dtype=torch.uint8))
        generator.bit_generator.state = dict(state.numpy_random)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise ChildFailed(f"the checkpoint's random state does not fit: {error}", code=CODE) from error


def _encode(state: State) -> str:
    fields = {
        "format": FORMAT,
        "step": state.step,
        "updates": state.updates,
        "torch_random": base64.b64encode(state.torch_random).decode(),
        "numpy_random": state.numpy_random,
        "carry": state.carry,
    }
    try:
        return json.dumps(fields, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise ChildFailed(f"what the checkpoint should carry is not plain JSON: {error}", code=CODE) from error


def _write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    save_file(plain, file, metadata={"format": "pt"})


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
