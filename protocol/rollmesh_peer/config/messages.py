"""What is wrong with a configuration, in sentences: the source, the dotted key, what was wanted and what was found."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from rollmesh_peer.config.section import Section, shape_of, walk

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_WANTED: Final[dict[str, str]] = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text in quotes",
    "path_type": "must be a path in quotes",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "literal_error": "must be one of {expected}",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
}
_SHOWN_CHARS: Final = 60
"""Characters of a wrong value that are repeated to its author."""


def explain(error: ValidationError, *, model: type[Section], origins: Mapping[tuple[str, ...], str]) -> list[str]:
    """One sentence for each problem that pydantic found."""
    return [_sentence(detail, model=model, origins=origins) for detail in error.errors(include_url=False)]


def unknown_key(keys: tuple[str, ...], *, section: type[Section], model: type[Section], origin: str) -> str:
    """The sentence for a key that ``section`` does not have, with the nearest one that there is."""
    dotted = ".".join(keys)
    near = difflib.get_close_matches(keys[-1], section.model_fields, n=1, cutoff=0.6)
    if near:
        return f"{origin}: there is no setting {dotted}; did you mean {'.'.join((*keys[:-1], near[0]))}?"
    everywhere = {".".join(path): path[-1] for path, _ in walk(model) if "[]" not in path}
    elsewhere = difflib.get_close_matches(keys[-1], list(everywhere.values()), n=1, cutoff=0.8)
    if elsewhere:
        place = next(where for where, name in everywhere.items() if name == elsewhere[0])
        return f"{origin}: there is no setting {dotted}; did you mean {place}?"
    return f"{origin}: there is no setting {dotted}; known here: {', '.join(section.model_fields)}"


def _sentence(detail: ErrorDetails, *, model: type[Section], origins: Mapping[tuple[str, ...], str]) -> str:
    keys = tuple(str(part) for part in detail["loc"] if part != "[key]")
    origin = next(origins[keys[:length]] for length in range(len(keys), -1, -1) if keys[:length] in origins)
    dotted = ".".join(keys)
    kind = detail["type"]
    if kind == "extra_forbidden":
        return unknown_key(keys, section=_section_at(model, keys[:-1]), model=model, origin=origin)
    if kind == "missing":
        return f"{origin}: {dotted} is missing: {_description(model, keys)}"
    if kind == "value_error":
        return ": ".join(part for part in (origin, dotted, str(detail["ctx"]["error"])) if part)
    context = {name: _plain(value) for name, value in detail.get("ctx", {}).items()}
    wanted = _WANTED[kind].format(**context) if kind in _WANTED else detail["msg"].lower()
    return f"{origin}: {dotted} {wanted}, not {_shown(detail['input'])}"


def _section_at(model: type[Section], keys: tuple[str, ...]) -> type[Section]:
    """The section that ``keys`` lead to; indices into lists of tables are passed over."""
    for key in keys:
        field = model.model_fields.get(key)
        model = (shape_of(field).section if field is not None else None) or model
    return model


def _description(model: type[Section], keys: tuple[str, ...]) -> str:
    field = _section_at(model, keys[:-1]).model_fields[keys[-1]]
    return field.description or "it has no default"


def _plain(value: object) -> object:
    """``1.0`` as ``1``: bounds read as they are written in a file."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
