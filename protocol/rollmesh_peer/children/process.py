"""The daemon's side of a child process: ``open_child(spec)`` starts it, ``Child.call`` and ``Child.stream`` talk to it.

The invariants: one call is in progress at a time and the others wait their turn in order; every wait has a deadline or
is ended by the child's death; a dead, hung or babbling child is killed with its whole process group and every waiting
call raises ``ChildFailed`` with words at once; a call that its caller gave up keeps the turn until the child has
answered it, so answers are never mixed up. A child dies with its daemon because its stdin ends (see ``child``).

It does not restart anything (``supervisor`` does) and knows no verb.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Final

import trio

from rollmesh_peer.children import frames
from rollmesh_peer.children.failure import CLOSED, KILLED, LATE, START, describe_exit, error_of, quote
from rollmesh_peer.children.frames import Body
from rollmesh_peer.children.launch import ChildSpec, kept_environment, kill_group, python_argv, start
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed

log = logging.getLogger("rollmesh.children")

READ_BYTES: Final = 256 * 1024
"""One read of a child's pipe; a Linux pipe holds 64 KiB, and up to 1 MiB where it was enlarged."""
TAIL_LINES: Final = 50
"""Last lines of a child's stderr that are kept: a Python traceback with its cause fits."""
LINE_CHARS: Final = 1000
"""Longest kept piece of one stderr line."""
CLOSE_GRACE_S: Final = 1.0
"""A child that was told to leave by closing its stdin is killed after this long; ours leave within milliseconds."""
REAP_S: Final = 10.0
"""A killed process that is still there after this long hangs in the kernel (a GPU driver); it is left behind."""
DRAIN_S: Final = 1.0
"""After a child's exit its pipes are read for so long; only a grandchild outside its group can hold them open."""


class _Job:
    """One call in progress: the reader puts its frames in, the caller takes them out."""

    def __init__(self, call_id: int, verb: str) -> None:
        self.call_id = call_id
        self.verb = verb
        self.ended = trio.Event()
        # One frame of slack: a slow consumer stops the reader, the pipe fills, and the child waits.
        self.send, self.receive = trio.open_memory_channel[Body](1)


class Stream:
    """A call in progress that streams: its items by ``async for``, and a way to speak to it. One reader at a time."""

    def __init__(self, child: Child, job: _Job, item_deadline_s: float) -> None:
        self._child = child
        self._job = job
        self._item_deadline_s = item_deadline_s
        self._ended = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Body:
        """The next item. Raises ``ChildFailed`` when the child died, hung or failed, or its own error rebuilt."""
        if self._ended:
            raise StopAsyncIteration
        self._ended = True  # an error is the end, too
        item = await self._child.next_item(self._job, self._item_deadline_s)
        if item is None:
            raise StopAsyncIteration
        self._ended = False
        return item

    def tell(self, verb: str, body: Mapping[str, object]) -> None:
        """Send the child a note for this call. It has no answer, and is lost when the call has ended meanwhile.

        Raises ``ChildFailed`` when more than :data:`rollmesh_protocol.limits.CHILD_NOTES` are not read, or for what
        msgpack cannot hold.
        """
        self._child.say(self._job, verb, body)


