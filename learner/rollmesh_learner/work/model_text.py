"""Text of a model folder: its tokenizer, its chat template and its stop tokens, without transformers and torch.

Importing ``AutoTokenizer`` loads torch (252 MB and seconds); the ``tokenizers`` package and a sandboxed jinja2 give
the same ids, which a test compares on a real model. One difference is on purpose: a template gets no clock
(transformers offers it ``strftime_now``), because a prompt must be the same whenever it is made.

Runs in the prompter child only. The model folder is the operator's choice, yet its template is code: it is run in
jinja2's immutable sandbox.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from rollmesh_protocol.environments.interface import Message
from rollmesh_protocol.errors import UsageError

TOKENIZER_FILE: Final = "tokenizer.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_FILE_BYTES: Final = 256 * 1024 * 1024
"""The largest tokenizer files in use are some 30 MB."""


class ModelText:
    """Turns messages into prompt ids and completion ids into text."""

    def __init__(self, folder: Path) -> None:
        """Raises ``UsageError`` when the folder holds no tokenizer, or its files are not what they should be."""
        raw_tokenizer = _read(folder / TOKENIZER_FILE)
        if raw_tokenizer is None:
            raise UsageError(f"{folder} holds no {TOKENIZER_FILE}")
        try:
            self._tokenizer = Tokenizer.from_buffer(raw_tokenizer)
        except Exception as error:
            raise UsageError(f"{folder / TOKENIZER_FILE} is no tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        settings = _read_json(folder / "tokenizer_config.json")
        config = _read_json(folder / "config.json")
        text_config = config.get("text_config")
        if isinstance(text_config, Mapping):
            config = {**text_config, **config}
        self._special = {name: text for name in SPECIAL_TOKENS if (text := _token_text(settings.get(name)))}
        template = _template_of(folder, settings)
        self._template = _compile(template, folder) if template else None
        self.stop_tokens = self._stops(_read_json(folder / "generation_config.json"), config, folder)
        size = config.get("vocab_size")
        self.vocabulary: int = size if isinstance(size, int) else self._tokenizer.get_vocab_size()
        """Width of the model's logits: token ids are below it, and some may have no text."""
        self.digest = hashlib.sha256(
            b"".join(len(part).to_bytes(8, "big") + part for part in (raw_tokenizer, (template or "").encode()))
        ).digest()
        """SHA-256 of tokenizer and template: equal digests make equal prompts."""

    def prompt(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """The text that the model continues, and its token ids. Raises ``UsageError`` when the template refuses."""
        if self._template is None:  # a base model: the texts themselves
            text = "\n\n".join(message["content"] for message in messages) + "\n"
            return text, list(self._tokenizer.encode(text).ids)
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except jinja2.TemplateError as error:
            raise UsageError(f"the model's chat template does not take these messages: {error}") from error
        return text, list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def texts(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """The text of each completion, without special tokens; an id that has no text is left out."""
        batch = [list(completion) for completion in completions]
        return list(self._tokenizer.decode_batch(batch, skip_special_tokens=True))

    def _stops(self, generation: Mapping[str, object], config: Mapping[str, object], folder: Path) -> tuple[int, ...]:
        """The ids that end an answer: the first of generation config, model config and tokenizer that names any."""
        named = self._tokenizer.token_to_id(self._special["eos_token"]) if "eos_token" in self._special else None
        for value in (generation.get("eos_token_id"), config.get("eos_token_id"), named):
            ids = value if isinstance(value, list) else [value]
            if all(isinstance(token, int) for token in ids) and ids:
                return tuple(sorted(set(ids)))
        raise UsageError(f"{folder} names no end-of-sequence token (eos_token_id)")


class _Generation(jinja2.ext.Extension):
    """Templates may mark the assistant's part with ``{% generation %}``; for a prompt it is the text inside."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _compile(template: str, folder: Path) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise UsageError(f"the chat template of {folder} is not valid: {error}") from error


def _to_json(value: object, indent: int | None = None, *, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    """As transformers has it: text as it is, where jinja2's own filter escapes it for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)


def _template_of(folder: Path, settings: Mapping[str, object]) -> str | None:
    """The template's own file, else the one in the tokenizer's settings, else none."""
    alone = _read(folder / TEMPLATE_FILE)
    if alone is not None:
        return alone.decode()
    inside = settings.get("chat_template")
    if isinstance(inside, list):  # several, by name
        named = {str(one.get("name")): one.get("template") for one in inside if isinstance(one, Mapping)}
        inside = named.get("default")
    return inside if isinstance(inside, str) else None


def _token_text(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read(path: Path) -> bytes | None:
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UsageError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    return path.read_bytes()


def _read_json(path: Path) -> dict[str, object]:
    """The object in a file; empty when there is none."""
    raw = _read(path)
    if raw is None:
        return {}
    try:
        value: object = json.loads(raw)
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds no JSON object")
    return value
