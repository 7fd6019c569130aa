"""The engine child fed as the daemon feeds it: leases in it, some waiting there, and one more for each that ends."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import trio

from rollmesh_node.engine import pipe
from rollmesh_node.engine.backend import GroupRequest
from rollmesh_node.engine.pipe import Beat, Refusal, group_body
from rollmesh_node.engine.segments import Completion
from rollmesh_peer.children.launch import ChildSpec
from rollmesh_peer.children.process import Child
from rollmesh_peer.children.supervisor import Supervisor
from rollmesh_protocol.errors import ChildFailed

LOAD_S: Final = 900.0
ITEM_S: Final = 600.0
AHEAD: Final = 12
"""Groups in the engine at one time: with 8 samples each, a batch of 64 rows and half as many again waiting."""


@dataclass(frozen=True, kw_only=True)
class Fed:
    """One turn of work."""

    tokens: int
    wall_s: float

    @property
    def rate(self) -> float:
        return self.tokens / self.wall_s


async def feed(child: Child, requests: Sequence[GroupRequest], *, ahead: int = AHEAD) -> Fed:
    """Have everything generated; the clock stops with the last rollout."""
    started = ended = time.perf_counter()
    waiting = list(requests)
    left = {request.key: len(request.samples) for request in requests}
    tokens = 0
    async with child.stream("generate", {}, item_deadline_s=ITEM_S) as stream:
        first, waiting = waiting[:ahead], waiting[ahead:]
        stream.tell(pipe.ADD, {"requests": [group_body(request) for request in first]})
        if not waiting:
            stream.tell(pipe.FINISH, {})
        async for body in stream:
            done = pipe.read_item(body)
            if isinstance(done, Refusal):
                raise ChildFailed(done.detail, code=done.code)
            if not isinstance(done, Completion):
                continue
            ended = time.perf_counter()
            tokens += len(done.tokens)
            left[done.key] -= 1
            if not left[done.key] and waiting:
                stream.tell(pipe.ADD, {"requests": [group_body(waiting.pop(0))]})
                if not waiting:
                    stream.tell(pipe.FINISH, {})
    assert not any(left.values())
    return Fed(tokens=tokens, wall_s=ended - started)


async def until_drawing(stream) -> None:
    """Read until the engine says that it has drawn something since the first beat."""
    first: int | None = None
    async for body in stream:
        match pipe.read_item(body):
            case Beat(tokens=tokens) if first is None:
                first = tokens
            case Beat(tokens=tokens) if tokens == first:
                pass
            case _:
                return


async def restart(spec: ChildSpec, load: dict[str, object], request: GroupRequest, *, kills: int) -> dict:
    """Kill the engine while it generates; seconds until that is noticed, and until the next one's first rollout."""
    noticed, again, lives = [], [], []
    short = replace(request, samples=request.samples[:1], max_new_tokens=1)

    async def prepare(child: Child) -> None:
        await child.call("load", load, deadline_s=LOAD_S)

    supervisor = Supervisor(spec, prepare)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        for _ in range(kills):
            killed = 0.0
            async with supervisor.use(deadline_s=LOAD_S) as child:
                lives.append(child.pid)
                try:
                    async with child.stream("generate", {}, item_deadline_s=ITEM_S) as stream:
                        stream.tell(pipe.ADD, {"requests": [group_body(replace(request, max_new_tokens=400))]})
                        await until_drawing(stream)
                        killed = time.perf_counter()
                        os.kill(child.pid, signal.SIGKILL)
                        async for _body in stream:
                            pass
                except ChildFailed:
                    noticed.append(time.perf_counter() - killed)
            async with supervisor.use(deadline_s=LOAD_S) as child:
                await feed(child, [short])
                again.append(time.perf_counter() - killed)
                print(f"killed; generating again after {again[-1]:.1f} s", flush=True)
        assert len(set(lives)) == kills
        await supervisor.stop()
        nursery.cancel_scope.cancel()
    return {
        "kills": kills,
        "noticed_s": round(statistics.median(noticed), 3),
        "generating_s": [round(seconds, 2) for seconds in again],
        "generating_median_s": round(statistics.median(again), 2),
    }
