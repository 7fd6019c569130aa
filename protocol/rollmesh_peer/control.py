"""The control socket: how a daemon answers, and obeys, its owner on the same machine.

A Unix socket of mode 0600 in a folder of mode 0700. It speaks the frames of the mesh (a big-endian uint32 length, then
one record): a :class:`StatusRequest` or an :class:`OwnerRequest` in, a :class:`StatusAnswer` out, one pair for each
connection. The invariants: only the user who runs the daemon gets in, orders are taken here and never over the mesh,
every wait has a deadline, and a socket that a dead daemon left behind is replaced while one that somebody answers on
is not.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import trio

from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError, LinkLost, Refused
from rollmesh_protocol.status import StatusAnswer, StatusRequest

SOCKET_MODE: Final = 0o600
CONTROL_S: Final = 3.0
"""Deadline of a whole exchange between two processes of one machine."""
PROBE_S: Final = 1.0
"""A daemon that lives accepts within microseconds; one that is stopped still has its kernel's backlog."""
BACKLOG: Final = 16

_log = logging.getLogger(__name__)

Answer = Callable[[StatusRequest], StatusAnswer]
Order = Literal["pause", "resume"]
Obey = Callable[[Order], None]
"""Takes an order of the owner. What comes of it is seen in the status."""


class OwnerRequest(StatusRequest):
    """A status, after an order where there is one."""

    order: Order | None = None


def _obeys_nobody(order: Order) -> None:
    raise Refused("request.unknown", f"this daemon cannot {order}")


async def serve_control(
    path: Path,
    answer: Answer,
    obey: Obey = _obeys_nobody,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer and obey on ``path`` until cancelled; ``task_status.started()`` is called once the socket listens.

    ``path`` is one of :func:`rollmesh_peer.folders.control_socket`, whose folder is private to the user.

    Raises:
        HostError: another daemon answers there, or the socket cannot be made.
    """

    async def exchange(stream: trio.SocketStream) -> None:
        await _exchange(stream, answer, obey)

    with await _listen(path) as listening:
        listener = trio.SocketListener(listening)
        try:
            made = path.stat().st_ino
            task_status.started()
            await trio.serve_listeners(exchange, [listener])
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == made:
                    path.unlink()


async def ask_control(path: Path, request: StatusRequest, *, timeout_s: float = CONTROL_S) -> StatusAnswer:
    """The answer of the daemon behind ``path``.

    Raises:
        LinkLost: nobody listens there, or no whole answer came in time.
    """
    try:
        with trio.fail_after(timeout_s):
            async with await trio.open_unix_socket(str(path)) as stream:
                await _send(stream, request.encode())
                message = await _receive(stream, limit=limits.STATUS_BYTES)
    except trio.TooSlowError as error:
        raise LinkLost(f"the daemon behind {path} did not answer within {timeout_s:g} s") from error
    except (OSError, trio.BrokenResourceError) as error:
        raise LinkLost(f"no daemon answers at {path}") from error
    return StatusAnswer.decode(message, limit=limits.STATUS_BYTES)


async def _listen(path: Path) -> trio.socket.SocketType:
    if not hasattr(socket, "AF_UNIX"):  # pragma: no cover
        raise HostError("this system has no Unix sockets")
    await _clear(path)
    listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        await listening.bind(str(path))
        path.chmod(SOCKET_MODE)  # before listening: until then nobody can connect
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise HostError(f"another rollmesh daemon already answers at {path}") from error
        raise HostError(f"the control socket {path} cannot be made: {error.strerror or error}") from error
    return listening


async def _clear(path: Path) -> None:
    """Take away a socket that nobody listens on."""
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_socket():
        raise HostError(f"{path} is in the way of the control socket: move it away")
    try:
        with trio.move_on_after(PROBE_S):
            stream = await trio.open_unix_socket(str(path))
            await stream.aclose()
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return
    raise HostError(f"another rollmesh daemon already answers at {path}")


async def _exchange(stream: trio.SocketStream, answer: Answer, obey: Obey) -> None:
    """One request and its answer. The boundary: what one caller does wrong ends its connection and nothing else."""
    try:
        with trio.move_on_after(CONTROL_S):
            async with stream:
                if not _is_own_user(stream):
                    return
                request = OwnerRequest.decode(
                    await _receive(stream, limit=limits.SMALL_BYTES), limit=limits.SMALL_BYTES
                )
                if request.order is not None:
                    obey(request.order)
                await _send(stream, answer(StatusRequest(page=request.page)).encode())
    except (Refused, LinkLost, OSError, trio.BrokenResourceError) as error:
        _log.debug("a caller of the control socket left or spoke nonsense: %s", error)
    except Exception:  # noqa: BLE001 - the status is for looking at: a bug in it must not end the daemon
        _log.exception("the status cannot be told")


def _is_own_user(stream: trio.SocketStream) -> bool:
    """The folder's mode keeps others out already; Linux also tells who is there."""
    if not sys.platform.startswith("linux"):
        return True
    credentials = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    user = int.from_bytes(credentials[4:8], sys.byteorder)
    return user in (os.getuid(), 0)


async def _send(stream: trio.abc.SendStream, message: bytes) -> None:
    await stream.send_all(len(message).to_bytes(limits.FRAME_HEADER_BYTES, "big") + message)


async def _receive(stream: trio.abc.ReceiveStream, *, limit: int) -> bytes:
    length = int.from_bytes(await _read_exactly(stream, limits.FRAME_HEADER_BYTES), "big")
    if length > limit:
        raise Refused("request.too_large", f"a frame of {length} bytes, where {limit} are allowed")
    return await _read_exactly(stream, length)


async def _read_exactly(stream: trio.abc.ReceiveStream, count: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < count:
        piece = await stream.receive_some(count - len(pieces))
        if not piece:
            raise LinkLost("the connection ended inside a frame")
        pieces += piece
    return bytes(pieces)
