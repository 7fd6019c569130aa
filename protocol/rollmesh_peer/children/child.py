"""The child's side of the pipe: ``run_child(verbs)`` is all that an engine, trainer, auditor or scorer process does.

Import this before torch and call :func:`take_pipes` (or :func:`run_child`, which does) as early as possible: from then
on descriptor 1 is stderr, so a library that prints cannot tear a frame. The invariants: calls are executed one at a
time, in order, in the main thread; each gets exactly one ``result``, ``end`` or ``error`` frame; when the daemon goes
away, however it dies, this process and everything in its process group is gone at once (end-of-file on stdin, watched
in a thread: ``PR_SET_PDEATHSIG`` follows trio's worker thread and kills healthy children).

It knows no trio and no torch, and it is not a place for clean-up: whatever a child must not lose, it has on disk.

    def generate(body: Body) -> Iterator[Body]:
        for ...:
            yield {"tokens": ...}          # an ``item`` frame each; a cancelled call closes this generator

    if __name__ == "__main__":
        run_child({"load": load, "generate": generate})

A *talk* is a verb that is also given the :class:`Notes` which the daemon says to it while it streams.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import BinaryIO, Final, NoReturn

from rollmesh_peer.children import frames
from rollmesh_peer.children.frames import Body
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed, RollmeshError

Verb = Callable[[Body], Body | Iterator[Body]]
"""Takes a call's body; returns its answer, or an iterator whose items are streamed as they come."""

Note = tuple[str, Body]
"""Verb and body."""

BROKEN_PIPE_STATUS: Final = 3
"""Exit status when what arrives on stdin is not frames."""


class Notes:
    """What the daemon says to one call while that runs; the listening thread puts in, the main one takes."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Note | None] = SimpleQueue()
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        """True once the daemon has left the call: what is still yielded is read by nobody."""
        return self._is_cancelled

    def take(self, *, wait_s: float = 0.0) -> list[Note]:
        """All notes that have come, oldest first. Waits ``wait_s`` for the first one, or until the call is left."""
        taken: list[Note] = []
        with contextlib.suppress(Empty):
            while not self._is_cancelled:
                note = self._queue.get(timeout=wait_s) if wait_s > 0 and not taken else self._queue.get_nowait()
                if note is not None:
                    taken.append(note)
        return taken

    def put(self, note: Note) -> None:
        """Keep a note for the call. Raises ``ChildFailed`` when it takes none."""
        if self._queue.qsize() >= limits.CHILD_NOTES:
            raise ChildFailed(f"{limits.CHILD_NOTES} notes to a call have not been taken", code=frames.GARBAGE)
        self._queue.put(note)

    def cancel(self) -> None:
        """Wake whoever waits for a note."""
        self._is_cancelled = True
        self._queue.put(None)


Talk = Callable[[Body, Notes], Iterator[Body]]
"""A verb that streams and is spoken to meanwhile."""


class Pipes:
    """The two private descriptors that speak to the daemon, after the public ones were pointed elsewhere."""

    def __init__(self, incoming: BinaryIO, outgoing: int) -> None:
        self.incoming = incoming
        self._outgoing = outgoing
        self._lock = threading.Lock()

    def send(self, frame: bytes) -> None:
        """Write a whole frame; the reader's back-pressure blocks here. Raises ``BrokenPipeError`` without a reader."""
        with self._lock:
            rest = memoryview(frame)
            while rest:
                rest = rest[os.write(self._outgoing, rest) :]

    def receive(self) -> Body | None:
        """The next frame, or None at end-of-file. Raises ``ChildFailed`` for garbage or a torn frame."""
        header = self.incoming.read(frames.HEADER.size)
        if not header:
            return None
        if len(header) < frames.HEADER.size:
            raise ChildFailed("the pipe ended inside a frame", code=frames.GARBAGE)
        length = frames.payload_length(header)
        payload = self.incoming.read(length)
        if len(payload) < length:
            raise ChildFailed("the pipe ended inside a frame", code=frames.GARBAGE)
        return frames.unpack(payload)


@functools.cache
def take_pipes() -> Pipes:
    """Move the daemon's pipes away from descriptors 0 and 1, once: 0 becomes /dev/null and 1 becomes stderr.

    Safe to call again (the same pipes are returned), so a module may call it on its first line, before heavy imports.
    """
    incoming, outgoing = os.dup(0), os.dup(1)  # not inheritable: they do not outlive an exec
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    faulthandler.enable(file=2)  # a crash in native code leaves its Python stack in the daemon's log
    return Pipes(os.fdopen(incoming, "rb", buffering=0x10000), outgoing)


