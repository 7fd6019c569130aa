"""The owner's word: obeyed in order, kept over a restart, told in the status."""

from __future__ import annotations

from pathlib import Path

import trio
from trio.testing import wait_all_tasks_blocked

from rollmesh_node.pausing import OwnersPause
from rollmesh_peer.control import OwnerRequest, ask_control, serve_control
from rollmesh_protocol.status import StatusAnswer, StatusRequest
from tests.unit.status.samples import node_status


class Engines:
    """Stops when told that it may."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gone = trio.Event()

    async def stop(self) -> None:
        self.calls.append("stop")
        await self.gone.wait()

    def start(self) -> None:
        self.calls.append("start")


async def test_pause_is_done_when_the_engines_are_gone(tmp_path: Path) -> None:
    pause, engines = OwnersPause(tmp_path / "paused"), Engines()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: pause.carry_out(stop=engines.stop, start=engines.start))
        await wait_all_tasks_blocked()
        assert (pause.state, engines.calls) == ("", [])
        pause.obey("pause")
        pause.obey("pause")
        await wait_all_tasks_blocked()
        assert (pause.state, engines.calls) == ("pausing", ["stop"])
        assert OwnersPause(tmp_path / "paused").is_on  # a restart would find it
        engines.gone.set()
        await wait_all_tasks_blocked()
        assert pause.state == "paused"
        pause.obey("resume")
        await wait_all_tasks_blocked()
        assert (pause.state, engines.calls) == ("", ["stop", "start"])
        assert not OwnersPause(tmp_path / "paused").is_on
        nursery.cancel_scope.cancel()


async def test_a_change_of_mind_while_pausing_is_carried_out(tmp_path: Path) -> None:
    pause, engines = OwnersPause(tmp_path / "paused"), Engines()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: pause.carry_out(stop=engines.stop, start=engines.start))
        pause.obey("pause")
        await wait_all_tasks_blocked()
        pause.obey("resume")
        engines.gone.set()
        await wait_all_tasks_blocked()
        assert (pause.state, engines.calls) == ("", ["stop", "start"])
        nursery.cancel_scope.cancel()


async def test_orders_are_taken_by_the_control_socket_alone(tmp_path: Path) -> None:
    path, pause = tmp_path / "node.sock", OwnersPause(tmp_path / "paused")

    def answer(request: StatusRequest) -> StatusAnswer:
        return StatusAnswer(run=None, node=node_status(pause=pause.state))

    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, answer, pause.obey)
        assert (await ask_control(path, StatusRequest(page=0))).node.pause == ""
        assert (await ask_control(path, OwnerRequest(page=0, order="pause"))).node.pause == "paused"
        assert (await ask_control(path, StatusRequest(page=0))).node.pause == "paused"
        assert (await ask_control(path, OwnerRequest(page=0, order="resume"))).node.pause == ""
        nursery.cancel_scope.cancel()
