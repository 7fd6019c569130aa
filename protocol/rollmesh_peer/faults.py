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

POINTS: Final[dict[str, str]] = {
    # node and learner: payloads on disk, the working copy
    "store.chunk_written": "a chunk lies in its file and is not counted as held",
    "store.payload_flushed": "a complete payload is flushed and has not its final name",
    "weights.snapshot_copied": "worker: a snapshot is copied into memory, the chain not yet applied",
    "weights.decoded_ahead": "worker: blocks of a payload that is not whole are decoded, the image is untouched",
    "weights.applied": "worker: a patch has changed the image, nothing is verified",
    "weights.snapshot_written": "worker: a snapshot is written and not flushed",
    # node: a working copy on a disk
    "weights.undo_written": "worker: old words are in the undo log and not flushed",
    "weights.undo_durable": "worker: the undo log has the old words of blocks that are untouched",
    "weights.flipped": "worker: blocks have changed whose old words are in the undo log",
    "weights.flushed": "worker: the image has its new root on the disk, the undo log is still there",
    "weights.led_back": "worker: the undo log's words are back in the image and not flushed",
    "weights.image_made": "worker: an image was made anew and is flushed, and has not its name",
    "keeper.verified": "the image has its new root, and nothing on disk says so",
    "keeper.written_down": "the new version is durable, and nobody has been told",
    "keeper.snapshot_durable": "a snapshot is durable, the state still names snapshot and chain before it",
    # node: the way of a result
    "node.result_durable": "a signed result is in the spool and was not sent",
    "node.receipt_came": "its receipt has come, the result is still in the spool",
    # learner: a version on its way out
    "version.reserved": "its number is in the ledger",
    "weights.encoded": "worker: the patch is in memory",
    "publish.encoded": "the patch is in a file without a name",
    "publish.payload_durable": "the payload has its name, there is no manifest",
    "publish.manifest_durable": "payload and manifest are durable, nobody has heard of them",
    "version.durable": "the ledger has it as published, nobody has heard of it",
    "publish.anchor_written": "an anchor's image is on disk, its manifest is not",
    # learner: the life of a step and of a rollout
    "lease.committed": "a lease is in the ledger and was not sent",
    "receipt.committed": "a result is in the ledger and its receipt was not sent",
    "step.assigned": "the batch of a step is in the ledger, training has not begun",
    "step.trained": "the trainer has done the step, no checkpoint holds it",
    "step.checkpointed": "the checkpoint is durable, the ledger does not know",
    "step.final": "the ledger knows that the checkpoint's steps are final",
    # learner: a wire tripped
    "rollback.tripped": "a step is not good, and nothing is written down",
    "rollback.recorded": "the ledger has the rollback, the checkpoints that it undoes are still there",
    "rollback.discarding": "some of those checkpoints are deleted",
    "rollback.discarded": "all of them are deleted, the ledger does not know",
    "rollback.done": "the ledger knows, no trainer was opened again",
    "audit.recomputed": "auditor: the rollout is recomputed, the verdict was not told",
}
"""Every point of the product, and what has happened when it is passed. ``test.*`` belongs to programs of the tests."""

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
