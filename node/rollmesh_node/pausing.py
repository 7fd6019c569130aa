"""The owner's pause: the engines end at once and their memory is free; the node stays in the run and passes weights on.

What is not finished goes back to the learner, so that others generate it. The owner's word is kept in a file of the
node's folder and outlives a restart: a PC whose owner said "pause" does not begin to work because it was rebooted. A
rollout that is nearly done is given up too: five seconds are less than most rollouts take.

Not here: the pause of a run by its learner (a notice), and the engine's rest around a swap of weights (hold).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Literal

import trio

from rollmesh_peer.control import Order
from rollmesh_peer.logging_setup import event

PAUSED: Final = "paused"
"""The file's name in the node's folder; it is there while the owner's pause lasts."""
WHY: Final = "its owner to go on: paused by the owner (rollmesh node resume ends it)"
"""What the node waits for meanwhile."""

_log = logging.getLogger(__name__)


class OwnersPause:
    """The owner's word, and how far it is carried out. Run :meth:`carry_out` when there are engines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_done = True  # there is no engine yet
        self._changed = trio.Event()
        self.is_on = path.exists()
        """What the owner wants."""

    @property
    def state(self) -> Literal["", "pausing", "paused"]:
        """For the status."""
        if not self.is_on:
            return ""
        return "paused" if self._is_done else "pausing"

    def obey(self, order: Order) -> None:
        """Take the owner's word. It holds although the disk may be full: then not beyond a restart."""
        wanted = order == "pause"
        if wanted == self.is_on:
            return
        self.is_on = wanted
        with contextlib.suppress(OSError):
            if wanted:
                self._path.touch(mode=0o600)
            else:
                self._path.unlink(missing_ok=True)
        event(_log, "paused by the owner" if wanted else "the owner lets the node go on")
        self._changed.set()
        self._changed = trio.Event()

    async def carry_out(self, *, stop: Callable[[], Awaitable[None]], start: Callable[[], None]) -> None:
        """Call ``stop``, which returns when no engine is left, or ``start``, whenever the owner's word changes.

        Without engines (a seed) both do nothing, and a pause is done at once.
        """
        was_on = False
        while True:
            if self.is_on != was_on:
                was_on, self._is_done = self.is_on, False
                if was_on:
                    await stop()
                else:
                    start()
            self._is_done = was_on
            if self.is_on == was_on:
                await self._changed.wait()