class Child:
    """A running child process. Made by :func:`open_child`; its methods may be called from any number of tasks."""

    def __init__(self, spec: ChildSpec, process: trio.Process) -> None:
        self.spec = spec
        self._process = process
        self._turn = trio.Semaphore(1, max_value=1)
        self._ids = itertools.count(1)
        self._job: _Job | None = None
        self._outbox, self._to_write = trio.open_memory_channel[bytes](math.inf)  # see say()
        self._ready = trio.Event()
        self._piped = trio.Event()
        self._stderr_read = trio.Event()
        self._dead = trio.Event()
        self._blame: tuple[str, str] | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._nursery: trio.Nursery | None = None
        self._service = trio.CancelScope(shield=True)

    # --- what owners see ---------------------------------------------------------------------------------------------
    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, minus the signal's number for a killed child, or None while it lives."""
        return self._process.returncode

    @property
    def is_alive(self) -> bool:
        """False as soon as no call can succeed any more."""
        return not self._dead.is_set() and self._blame is None

    @property
    def last_words(self) -> tuple[str, ...]:
        """The last lines of its stderr, oldest first, at most :data:`TAIL_LINES`."""
        return tuple(self._tail)

    async def wait_dead(self) -> ChildFailed:
        """Wait until the process is gone; returns the reason, in words."""
        await self._dead.wait()
        return self.failure()

    def failure(self) -> ChildFailed:
        """Why this child is of no use any more, with its last words."""
        if self._blame is not None:
            code, how = self._blame
        else:
            code, how = describe_exit(self.returncode)
        return ChildFailed(f"the {self.spec.name} process (pid {self.pid}) {how}{quote(self._tail)}", code=code)

    def kill(self, how: str = "was killed by its daemon", *, code: str = KILLED) -> None:
        """End the process and its whole group now. ``how`` continues the sentence "the engine process ..."."""
        if self._dead.is_set():
            return
        self._blame = self._blame or (code, how)
        kill_group(self._process)

    async def call(self, verb: str, body: Mapping[str, object], *, deadline_s: float) -> Body:
        """The answer of ``verb``. ``deadline_s`` counts from this call's turn; a child that misses it is killed.

        The wait for the turn is bounded by the deadlines of the calls before it.

        Raises ``ChildFailed`` when the child died, hung or failed, and the child's own ``RollmeshError`` rebuilt.
        """
        async with self._turn_of(verb, body, patience_s=deadline_s) as job:
            return self._expect(await self._next_frame(job, deadline_s), job, frames.RESULT)

    @contextlib.asynccontextmanager
    async def stream(self, verb: str, body: Mapping[str, object], *, item_deadline_s: float) -> AsyncIterator[Stream]:
        """``async with child.stream(...) as items: async for item in items: ...``; leaving early cancels the call.

        ``item_deadline_s`` bounds the wait for each item and for the end; a child that misses it is killed.
        """
        async with self._turn_of(verb, body, patience_s=item_deadline_s) as job:
            yield Stream(self, job, item_deadline_s)

    # --- one call ----------------------------------------------------------------------------------------------------
    async def next_item(self, job: _Job, deadline_s: float) -> Body | None:
        """The next item of a call that streams; None at its end."""
        frame = await self._next_frame(job, deadline_s)
        return None if frame["kind"] == frames.END else self._expect(frame, job, frames.ITEM)

    def say(self, job: _Job, verb: str, body: Mapping[str, object]) -> None:
        """Send a note to a call in progress; see :meth:`Stream.tell`."""
        if job.ended.is_set() or not self.is_alive:
            return
        if self._outbox.statistics().current_buffer_used >= limits.CHILD_NOTES:
            raise ChildFailed(f"the {self.spec.name} process does not read what it is told", code=LATE)
        self._outbox.send_nowait(frames.pack(frames.NOTE, job.call_id, {"verb": verb, "body": dict(body)}))

    @contextlib.asynccontextmanager
    async def _turn_of(self, verb: str, body: Mapping[str, object], *, patience_s: float) -> AsyncIterator[_Job]:
        """Wait for the turn, send the call, and give the turn up again once the child has ended it."""
        call_id = next(self._ids)
        frame = frames.pack(frames.CALL, call_id, {"verb": verb, "body": dict(body)})
        await self._turn.acquire()
        if not self.is_alive:
            self._turn.release()
            raise self.failure()
        job = self._job = _Job(call_id, verb)
        self._outbox.send_nowait(frame)
        try:
            yield job
        finally:
            job.receive.close()
            if not job.ended.is_set():
                assert self._nursery is not None
                self._nursery.start_soon(self._outlive, job, patience_s)

    async def _outlive(self, job: _Job, patience_s: float) -> None:
        """Cancel a call whose caller has gone, and wait for the child to notice; one that never does is killed."""
        if not self._dead.is_set():
            self._outbox.send_nowait(frames.pack(frames.CANCEL, job.call_id))
        with trio.move_on_after(patience_s) as scope:
            await job.ended.wait()
        if scope.cancelled_caught:
            self.kill(f"went on with the cancelled call {job.verb!r} for more than {patience_s:g} s", code=LATE)

    async def _next_frame(self, job: _Job, deadline_s: float) -> Body:
        with trio.move_on_after(deadline_s) as scope:
            try:
                frame = await job.receive.receive()
            except trio.EndOfChannel:
                raise self.failure() from None
        if not scope.cancelled_caught:
            return frame
        self.kill(f"did not answer {job.verb!r} within {deadline_s:g} s", code=LATE)
        raise self.failure()

    def _expect(self, frame: Body, job: _Job, kind: str) -> Body:
        if frame["kind"] == frames.ERROR:
            raise error_of(self.spec.name, frame)
        if frame["kind"] != kind:
            raise ChildFailed(f"the {self.spec.name} process answered {job.verb!r} with a {frame['kind']} frame")
        return frames.body_of(frame)

    def _end_job(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.ended.set()
            job.send.close()
            self._turn.release()

    # --- its life: open_child drives it -------------------------------------------------------------------------------
    async def serve(self) -> None:
        """The tasks behind every call. Shielded: the child is closed in order also when its owner is cancelled."""
        with self._service:
            async with trio.open_nursery() as self._nursery:
                for task in (self._read_frames, self._write_frames, self._read_stderr, self._await_exit):
                    self._nursery.start_soon(task)

    async def until_ready(self) -> None:
        """Wait for the child's ``ready`` frame. Raises ``ChildFailed`` when it dies first or takes too long."""
        with trio.move_on_after(self.spec.start_deadline_s) as scope:
            await self._ready.wait()
        if scope.cancelled_caught:
            self.kill(f"was not ready within {self.spec.start_deadline_s:g} s of its start", code=START)
        if not self.is_alive:
            await self._dead.wait()
            raise self.failure()
        log.debug("the %s process runs as pid %d", self.spec.name, self.pid)

    async def _read_frames(self) -> None:
        """Give every frame to the call in progress; ends at end-of-file or with the first thing that is no frame."""
        assert self._process.stdout is not None
        try:
            async for frame in _frames_of(self._process.stdout):
                if frame["kind"] == frames.READY:
                    self._ready.set()
                    continue
                job = self._job
                if job is None or frame["id"] != job.call_id:
                    raise ChildFailed("answered a call that nobody made", code=frames.GARBAGE)
                with contextlib.suppress(trio.BrokenResourceError):  # the caller has gone: the item is dropped
                    await job.send.send(frame)
                if frame["kind"] in (frames.RESULT, frames.END, frames.ERROR):
                    self._end_job()
        except ChildFailed as error:
            self.kill(f"wrote nonsense into its pipe and was killed: {error.detail}", code=error.code)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self._piped.set()
        # End-of-file without an exit: nothing can be said to this child any more.
        with trio.move_on_after(CLOSE_GRACE_S) as scope:
            await self._dead.wait()
        if scope.cancelled_caught:
            self.kill("closed its pipe and was killed", code=frames.GARBAGE)

    async def _write_frames(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # its death is noticed elsewhere
            async for frame in self._to_write:
                await self._process.stdin.send_all(frame)

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        rest = b""
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for piece in self._process.stderr:
                *lines, rest = (rest + bytes(piece)).split(b"\n")
                self._hear(lines)
                if len(rest) > LINE_CHARS:
                    self._hear([rest])
                    rest = b""
        self._hear([rest])
        self._stderr_read.set()

    def _hear(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            text = line[:LINE_CHARS].decode("utf-8", "replace").rstrip()
            if text:
                self._tail.append(text)
                log.debug("%s: %s", self.spec.name, text)
                if self.spec.hear is not None:
                    self.spec.hear(text)

    async def _await_exit(self) -> None:
        await self._process.wait()
        kill_group(self._process)  # what it has left behind, an engine's workers for instance
        with trio.move_on_after(DRAIN_S):
            await self._piped.wait()
            await self._stderr_read.wait()
        self._dead.set()
        self._ready.set()
        self._end_job()
        log.debug("%s", self.failure().detail)

    async def close(self) -> None:
        """Tell it to leave by ending its stdin, then make it; returns when it is gone."""
        process = self._process
        assert process.stdin is not None
        if not self._dead.is_set():
            self._blame = self._blame or (CLOSED, "was stopped by its daemon")
            await process.stdin.aclose()
            await self._wait_gone()
        self._service.cancel()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                await pipe.aclose()

    async def _wait_gone(self) -> None:
        with trio.move_on_after(CLOSE_GRACE_S):
            await self._dead.wait()
        if self._dead.is_set():
            return
        kill_group(self._process)
        with trio.move_on_after(REAP_S) as scope:
            await self._dead.wait()
        if not scope.cancelled_caught:
            return
        log.warning("the %s process (pid %d) survives being killed; it is left behind", self.spec.name, self.pid)


@contextlib.asynccontextmanager
async def open_child(spec: ChildSpec) -> AsyncIterator[Child]:
    """Start a child and wait for its ``ready`` frame; it is gone when the block is left.

    Raises ``ChildFailed`` when it cannot be started, dies on the way, or is not ready in time. An exception of the
    block comes out as it is, never in an exception group.
    """
    child = Child(spec, await start(spec))
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            nursery.start_soon(child.serve)
            await child.until_ready()
            yield child
        except BaseException as error:  # noqa: BLE001 - raised again below, outside the nursery
            failure = error
        nursery.cancel_scope.shield = True
        await child.close()
    if failure is not None:
        raise failure


async def _frames_of(pipe: trio.abc.ReceiveStream) -> AsyncIterator[Body]:
    """Whole frames from a pipe. Raises ``ChildFailed`` for what is no frame; a torn last frame is an end-of-file."""
    buffer = bytearray()
    while True:
        while len(buffer) >= frames.HEADER.size:
            end = frames.HEADER.size + frames.payload_length(bytes(buffer[: frames.HEADER.size]))
            if len(buffer) < end:
                break
            frame = frames.unpack(bytes(memoryview(buffer)[frames.HEADER.size : end]))
            del buffer[:end]
            yield frame
        piece = await pipe.receive_some(READ_BYTES)
        if not piece:
            return
        buffer += piece


__all__ = ["Child", "ChildSpec", "Stream", "kept_environment", "open_child", "python_argv"]
