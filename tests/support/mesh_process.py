"""Starts ``tests.support.mesh_child`` and talks to it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import trio


class MeshProcess:
    """One child; ``address`` is where it listens."""

    def __init__(self, process, lines):
        self.process = process
        self._lines = lines

    async def hear(self):
        with trio.fail_after(20):
            while b"\n" not in self._lines:
                piece = await self.process.stdout.receive_some()
                if not piece:
                    raise RuntimeError(f"the child ended with status {await self.process.wait()}")
                self._lines += piece
        line, _, rest = bytes(self._lines).partition(b"\n")
        self._lines[:] = rest
        return json.loads(line)

    async def ask(self, line):
        await self.process.stdin.send_all(line.encode() + b"\n")
        return await self.hear()

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    async def kill(self):
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def mesh_process(number, *, port=0, dial=""):
    command = [sys.executable, "-m", "tests.support.mesh_child", str(number), str(port), dial]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None)
    child = MeshProcess(process, bytearray())
    try:
        child.hello = await child.hear()
        child.address = child.hello["address"]
        child.peer = child.hello["peer"]
        yield child
    finally:
        with trio.CancelScope(shield=True):
            child.go_on()
            await child.kill()
