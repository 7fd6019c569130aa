"""A supervisor over real children: kill -9, hangs, failing preparation, pause and resume."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from rollmesh_peer.children.process import Child, ChildSpec
from rollmesh_peer.children.supervisor import Supervisor
from rollmesh_protocol.errors import ChildFailed

PROGRAM = """
import time
from rollmesh_peer.children.child import run_child
run_child({"load": lambda body: body, "hang": lambda body: time.sleep(600), "echo": lambda body: body})
"""


async def prepare(child: Child) -> None:
    await child.call("load", {}, deadline_s=10)


@asynccontextmanager
async def supervised(tmp_path: Path) -> AsyncIterator[Supervisor]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    supervisor = Supervisor(ChildSpec(name="test", argv=(sys.executable, str(program))), prepare, jitter=lambda: 0.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        yield supervisor
        nursery.cancel_scope.cancel()


async def test_kill_9_and_hang_are_survived(tmp_path: Path) -> None:
    async with supervised(tmp_path) as supervisor:
        async with supervisor.use(deadline_s=20) as child:
            assert supervisor.state == f"running, pid {child.pid}"
            os.kill(child.pid, signal.SIGKILL)
            reason = await child.wait_dead()
            assert "was killed (out of memory?)" in reason.detail
        async with supervisor.use(deadline_s=20) as second:
            assert second.pid != child.pid
            with pytest.raises(ChildFailed, match="did not answer"):
                await second.call("hang", {}, deadline_s=0.1)
        async with supervisor.use(deadline_s=20) as third:
            assert await third.call("echo", {"a": 1}, deadline_s=5) == {"a": 1}
        assert supervisor.restarts == 2


async def test_stop_ends_the_process_and_start_brings_another(tmp_path: Path) -> None:
    async with supervised(tmp_path) as supervisor:
        async with supervisor.use(deadline_s=20) as child:
            await supervisor.stop()
            assert child.returncode is not None
            assert supervisor.state == "stopped"
            with pytest.raises(ChildFailed, match="stopped by its daemon"):
                await child.call("echo", {}, deadline_s=5)
        with pytest.raises(ChildFailed, match="stopped"):
            async with supervisor.use(deadline_s=0.05):
                pass
        supervisor.start()
        async with supervisor.use(deadline_s=20) as child:
            assert await child.call("echo", {}, deadline_s=5) == {}
        assert supervisor.restarts == 0
