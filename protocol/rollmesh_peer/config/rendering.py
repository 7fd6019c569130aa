"""A configuration as a TOML file that explains itself, and its surface as one flat table.

What is printed loads back to an equal configuration. Settings without a value are printed as comments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from rollmesh_peer.config.section import Section, Unit, marker, shape_of, walk

_WIDTH: Final = 100
"""Columns of a comment line, the leading hash included."""


def render_toml(config: Section, *, describe: bool = True) -> str:
    """The resolved configuration as TOML; with ``describe``, each setting under its description, unit and range."""
    lines: list[str] = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Section):
            lines += ["", *_header(field, describe=describe), f"[{name}]", *_settings(value, describe=describe)]
        elif shape_of(field).kind == "tables":
            lines += ["", *_header(field, describe=describe)]
            for table in value:
                lines += [f"[[{name}]]", *_settings(table, describe=describe), ""]
            lines = lines[:-1] if value else [*lines, f"# [[{name}]]"]
        else:
            lines += [*_comment(field, describe=describe), _setting(name, value)]
    return "\n".join(lines).strip() + "\n"


def surface(model: type[Section]) -> dict[str, str]:
    """Every setting by dotted name: its kind, measure and default. A contract test freezes it."""
    table: dict[str, str] = {}
    for path, field in walk(model):
        shape = shape_of(field)
        if shape.section is None:
            default = field.get_default(call_default_factory=True, validated_data={})
            ends = "required" if field.is_required() else f"default {_value(default)}"
            measure = _measure(field)
            table[".".join(path)] = f"{shape.kind} [{measure}], {ends}" if measure else f"{shape.kind}, {ends}"
    return table


def _settings(section: Section, *, describe: bool) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        yield from _comment(field, describe=describe)
        yield _setting(name, getattr(section, name))


def _setting(name: str, value: object) -> str:
    return f"# {name} is not set" if value is None else f"{name} = {_value(value)}"


def _header(field: FieldInfo, *, describe: bool) -> Iterator[str]:
    if describe and field.description:
        yield from _wrapped(field.description)


def _comment(field: FieldInfo, *, describe: bool) -> Iterator[str]:
    if describe:
        measure = _measure(field)
        yield from _wrapped(" ".join((field.description or "").split()) + (f" [{measure}]" if measure else ""))


def _measure(field: FieldInfo) -> str:
    """Unit, range and choices of a field, such as ``seconds, > 0, <= 3600``."""
    unit = marker(field, Unit)
    parts = [unit.name] if unit else []
    for item in field.metadata:
        match item:
            case Gt(gt=bound):
                parts.append(f"> {_bound(bound)}")
            case Ge(ge=bound):
                parts.append(f">= {_bound(bound)}")
            case Lt(lt=bound):
                parts.append(f"< {_bound(bound)}")
            case Le(le=bound):
                parts.append(f"<= {_bound(bound)}")
            case _:
                continue
    choices = shape_of(field).choices
    return ", ".join([*parts, *([" | ".join(choices)] if choices else [])])


def _bound(bound: object) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _wrapped(text: str) -> Iterator[str]:
    line = "#"
    for word in text.split():
        if len(line) + 1 + len(word) > _WIDTH and line != "#":
            yield line
            line = "#"
        line += f" {word}"
    yield line


def _value(value: object) -> str:
    """One TOML value."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str() | Path():
            # JSON escapes what TOML escapes, except for DEL.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case dict():
            inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case None:
            return "none"
        case _:
            raise TypeError(f"no TOML for {type(value).__name__}")


def _key(key: str) -> str:
    bare = key and all(character.isascii() and (character.isalnum() or character in "-_") for character in key)
    return key if bare else json.dumps(key, ensure_ascii=False).replace("\x7f", "\\u007f")
