"""Named points at which a process of ours can be made to fail on purpose, so that recovery is tested for real.

``ROLLMESH_FAULT=<point>[:<count>][:<mode>]`` arms a point; several are separated by commas. ``count`` is the passing
that fires, 1 (the default) being the first; ``mode`` is one of

    kill    SIGKILL to this process, as a power cut or the memory killer would (the default)
    raise   raise :class:`Fault`, as a bug would
    stall   never go on, as a hung disk or driver would; the thread that passes the point stays there

``ROLLMESH_FAULT_ONCE=<file>`` lets a fault fire only while that file does not exist, and makes it first: a child that
is started again with the same environment then lives. With nothing armed a point costs one dictionary look-up, and the
product behaves as if this module were not there. Child processes get the variables only from a daemon that passes
them on (:func:`armed`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn, cast

from rollmesh_protocol.errors import UsageError

FAULT: Final = "ROLLMESH_FAULT"
ONCE: Final = "ROLLMESH_FAULT_ONCE"
_MODES: Final = ("kill", "raise", "stall")

Mode = Literal["kill", "raise", "stall"]


class Fault(RuntimeError):
    """What an armed point of mode ``raise`` raises: deliberately no member of our error tree."""


@dataclass
class _Trap:
    remaining: int
    mode: Mode
    once: Path | None


def fault_point(name: str) -> None:
    """Fail here if ``name`` is armed. Call it between two durable steps, where dying matters."""
    trap = _traps.get(name)
    if trap is None:
        return
    trap.remaining -= 1
    if trap.remaining == 0 and _is_first(trap.once):
        _fire(name, trap.mode)


def armed(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of this module that are set, for the environment of a child process."""
    source = os.environ if environ is None else environ
    return {name: source[name] for name in (FAULT, ONCE) if name in source}


def arm(environ: Mapping[str, str]) -> None:
    """Arm what ``environ`` says, and nothing else. Done once at import; tests call it again.

    Raises:
        UsageError: the variable does not have the form above.
    """
    _traps.clear()
    once = environ.get(ONCE)
    for entry in filter(None, environ.get(FAULT, "").split(",")):
        name, *options = entry.strip().split(":")
        count, mode = 1, "kill"
        for option in options:
            if option.isdecimal() and int(option) > 0:
                count = int(option)
            elif option in _MODES:
                mode = option
            else:
                raise UsageError(f"{FAULT}={entry}: {option!r} is neither a count nor one of {', '.join(_MODES)}")
        _traps[name] = _Trap(count, cast("Mode", mode), Path(once) if once else None)


def _is_first(once: Path | None) -> bool:
    if once is None:
        return True
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _fire(name: str, mode: Mode) -> NoReturn:
    os.write(2, f"rollmesh: the fault point {name} fires ({mode})\n".encode())
    if mode == "raise":
        raise Fault(f"the fault point {name} is armed")
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(3600)


_traps: dict[str, _Trap] = {}
arm(os.environ)
