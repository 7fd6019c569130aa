"""How a child failed, in words: exit statuses, signals, last words, and errors that came through the pipe. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Final

from rollmesh_peer.children.frames import Body
from rollmesh_protocol.errors import CODES, ChildFailed, HostError, LinkLost, Refused, RollmeshError, UsageError

DIED: Final = "child.died"
"""The process ended by itself, crashed, or was killed by somebody else."""
KILLED: Final = "child.killed"
"""Our own code killed it."""
LATE: Final = "child.late"
"""It did not answer within the deadline and was killed."""
START: Final = "child.start"
"""It could not be started, or was not ready in time."""
CLOSED: Final = "child.closed"
"""Its daemon stopped it: a pause or the end."""

QUOTED_LINES: Final = 3
QUOTED_CHARS: Final = 400
"""Enough of stderr for the type and message of a Python exception."""


def describe_exit(returncode: int | None) -> tuple[str, str]:
    """Code and words for an exit status; continues the sentence "the engine process (pid 12) ..."."""
    if returncode is None:
        return DIED, "is not reachable"
    if returncode >= 0:
        return DIED, f"ended with status {returncode}"
    number = -returncode
    if number == signal.SIGKILL:
        return DIED, "was killed (out of memory?)"
    crashes = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
    verb = "crashed" if number in crashes else "was ended"
    try:
        name = f" ({signal.Signals(number).name}: {(signal.strsignal(number) or '').lower()})"
    except ValueError:  # a real-time signal, or one that this Python does not know
        name = ""
    return DIED, f"{verb} by signal {number}{name}"


def quote(tail: Iterable[str]) -> str:
    """The end of a child's stderr as a continuation of the sentence; empty when it said nothing."""
    lines = [line.strip() for line in tail][-QUOTED_LINES:]
    if not lines:
        return ""
    return "; its last words: " + " | ".join(lines)[-QUOTED_CHARS:]


def error_of(name: str, frame: Body) -> RollmeshError:
    """The error of an ``error`` frame, as the member of the tree that its code names."""
    code, detail = str(frame.get("code")), str(frame.get("detail"))
    if code in CODES:
        return Refused(code, detail)
    for kind in (UsageError, HostError, LinkLost):
        if code == kind.default_code:
            return kind(detail)
    if code == ChildFailed.default_code:
        return ChildFailed(f"the {name} process failed: {detail}")
    return ChildFailed(detail, code=code)