def leave(status: int = 0) -> NoReturn:
    """End this process now, and with it every process it started that is still in its group."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(status)


def run_child(verbs: Mapping[str, Verb], *, talks: Mapping[str, Talk] | None = None) -> NoReturn:
    """Serve ``verbs`` and ``talks`` to the daemon until it goes away; never returns.

    A ``RollmeshError`` raised by a verb travels with its code and sentence; any other exception becomes
    ``child.failed`` with its type and message, and its traceback goes to stderr, which the daemon keeps.
    """
    pipes = take_pipes()
    if hasattr(os, "setsid"):
        with contextlib.suppress(PermissionError):  # already a group's leader: the daemon made the session
            os.setsid()
    desk = _Desk(pipes, verbs, talks or {})
    threading.Thread(target=desk.listen, name="rollmesh-pipe", daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        pipes.send(frames.pack(frames.READY, 0))
        desk.work()
    leave()


class _Desk:
    """Takes frames in one thread and works on calls in the main one."""

    def __init__(self, pipes: Pipes, verbs: Mapping[str, Verb], talks: Mapping[str, Talk]) -> None:
        self._pipes = pipes
        self._verbs = verbs
        self._talks = talks
        self._calls: SimpleQueue[Body] = SimpleQueue()
        self._notes: dict[int, Notes] = {}
        """Of the talks that have been called and have not ended."""
        self._cancelled = -1  # the daemon cancels the call in progress only, and ids ascend

    def listen(self) -> None:
        try:
            while (frame := self._pipes.receive()) is not None:
                self._hear(frame)
        except (ChildFailed, OSError) as error:
            with contextlib.suppress(OSError):
                os.write(2, f"the daemon's pipe broke: {error}\n".encode())
            leave(BROKEN_PIPE_STATUS)
        leave()

    def _hear(self, frame: Body) -> None:
        call_id, kind = _id_of(frame), frame["kind"]
        notes = self._notes.get(call_id)
        if kind == frames.CANCEL:
            self._cancelled = call_id
            if notes is not None:
                notes.cancel()
        elif kind == frames.NOTE:
            if notes is not None:  # else the call has ended, and the daemon does not know yet
                notes.put((str(frame.get("verb")), frames.body_of(frame)))
        else:
            if frame.get("verb") in self._talks:
                self._notes[call_id] = Notes()
            self._calls.put(frame)

    def work(self) -> NoReturn:
        while True:
            frame = self._calls.get()
            answer = perform(self._verbs_for(_id_of(frame)), frame, self._stream)
            self._notes.pop(_id_of(frame), None)
            self._pipes.send(answer)

    def _verbs_for(self, call_id: int) -> Mapping[str, Verb]:
        notes = self._notes.get(call_id)
        if notes is None:
            return self._verbs
        return {**self._verbs, **{name: functools.partial(_talk, talk, notes) for name, talk in self._talks.items()}}

    def _stream(self, call_id: int, items: Iterator[Body]) -> None:
        try:
            while self._cancelled != call_id:
                item = next(items, None)
                if item is None:
                    return
                self._pipes.send(frames.pack(frames.ITEM, call_id, {"body": item}))
        finally:
            close = getattr(items, "close", None)
            if callable(close):
                close()


def perform(verbs: Mapping[str, Verb], frame: Body, stream: Callable[[int, Iterator[Body]], None]) -> bytes:
    """Execute one call; ``stream`` sends the items of an iterator, the returned frame ends the call."""
    call_id = _id_of(frame)
    try:
        verb = verbs.get(str(frame.get("verb")))
        if verb is None:
            raise ChildFailed(f"this child has no verb {frame.get('verb')!r}", code="child.verb")
        answer = verb(frames.body_of(frame))
        if isinstance(answer, dict):
            return frames.pack(frames.RESULT, call_id, {"body": answer})
        if isinstance(answer, Iterator):
            stream(call_id, answer)
            return frames.pack(frames.END, call_id)
        raise ChildFailed(f"the verb {frame.get('verb')!r} returned a {type(answer).__name__}")
    except RollmeshError as error:
        return frames.pack(frames.ERROR, call_id, {"code": error.code, "detail": error.detail})
    except Exception as error:  # noqa: BLE001 - the boundary: whatever a verb raises is told, and the child lives on
        traceback.print_exc(file=sys.stderr)
        return frames.pack(frames.ERROR, call_id, {"code": ChildFailed.default_code, "detail": describe(error)})


def _talk(talk: Talk, notes: Notes, body: Body) -> Iterator[Body]:
    return talk(body, notes)


def describe(error: BaseException) -> str:
    """Type and message of an exception in one line of at most 1,000 characters."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:1000] if message else type(error).__name__


def _id_of(frame: Body) -> int:
    call_id = frame["id"]
    assert isinstance(call_id, int)  # frames.unpack has checked it
    return call_id
