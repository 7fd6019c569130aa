"""Frames between a daemon and its child: a big-endian uint32 length, then one msgpack map.

Both sides use this file, so it imports neither trio nor torch and does no I/O. The invariant: no frame longer than
:data:`rollmesh_protocol.limits.CHILD_FRAME_BYTES` is made or allocated for, and a frame that decodes is a map with
text keys and a known ``kind``. It is not a protocol between peers: both ends are the same installed program.

    daemon -> child   call {id, verb, body}     cancel {id}     note {id, verb, body}
    child -> daemon   ready {}                  result {id, body}    item {id, body}    end {id}
                      error {id, code, detail}

A note is said to the call ``id`` while it is in progress and has no answer. One that comes after the call's end is
dropped, and more than :data:`rollmesh_protocol.limits.CHILD_NOTES` that nobody takes are an error on either side.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

import msgpack

from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed

Body = dict[str, object]
"""What travels: text keys; values of msgpack's plain types (bytes stay bytes, arrays become lists)."""

CALL: Final = "call"
CANCEL: Final = "cancel"
NOTE: Final = "note"
READY: Final = "ready"
RESULT: Final = "result"
ITEM: Final = "item"
END: Final = "end"
ERROR: Final = "error"
KINDS: Final = frozenset({CALL, CANCEL, NOTE, READY, RESULT, ITEM, END, ERROR})

HEADER: Final = struct.Struct(">I")
GARBAGE: Final = "child.garbage"
"""The code of a frame that does not decode."""


def pack(kind: str, call_id: int, fields: Mapping[str, object] | None = None) -> bytes:
    """One whole frame, header included. Raises ``ChildFailed`` when it is too large or holds what msgpack cannot."""
    frame: Body = {"kind": kind, "id": call_id, **(fields or {})}
    try:
        payload: bytes = msgpack.packb(frame, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ChildFailed(f"a {kind} frame cannot be written as msgpack: {error}", code="child.frame") from error
    if len(payload) > limits.CHILD_FRAME_BYTES:
        raise ChildFailed(
            f"a {kind} frame of {len(payload)} bytes is larger than {limits.CHILD_FRAME_BYTES}", code="child.frame"
        )
    return HEADER.pack(len(payload)) + payload


def payload_length(header: bytes) -> int:
    """Bytes that follow a 4-byte header. Raises ``ChildFailed`` beyond the limit, before anything is allocated."""
    length: int = HEADER.unpack(header)[0]
    if not 0 < length <= limits.CHILD_FRAME_BYTES:
        raise ChildFailed(f"the pipe does not hold a frame (its length would be {length} bytes)", code=GARBAGE)
    return length


def unpack(payload: bytes) -> Body:
    """The map of one payload. Raises ``ChildFailed`` for anything that :func:`pack` does not make."""
    try:
        frame: object = msgpack.unpackb(payload, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ChildFailed(f"the pipe does not hold msgpack: {error}", code=GARBAGE) from error
    kind = frame.get("kind") if isinstance(frame, dict) else None
    if (
        not isinstance(frame, dict)
        or not isinstance(kind, str)
        or kind not in KINDS
        or type(frame.get("id")) is not int
    ):
        raise ChildFailed("the pipe holds something that is not a frame", code=GARBAGE)
    return frame


def body_of(frame: Body) -> Body:
    """The ``body`` of a call, note, result or item. Raises ``ChildFailed`` when it is not a map with text keys."""
    body = frame.get("body")
    if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
        raise ChildFailed("the body of a frame is not a map with text keys", code=GARBAGE)
    return body
