"""MessagePack in and out, with every bound set here. The only module that sees untyped values.

``unpack`` yields plain maps whose keys are strings and whose sequences are tuples; :mod:`rollmesh_protocol.messages`
turns them into frozen models. Refused here: messages over their limit, trailing bytes, deep nesting, extension types,
duplicate keys, keys that are not strings, NaN and infinities.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused

Value = None | bool | int | float | str | bytes | Sequence["Value"] | Mapping[str, "Value"]
"""What a message may be made of."""


def pack(value: Value) -> bytes:
    """The one encoding of ``value``: maps keep their order, floats are 64-bit, bytes and text stay apart."""
    packed = msgpack.packb(value, use_bin_type=True)
    if not isinstance(packed, bytes):
        raise TypeError("msgpack gave no bytes")
    return packed


def unpack(message: bytes, *, limit: int, items: int = limits.MAX_ITEMS) -> dict[str, Any]:
    """The map in ``message``, at most ``limit`` bytes long and of at most ``items`` values, inner ones included.

    Raises:
        Refused: ``request.too_large`` over the limit, ``request.invalid`` for anything that is not one clean map.
    """
    if len(message) > limit:
        raise Refused("request.too_large", f"a message of {len(message)} bytes, where {limit} are allowed")
    _check_shape(message, items=items)
    unpacker = msgpack.Unpacker(
        use_list=False,
        raw=False,
        strict_map_key=True,
        max_buffer_size=max(limit, 1),
        max_array_len=limits.MAX_ARRAY,
        max_map_len=limits.MAX_ARRAY,
        max_ext_len=0,
        max_bin_len=limit,
        max_str_len=limit,
        object_pairs_hook=_unique_text_keys,
        ext_hook=_refuse_extension,
    )
    try:
        unpacker.feed(message)
        value = unpacker.unpack()
        end = unpacker.tell()
    except Refused:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise Refused("request.invalid", "the message is not clean MessagePack") from error
    if end != len(message):
        raise Refused("request.invalid", f"{len(message) - end} bytes after the end of the message")
    if not isinstance(value, dict):
        raise Refused("request.invalid", "the message is not a map")
    _refuse_odd_floats(value)
    return value


def _check_shape(message: bytes, *, items: int) -> None:  # noqa: PLR0912 - one branch a kind of header
    """Refuse too many values, or too many containers open at one time, by a walk over the headers alone.

    The unpacker itself goes 1,024 levels deep, and builds an object for each byte of a message full of zeros.
    """
    open_items: list[int] = []
    position, end, seen = 0, len(message), 0
    while position < end:
        seen += 1
        if seen > items:
            raise Refused("request.too_large", f"a message of more than {items} values")
        lead = message[position]
        position += 1
        inner = -1
        if lead <= 0x7F or lead >= 0xE0 or lead in (0xC0, 0xC2, 0xC3):
            pass
        elif lead <= 0x8F:
            inner = 2 * (lead & 0x0F)
        elif lead <= 0x9F:
            inner = lead & 0x0F
        elif lead <= 0xBF:
            position += lead & 0x1F
        elif lead in _LENGTH_BYTES:
            width, kind = _LENGTH_BYTES[lead]
            size = int.from_bytes(message[position : position + width], "big")
            position += width
            if kind == _BLOB:
                position += size
            else:
                inner = size * kind
        else:
            position += _FIXED_BYTES.get(lead, 0)
        if inner >= 0:
            open_items.append(inner)
            if len(open_items) > limits.MAX_NESTING:
                raise Refused("request.invalid", f"a message nested deeper than {limits.MAX_NESTING} levels")
        elif open_items:
            open_items[-1] -= 1
        while open_items and open_items[-1] <= 0:
            open_items.pop()
            if open_items:
                open_items[-1] -= 1


_BLOB = 0
_LENGTH_BYTES = {
    0xC4: (1, _BLOB), 0xC5: (2, _BLOB), 0xC6: (4, _BLOB),
    0xC7: (1, _BLOB), 0xC8: (2, _BLOB), 0xC9: (4, _BLOB),
    0xD9: (1, _BLOB), 0xDA: (2, _BLOB), 0xDB: (4, _BLOB),
    0xDC: (2, 1), 0xDD: (4, 1),
    0xDE: (2, 2), 0xDF: (4, 2),
}  # fmt: skip
"""Lead byte -> (bytes of the length that follows, items per counted entry or 0 for a run of bytes)."""
_FIXED_BYTES = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
                0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}  # fmt: skip
"""Lead byte -> bytes of the scalar that follows."""


def _unique_text_keys(pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise Refused("request.invalid", "a map key that is not text")
        if key in mapping:
            raise Refused("request.invalid", f"the key {key[:40]!r} twice in one map")
        mapping[key] = value
    return mapping


def _refuse_extension(code: int, _content: bytes) -> None:
    raise Refused("request.invalid", f"an extension type ({code})")


def _refuse_odd_floats(value: object) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Refused("request.invalid", "a number that is not finite")
    elif isinstance(value, dict):
        for inner in value.values():
            _refuse_odd_floats(inner)
    elif isinstance(value, tuple):
        for inner in value:
            _refuse_odd_floats(inner)
