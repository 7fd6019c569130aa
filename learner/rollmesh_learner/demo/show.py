"""Runs one demo: starts the processes as people would, shows them until the learner is done, and sees everybody off.

Invariants: however it ends, no process that it started is left; and one that dies before its time ends the demo with
its name and its last words. It knows the order of things; how each is done is known to the modules beside it.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from rollmesh_learner.demo.plan import LEARNER, Plan
from rollmesh_learner.demo.processes import Member, start, stop
from rollmesh_learner.demo.watching import Scene, Watcher
from rollmesh_protocol.errors import ChildFailed

LOOK_S: Final = 1.0
"""Daemons build a status once a second."""
JOIN_S: Final = 600.0
"""The learner's start: the base model is converted, torch is imported twice."""
FAREWELL_S: Final = 30.0
"""After the learner nodes end by themselves: their engines are closed in a few seconds."""
NODE_STOP_S: Final = 45.0
"""A node gives its work back within 18 s and ends itself after 40."""
LEARNER_STOP_S: Final = 120.0
"""The step under way, and a checkpoint of it."""
LAST_LINES: Final = 12

JOIN_LINE: Final = re.compile(r"rollmesh node run --join (\S+)")

Tell = Callable[[Scene, str], None]
"""Shows a scene, and what the demo itself is doing."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The last that was known of everybody, and how long it took."""

    scene: Scene
    wall_s: float


class DiedEarly(ChildFailed):
    """A process of the demo ended before the run did."""

    def __init__(self, member: Member) -> None:
        super().__init__(f"{member.name} {member.fate} before the run was over. {_last_words(member)}")


class Show:
    """One demo. Await :meth:`run` inside :meth:`open`, which ends what was started."""

    def __init__(self, plan: Plan, *, tell: Tell, hurry: trio.Event, lock: int) -> None:
        self._plan = plan
        self._tell = tell
        self._hurry = hurry
        self._lock = lock
        self._watcher = Watcher(plan)
        self._members: dict[str, Member] = {}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """At the end of the block, and also when it is cancelled, every process is asked to stop and waited for."""
        try:
            yield
        finally:
            with trio.CancelScope(shield=True):
                await self._see_off()

    async def run(self) -> Ending:
        """From the first process to the last one's end.

        Raises:
            DiedEarly: a process ended before its time; ChildFailed: the learner does not come up.
            HostError: a process cannot be started.
        """
        started = trio.current_time()
        learner = await self._start(LEARNER, self._plan.learner_argv())
        join = await self._join_line(learner)
        for name in self._plan.nodes:
            await self._start(name, self._plan.node_argv(name, join=join))
        scene = await self._until_done(learner)
        with trio.move_on_after(FAREWELL_S):
            for member in self._members.values():
                await member.process.wait()
                self._check(member, is_over=True)
        return Ending(scene=scene, wall_s=trio.current_time() - started)

    async def _start(self, name: str, argv: tuple[str, ...]) -> Member:
        environment = self._plan.environment(os.environ)
        member = await start(name, argv, log=self._plan.log(name), environment=environment, keep=(self._lock,))
        self._members[name] = member
        return member

    async def _join_line(self, learner: Member) -> str:
        """Read the learner's output as its operator does."""
        deadline = trio.current_time() + JOIN_S
        while trio.current_time() < deadline:
            self._check(learner, is_over=False)
            found = JOIN_LINE.search(learner.log.read_text(encoding="utf-8", errors="replace"))
            if found:
                return found[1]
            self._tell(await self._watcher.look(), "the learner starts: it converts the base model and loads it")
            await trio.sleep(LOOK_S)
        raise ChildFailed(f"the learner had no join line after {JOIN_S:g} s. {_last_words(learner)}")

    async def _until_done(self, learner: Member) -> Scene:
        """Show what happens until the learner has ended."""
        logs = self._plan.shown(self._plan.log("*"))
        while True:
            self._tell(await self._watcher.look(), f"Ctrl-C stops politely; the processes' own words are in {logs}")
            ended = [member for member in self._members.values() if member.status is not None]
            is_over = self._plan.learner_summary.exists()  # asked after: nodes end only when it is there
            for member in ended:
                self._check(member, is_over=is_over)
            if learner.status is not None:
                return await self._watcher.look()
            await trio.sleep(LOOK_S)

    def _check(self, member: Member, *, is_over: bool) -> None:
        """A clean end is right once the learner has written its account, and wrong before."""
        if member.status is not None and (member.status != 0 or not is_over):
            raise DiedEarly(member)

    async def _see_off(self) -> None:
        """Nodes first: their leases go back to a learner that is still there."""
        learner = self._members.get(LEARNER)
        nodes = [member for name, member in self._members.items() if name != LEARNER]
        if any(node.status is None for node in nodes):
            self._tell(self._watcher.scene(), "stopping the nodes: they give their work back")
        await stop(nodes, patience_s=NODE_STOP_S, hurry=self._hurry)
        if learner is not None:
            if learner.status is None:
                self._tell(self._watcher.scene(), "stopping the learner: it ends the step under way")
            await stop([learner], patience_s=LEARNER_STOP_S, hurry=self._hurry)


def _last_words(member: Member) -> str:
    lines = "\n".join(f"    {line}" for line in member.last_lines(LAST_LINES)) or "    (nothing)"
    return f"The end of {member.log}:\n{lines}"
