"""The frames of yamux, version 0: a header of 12 bytes, and data behind one kind of it."""

from __future__ import annotations

import struct
from typing import Final

PROTOCOL: Final = "/yamux/1.0.0"
VERSION: Final = 0

HEADER: Final = struct.Struct("!BBHII")
"""Version, kind, flags, stream, length (of data; otherwise a window delta, a ping's echo or a goodbye's code)."""

DATA: Final = 0
WINDOW: Final = 1
PING: Final = 2
GO_AWAY: Final = 3

SYN: Final = 1
ACK: Final = 2
FIN: Final = 4
RST: Final = 8


def frame(kind: int, flags: int, number: int, length: int) -> bytes:
    """The header of a frame of stream ``number`` (0 for the connection itself)."""
    return HEADER.pack(VERSION, kind, flags, number, length)
