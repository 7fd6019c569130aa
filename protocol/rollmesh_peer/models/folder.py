"""A model folder in Hugging Face form, read without torch: what a daemon needs to know about a model.

Invariant: nothing here imports torch or transformers, and nothing in the folder is executed. A folder that names
remote code is refused.

    config.json             the architecture            model*.safetensors   the weights
    tokenizer.json          the tokenizer               chat_template.jinja  the chat template
    generation_config.json  the stop tokens

Not here: loading weights (:mod:`.loader`), turning another source into a folder (:mod:`.base`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused, UsageError

CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
GENERATION: Final = "generation_config.json"
PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
"""Weights that can run code while they load."""
_MAX_JSON_BYTES: Final = 64 * limits.MIB
"""More than any tokenizer of a known model (17 MB)."""

Json = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """One folder on disk. Its files are read when asked for."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> ModelFolder:
        """Return the folder at ``path``; raises ``UsageError`` or ``Refused`` when it is not a folder we would load."""
        if not path.is_dir():
            raise UsageError(f"there is no model folder at {path}")
        if not (path / CONFIG).is_file():
            raise UsageError(f"{path} has no {CONFIG}, so it is not a model folder")
        if not any(path.glob("*.safetensors")):
            pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
            if pickles:
                raise Refused(
                    "card.model",
                    f"{path} holds its weights as pickle ({pickles[0]}), which can run code when loaded; "
                    "convert them to safetensors first",
                )
            raise UsageError(f"{path} has no weights in safetensors form")
        folder = cls(path=path)
        for name in (CONFIG, TOKENIZER_CONFIG):
            refuse_remote_code(folder.read_json(name), where=f"{path / name}")
        return folder

    @property
    def config(self) -> Json:
        """The architecture, as in config.json."""
        return self.read_json(CONFIG)

    @property
    def tokenizer(self) -> Path:
        """The tokenizer.json, for the ``tokenizers`` library; raises ``UsageError`` when there is none."""
        path = self.path / TOKENIZER
        if not path.is_file():
            raise UsageError(f"{self.path} has no {TOKENIZER}")
        return path

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template, or None for a model without one."""
        path = self.path / CHAT_TEMPLATE
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = self.read_json(TOKENIZER_CONFIG).get("chat_template")
        return template if isinstance(template, str) else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of bos, eos, pad and unk as a chat template may use them, e.g. ``{"eos_token": "<|im_end|>"}``."""
        found = {}
        for name, value in self.read_json(TOKENIZER_CONFIG).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name in {"bos_token", "eos_token", "pad_token", "unk_token"} and isinstance(text, str):
                found[name] = text
        return found

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The token ids that end a completion, ascending: the generation config's, else the config's.

        Raises ``UsageError`` when neither names any: every completion would run to its length limit.
        """
        for name in (GENERATION, CONFIG):
            stop = self.read_json(name).get("eos_token_id")
            ids = [stop] if isinstance(stop, int) else stop if isinstance(stop, list) else []
            if ids and all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
                return tuple(sorted(set(ids)))
        raise UsageError(f"{self.path} names no eos_token_id in {GENERATION} or {CONFIG}")

    def read_json(self, name: str) -> Json:
        """Return the object in the file ``name``, empty when there is none; ``UsageError`` when it is not an object."""
        path = self.path / name
        if not path.is_file():
            return {}
        try:
            if path.stat().st_size > _MAX_JSON_BYTES:
                raise UsageError(f"{path} is too large")
            value = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise UsageError(f"{path} does not hold a JSON object")
        return cast(Json, value)


def refuse_remote_code(config: Json, *, where: str) -> None:
    """Raise ``Refused`` when a config asks for code of its own."""
    for key in ("auto_map", "custom_pipelines"):
        if config.get(key):
            raise Refused("card.model", f"{where} asks for code that comes with the model ({key}); it is never run")
