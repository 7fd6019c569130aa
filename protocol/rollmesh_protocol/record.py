"""The base of every wire type: frozen, strict, and closed to unknown fields.

A record is made from untyped values only through :meth:`Record.read`, which turns every mistake of a peer into one
:class:`~rollmesh_protocol.errors.Refused` that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from rollmesh_protocol import codec, limits
from rollmesh_protocol.errors import Refused


class Record(BaseModel):
    """A frozen value with validated fields. Unknown fields, wrong types and odd numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    max_items: ClassVar[int] = limits.MAX_ITEMS
    """Values in one encoded record, inner ones included."""

    @classmethod
    def read(cls, value: Mapping[str, Any], *, code: str = "request.invalid") -> Self:
        """The record in ``value``, or :class:`Refused` with ``code`` and the first field that is wrong."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the message"
            raise Refused(code, f"{cls.__name__}: {where[:80]}: {first['msg'][:200]}") from error

    @classmethod
    def decode(cls, message: bytes, *, limit: int, code: str = "request.invalid") -> Self:
        """The record in a MessagePack ``message`` of at most ``limit`` bytes."""
        return cls.read(codec.unpack(message, limit=limit, items=cls.max_items), code=code)

    def encode(self) -> bytes:
        """The record as MessagePack; fields in the order of their declaration."""
        return codec.pack(self.model_dump())
