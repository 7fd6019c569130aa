"""Watches over one engine process after another: hung, out of memory, on the wrong device; and keeps what it printed.

The invariants: an engine is ended for standing still, never for being slow (``progress``); whatever ended it, the words
say what is known of the cause; after one that ran out of memory the next is started for fewer rows (``oom``).

It starts nothing and decides nothing else: the supervisor restarts with back-off, ``decisions`` gives leases back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import trio

from rollmesh_node import oom
from rollmesh_node.engine_log import EngineLog
from rollmesh_node.progress import Progress
from rollmesh_peer.children.failure import LATE
from rollmesh_peer.children.launch import ChildSpec
from rollmesh_peer.children.process import Child
from rollmesh_protocol.errors import ChildFailed, HostError, RollmeshError

LOOK_S: Final = 2.0
"""Between two looks at a living engine."""
_MAYBE: Final = "(out of memory?)"
"""What the pipe's own words say of a kill that nobody explains."""


class Overseer:
    """Of one engine and those that are started after it. ``device``: where it has to run, ``cuda`` or another."""

    def __init__(self, *, device: str, max_rows: int, log: Path | None = None) -> None:
        self._device = device
        self._budget = oom.RowBudget(max_rows)
        self._log = EngineLog(log) if log is not None else None
        self._is_refused = False
        self.progress = Progress(-math.inf)
        """Of the process that is attended now."""

    def listening(self, spec: ChildSpec) -> ChildSpec:
        """``spec`` with the engine's output kept in the log."""
        return replace(spec, hear=self._log.write) if self._log is not None else spec

    @property
    def rows(self) -> int:
        """Rollouts side by side that the next engine is to be started for."""
        return self._budget.rows(trio.current_time())

    async def attend(self, child: Child) -> str:
        """Watch ``child`` until it is gone; why it is, in words."""
        watch = oom.Watch(kills=oom.kernel_kills())
        self.progress = Progress(trio.current_time())
        self._is_refused = False
        if self._log is not None:
            self._log.write(f"--- the engine starts, pid {child.pid}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look, child, watch)
            failure = await child.wait_dead()
            nursery.cancel_scope.cancel()
        why = self._explain(failure.detail, child.returncode, watch)
        if self._log is not None:
            self._log.write(f"--- {why}")
            why += f" (more in {self._log.path})"
        return why

    async def _look(self, child: Child, watch: oom.Watch) -> None:
        while True:
            watch.look(child.pid)
            now = trio.current_time()
            if now >= self.progress.due:
                child.kill(self.progress.words(now), code=LATE)
                return
            await trio.sleep_until(min(self.progress.due, now + LOOK_S))

    def failed(self, error: RollmeshError) -> None:
        """The engine failed at its work and is about to be ended. A refused memory plan is no lack of rows."""
        self._is_refused = isinstance(error, HostError)

    def check_device(self, notes: Mapping[str, object]) -> None:
        """Hold what the engine says of itself against what it was started for.

        Raises:
            ChildFailed: it computes on the CPU where a GPU was meant: a driver that is gone after a suspend, a GPU that
                fell off its bus. Generating on would be slower than useful.
        """
        found = str(notes.get("device", ""))
        if self._device == "cuda" and not found.startswith("cuda"):
            raise ChildFailed(
                f"the GPU is lost: the engine runs on {found or 'nothing that it names'} instead; check the driver "
                "(nvidia-smi), or set engine.device=cpu",
                code="engine.device",
            )

    def _explain(self, words: str, returncode: int | None, watch: oom.Watch) -> str:
        kills = oom.kernel_kills()
        memory = "" if self._is_refused else watch.verdict(returncode=returncode, words=words, kills=kills)
        if not memory:
            return words.replace(_MAYBE, "from outside: the kernel counts no lack of memory") if kills else words
        rows = self._budget.ran_out(trio.current_time())
        return f"{memory}; it is started for {rows} rollouts side by side next: {words}"
