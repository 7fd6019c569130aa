"""From a TOML file, the environment and flags to one frozen model, or to sentences that say what is wrong.

Later sources win: the file, then variables such as ``ROLLMESH_LEARNER__TRAINING__LEARNING_RATE``, then
``--set training.learning_rate=1e-5``. Every value remembers where it came from, so that a refusal names the place.
"""

from __future__ import annotations

import datetime as dt
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rollmesh_peer.config.messages import explain, unknown_key
from rollmesh_peer.config.section import Located, Section, Shape, marker, shape_of
from rollmesh_protocol.errors import UsageError

C = TypeVar("C", bound=Section)
Origins = dict[tuple[str, ...], str]

MAX_FILE_BYTES: Final = 1024 * 1024
"""A config file is written by hand; a larger one is some other file."""


def load(
    model: type[C],
    *,
    path: Path | None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str],
    prefix: str,
) -> C:
    """The resolved configuration.

    ``overrides`` are ``section.key=value`` as given to ``--set``; ``environ`` is searched for names that begin with
    ``prefix`` and two underscores. Relative paths of the file start at the file's folder, those of overrides and
    variables at the current one. Without ``path`` the defaults are the file.

    Raises:
        UsageError: one line for each thing that is wrong, naming its source and its dotted key.
    """
    tree = _read(path) if path is not None else {}
    if path is not None:
        _locate(tree, model=model, folder=path.absolute().parent)
    origins: Origins = {(): str(path) if path is not None else "configuration"}
    problems: list[str] = []
    for origin, keys, text in [*_from_environ(environ, prefix=prefix), *_from_flags(overrides)]:
        try:
            _assign(tree, model=model, keys=keys, text=text, origin=origin)
        except UsageError as error:
            problems.append(error.detail)
        else:
            origins[keys] = origin
    try:
        loaded = model.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        problems += explain(error, model=model, origins=origins)
    else:
        if not problems:
            return loaded
    raise UsageError("\n".join(problems))


def _read(path: Path) -> dict[str, object]:
    """The file as plain dictionaries and lists of text, numbers and flags."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"{path}: is no config file: it has more than {MAX_FILE_BYTES} bytes")
    try:
        tree = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: is not TOML: {error}") from error
    _refuse_dates(tree, path=path)
    return tree


def _refuse_dates(value: object, *, path: Path) -> None:
    """TOML has dates and no setting takes one; JSON, which the models validate strictly, has none."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _refuse_dates(item, path=path)
    elif isinstance(value, dt.date | dt.time):
        raise UsageError(f"{path}: no setting takes a date or a time: put {value} in quotes")


def _locate(tree: dict[str, object], *, model: type[Section], folder: Path) -> None:
    """Make every located text of ``tree`` absolute, in place. What is not shaped as expected is left for the model."""
    for name, field in model.model_fields.items():
        value = tree.get(name)
        shape = shape_of(field)
        located = marker(field, Located)
        if located is not None and isinstance(value, str):
            tree[name] = located.resolve(value, folder=folder)
        elif shape.section is not None:
            for table in value if isinstance(value, list) else [value]:
                if isinstance(table, dict):
                    _locate(table, model=shape.section, folder=folder)


def _from_environ(environ: Mapping[str, str], *, prefix: str) -> list[tuple[str, tuple[str, ...], str]]:
    start = f"{prefix}__"
    names = sorted(name for name in environ if name.startswith(start))
    return [(name, tuple(name.removeprefix(start).lower().split("__")), environ[name]) for name in names]


def _from_flags(overrides: Sequence[str]) -> list[tuple[str, tuple[str, ...], str]]:
    flags = []
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not dotted.strip():
            raise UsageError(f"--set {override}: is not of the form section.key=value")
        flags.append((f"--set {dotted.strip()}", tuple(dotted.strip().split(".")), text.strip()))
    return flags


def _assign(tree: dict[str, object], *, model: type[Section], keys: tuple[str, ...], text: str, origin: str) -> None:
    """Write one override into ``tree``, following the model so that only known keys are made."""
    table, section, done = tree, model, 0
    while True:
        name = keys[done]
        if name not in section.model_fields:
            raise UsageError(unknown_key(keys[: done + 1], section=section, model=model, origin=origin))
        field = section.model_fields[name]
        shape = shape_of(field)
        done += 1
        if done == len(keys):
            table[name] = _value(text, field=field, shape=shape)
            return
        if shape.kind == "tables" and shape.section is not None:
            table = _element(table.get(name), index=keys[done], dotted=".".join(keys[:done]), origin=origin)
            section = shape.section
            done += 1
        elif shape.section is not None:
            table, section = _table(table, name=name), shape.section
        elif shape.kind == "table" and done == len(keys) - 1:
            _table(table, name=name)[keys[done]] = _toml(text)
            return
        else:
            raise UsageError(f"{origin}: {'.'.join(keys[:done])} is a single value, not a table")
        if done == len(keys):
            raise UsageError(f"{origin}: {'.'.join(keys)} is a table: name one of its keys")


def _table(tree: dict[str, object], *, name: str) -> dict[str, object]:
    """The table called ``name``, made where there is none yet."""
    found = tree.get(name)
    if not isinstance(found, dict):
        found = tree[name] = {}
    return found


def _element(tables: object, *, index: str, dotted: str, origin: str) -> dict[str, object]:
    """One table of a list of tables, by its index."""
    length = len(tables) if isinstance(tables, list) else 0
    if isinstance(tables, list) and index.isdecimal() and int(index) < length and isinstance(tables[int(index)], dict):
        element: dict[str, object] = tables[int(index)]
        return element
    raise UsageError(f"{origin}: {dotted} has {length} entries, counted from 0; there is no entry {index}")


def _value(text: str, *, field: FieldInfo, shape: Shape) -> object:
    """What an override's text stands for in this field: plain words need no quotes, lists may use commas."""
    if shape.kind == "text" and not text.startswith(('"', "'")):
        located = marker(field, Located)
        return located.resolve(text, folder=Path.cwd()) if located is not None else text
    if shape.kind == "list" and not text.startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    return _toml(text)


def _toml(text: str) -> object:
    """``text`` as a TOML value, or as itself where it is none: the model then says what it wanted."""
    try:
        tree = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value: object = tree["value"]
    dated = isinstance(value, dt.date | dt.time)
    return text if dated or len(tree) > 1 else value
