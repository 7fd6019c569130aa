"""The demo's processes: started from a command line, with everything they print in a log file, and stopped politely.

Invariant: a process that was started is gone when :func:`stop` returns. What they do is not known here.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from rollmesh_protocol.errors import HostError

TAIL_BYTES: Final = 16 * 1024
AT_ONCE_S: Final = 5.0
"""After the second signal a process has this long before it is killed."""


@dataclass(frozen=True, eq=False)
class Member:
    """One process of the demo."""

    name: str
    process: trio.Process
    log: Path

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self.process.returncode

    @property
    def fate(self) -> str:
        """How it ended, in words."""
        status = self.status
        if status is None:
            return "is running"
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def last_lines(self, count: int) -> list[str]:
        """The end of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
                text = file.read(TAIL_BYTES).decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-count:]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it still runs."""
        if self.status is None:
            self.process.send_signal(number)


async def start(
    name: str, argv: Sequence[str], *, log: Path, environment: Mapping[str, str], keep: Sequence[int] = ()
) -> Member:
    """Start a process in a session of its own: the terminal's Ctrl-C is the demo's to pass on.

    ``keep`` are descriptors that it inherits.

    Raises:
        HostError: there is no such program, or no room for the log.
    """
    try:
        with log.open("wb") as output:
            process = await trio.lowlevel.open_process(
                list(argv), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=dict(environment), pass_fds=tuple(keep), start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise HostError(f"{name} cannot be started: {error}") from error
    return Member(name, process, log)


async def stop(members: Sequence[Member], *, patience_s: float, hurry: trio.Event) -> None:
    """Ask politely, wait ``patience_s`` or until ``hurry``, then insist, then kill."""
    for member in members:
        member.signal(signal.SIGINT)
    with trio.move_on_after(patience_s):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when, hurry, nursery.cancel_scope)
            await _all_gone(members)
            nursery.cancel_scope.cancel()
    for member in members:
        member.signal(signal.SIGINT)
    with trio.move_on_after(AT_ONCE_S):
        await _all_gone(members)
    for member in members:
        member.signal(signal.SIGKILL)
    await _all_gone(members)


async def _all_gone(members: Sequence[Member]) -> None:
    for member in members:
        await member.process.wait()


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
