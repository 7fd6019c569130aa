"""Agreeing on what a new stream speaks: multistream-select 1.0, with a bound on every name.

The library's negotiation reads a name of any length, ends the host on one that is not UTF-8, and puts a deadline around
writes. Ours reads ``MAX_NAME_BYTES`` and takes one round trip.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from libp2p.abc import INetStream

from rollmesh_protocol.errors import LinkLost, Refused

MULTISTREAM: Final = "/multistream/1.0.0"
MAX_NAME_BYTES: Final = 256
_MAX_ATTEMPTS: Final = 4
"""Protocols that a peer may try on one stream."""
_NOT_AVAILABLE: Final = "na"


async def propose(stream: INetStream, protocol: str) -> None:
    """Ask the other side to speak ``protocol`` on ``stream``.

    Raises:
        Refused: ``version.unsupported`` when it does not.
        LinkLost: it answered something else. (A broken stream raises the library's own errors.)
    """
    await stream.write(_encode(MULTISTREAM) + _encode(protocol))
    if await _read_name(stream) != MULTISTREAM:
        raise LinkLost("the other side does not negotiate protocols")
    answer = await _read_name(stream)
    if answer == _NOT_AVAILABLE:
        raise Refused("version.unsupported", f"the other side does not speak {protocol}")
    if answer != protocol:
        raise LinkLost(f"the other side answered {answer!r} instead of {protocol!r}")


async def choose(stream: INetStream, known: Container[str]) -> str | None:
    """Answer the other side's proposals; the protocol agreed on, or None when it proposed none that we speak.

    Raises:
        Refused: ``request.invalid`` for anything that is not multistream-select.
    """
    await stream.write(_encode(MULTISTREAM))
    if await _read_name(stream) != MULTISTREAM:
        raise Refused("request.invalid", "the stream does not begin with multistream-select")
    for _ in range(_MAX_ATTEMPTS):
        name = await _read_name(stream)
        if name in known:
            await stream.write(_encode(name))
            return name
        await stream.write(_encode(_NOT_AVAILABLE))
    return None


def _encode(name: str) -> bytes:
    line = name.encode() + b"\n"
    length = len(line)
    prefix = bytes([length]) if length < 0x80 else bytes([length & 0x7F | 0x80, length >> 7])
    return prefix + line


async def _read_name(stream: INetStream) -> str:
    low = await _read_exactly(stream, 1)
    length = low[0]
    if length & 0x80:
        high = await _read_exactly(stream, 1)
        length = length & 0x7F | high[0] << 7
    if not 0 < length <= MAX_NAME_BYTES:
        raise Refused("request.invalid", f"a protocol name of {length} bytes")
    line = await _read_exactly(stream, length)
    if not line.endswith(b"\n"):
        raise Refused("request.invalid", "a protocol name without its end")
    try:
        return line[:-1].decode()
    except UnicodeDecodeError as error:
        raise Refused("request.invalid", "a protocol name that is not text") from error


async def _read_exactly(stream: INetStream, n: int) -> bytes:
    line = bytearray()
    while len(line) < n:
        line += await stream.read(n - len(line))
    return bytes(line)
