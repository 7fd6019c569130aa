"""How a node is asked to stop: the first signal politely, the second at once, and never later than a hard deadline.

``Stop.asked`` is what the rest of the node looks at. The watchdog is a thread of its own, so that it also ends a
process whose event loop hangs.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import Final

import trio

from rollmesh_peer.logging_setup import event

GRACE_S: Final = 10.0
"""How long a batch that is nearly done may take to end after the first signal."""
RECEIPTS_S: Final = 8.0
"""How long the last results may take to get their receipts, and the last leases to be given back."""
HARD_S: Final = 40.0
"""After this the process ends whatever it is doing; closing children and connections takes a few seconds."""
HANGING_STATUS: Final = 1

_log = logging.getLogger(__name__)


class Stop:
    """Asked for by a signal, by the end of the run, or by the node itself."""

    def __init__(self) -> None:
        self.asked = trio.Event()
        self.reason = ""

    def ask(self, reason: str) -> None:
        """Stop politely; the first reason stays."""
        if self.asked.is_set():
            return
        self.reason = reason
        self.asked.set()
        watchdog = threading.Timer(HARD_S, _end_hanging)
        watchdog.daemon = True
        watchdog.start()

    async def listen(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take signals until cancelled."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if self.asked.is_set():
                    event(_log, "stopping at once", level=logging.WARNING)
                    _end(128 + number)
                event(_log, "stopping politely: leases go back, finished work is sent; once more stops at once")
                self.ask(f"signal {signal.Signals(number).name}")


def _end_hanging() -> None:
    event(_log, "the node did not stop in time and is ended", level=logging.ERROR, seconds=HARD_S)
    _end(HANGING_STATUS)


def _end(status: int) -> None:
    """Leave without unwinding: children notice the end of their pipes, and the kernel frees locks and ports."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
