"""What a section of a config file is: a frozen, strict model whose fields explain themselves.

A field's description is the docstring under it; its unit is a :class:`Unit` in its annotation::

    class Leases(Section):
        max_duration_s: Annotated[float, Unit("seconds"), Field(gt=0, le=3600)] = 600.0
        \"\"\"The longest time that a node may keep a lease.\"\"\"

Unknown keys are refused, values are never coerced, and nothing changes after loading. A contract test holds that every
field has a description and every number a unit.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")
M = TypeVar("M")


class Section(BaseModel):
    """The base of every config model."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def to(self, kind: type[D], **others: object) -> D:
        """A component's own dataclass, from the settings that have its fields' names and from ``others``."""
        settings = {name: getattr(self, name) for name in type(self).model_fields}
        wanted = {field.name for field in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in settings.items() if name in wanted}, **others)


@dataclass(frozen=True, slots=True)
class Unit:
    """What a number counts, in words: ``Unit("seconds")``."""

    name: str


@dataclass(frozen=True, slots=True)
class Located:
    """Marks a text or path that names a place: a relative one starts at the folder of the file that holds it.

    Text that begins with one of ``unless`` names something else (such as ``hub:``) and is left alone.
    """

    unless: tuple[str, ...] = ()

    def resolve(self, text: str, *, folder: Path) -> str:
        """The absolute place that ``text`` names when it is written in ``folder``."""
        if not text or text.startswith(self.unless):
            return text
        return str((folder / Path(text).expanduser()).absolute())


@dataclass(frozen=True, slots=True)
class Shape:
    """The type of one field, as far as a config file is concerned."""

    annotation: object
    kind: Literal["text", "integer", "number", "flag", "list", "table", "tables", "other"]
    section: type[Section] | None = None
    """The model of a table or of each table in a list."""
    choices: tuple[str, ...] = ()
    """The values of a field that takes one of a few words."""


_SCALARS: dict[object, Literal["text", "integer", "number", "flag", "table"]] = {
    str: "text",
    Path: "text",
    int: "integer",
    float: "number",
    bool: "flag",
    dict: "table",
}


def shape_of(field: FieldInfo) -> Shape:
    """The shape of a field, looking through ``Annotated`` and ``... | None``."""
    return _shape(field.annotation)


def _shape(annotation: object) -> Shape:
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return _shape(get_args(annotation)[0])
    if origin in {Union, types.UnionType}:
        rest = [part for part in get_args(annotation) if part is not types.NoneType]
        return _shape(rest[0]) if len(rest) == 1 else Shape(annotation, "other")
    if origin is Literal:
        words = get_args(annotation)
        text = all(isinstance(word, str) for word in words)
        return Shape(annotation, "text" if text else "other", choices=tuple(map(str, words)))
    if origin is tuple:
        item = _shape(get_args(annotation)[0])
        return Shape(annotation, "tables" if item.section else "list", section=item.section)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Shape(annotation, "table", section=annotation)
    return Shape(annotation, _SCALARS.get(origin or annotation, "other"))


def marker(field: FieldInfo, kind: type[M]) -> M | None:
    """The field's annotation marker of this class, such as its :class:`Unit`, if it has one."""
    return next((item for item in field.metadata if isinstance(item, kind)), None)


def walk(model: type[Section], *, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every field below ``model`` with its dotted path, tables before what they hold; a list of tables is ``[]``."""
    for name, field in model.model_fields.items():
        path = (*at, name)
        yield path, field
        shape = shape_of(field)
        if shape.section is not None:
            yield from walk(shape.section, at=(*path, "[]") if shape.kind == "tables" else path)
