"""The control socket: private, replaced when it is stale, and not to be upset by whoever opens it."""

from __future__ import annotations

import contextlib
import socket
import stat
from pathlib import Path

import pytest
import trio

from rollmesh_peer.control import ask_control, serve_control
from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError, LinkLost
from rollmesh_protocol.status import StatusAnswer, StatusRequest
from tests.unit.status.samples import node_status

ANSWER = StatusAnswer(run=None, node=node_status())


def tell(request: StatusRequest) -> StatusAnswer:
    return ANSWER


async def test_a_question_is_answered_and_the_socket_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, tell)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for _ in range(3):
            assert await ask_control(path, StatusRequest(page=0)) == ANSWER
        nursery.cancel_scope.cancel()
    assert not path.exists()
    with pytest.raises(LinkLost, match="no daemon answers"):
        await ask_control(path, StatusRequest(page=0))


async def test_a_stale_socket_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, tell)
        with pytest.raises(HostError, match="another rollmesh daemon already answers"):
            await serve_control(path, tell)
        assert await ask_control(path, StatusRequest(page=0)) == ANSWER
        nursery.cancel_scope.cancel()


async def test_another_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    path.write_text("mine")
    with pytest.raises(HostError, match="in the way"):
        await serve_control(path, tell)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"\0",
        b"\0\0\0\4abcd",
        (limits.SMALL_BYTES + 1).to_bytes(4, "big"),
        b"\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n",
    ],
)
async def test_nonsense_ends_its_own_connection_only(tmp_path: Path, nonsense: bytes) -> None:
    path = tmp_path / "node.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, tell)
        async with await trio.open_unix_socket(str(path)) as stream:
            await stream.send_all(nonsense)
            await stream.send_eof()
            with trio.fail_after(5), contextlib.suppress(trio.BrokenResourceError):
                assert await stream.receive_some() == b""
        assert await ask_control(path, StatusRequest(page=0)) == ANSWER
        nursery.cancel_scope.cancel()


async def test_a_status_that_cannot_be_built_does_not_end_the_daemon(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"

    def fail(request: StatusRequest) -> StatusAnswer:
        if request.page:
            raise ZeroDivisionError
        return ANSWER

    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, fail)
        with pytest.raises(LinkLost):
            await ask_control(path, StatusRequest(page=1))
        assert await ask_control(path, StatusRequest(page=0)) == ANSWER
        nursery.cancel_scope.cancel()


async def test_a_daemon_that_is_stopped_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen(1)
        with pytest.raises(LinkLost, match=r"did not answer within 0\.05 s"):
            await ask_control(path, StatusRequest(page=0), timeout_s=0.05)
