"""The node's last few results and what became of them: what ``rollmesh node selfcheck`` judges.

One file in the node's folder, mode 0600, replaced as a whole, about one run: another run's results are forgotten. The
invariant: it is bounded in entries and bytes, and nothing that generates or sends ever waits for it. Notes are taken in
memory and written behind, at most once in :data:`WRITE_EVERY_S`; a kill -9 costs the notes of the last seconds. The
spool cannot serve: it has no leases, and forgets a result with its receipt. A digest tells a damaged file from a
damaged engine.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Final, Literal

import trio
from blake3 import blake3
from pydantic import Field

from rollmesh_peer.logging_setup import event
from rollmesh_peer.weights.durable import UNFINISHED, disk_errors
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import RUN_ID_CHARS
from rollmesh_protocol.errors import HostError, Refused
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import Peer, Sentence, Standing
from rollmesh_protocol.record import Record
from rollmesh_protocol.rollout import Result, SampleResult

JOURNAL: Final = "journal"
"""The file's name in the node's folder."""
KEPT_RESULTS: Final = 16
"""Of the results that nobody has refused, the newest; as many refused ones are kept beside them."""
ENTRY_BYTES: Final = 512 * limits.KIB
"""Prompt, tokens and log-probabilities of one result; of a larger one the first samples are kept."""
JOURNAL_BYTES: Final = 4 * limits.MIB
"""Of all of them together; the file's own words come on top."""
FILE_BYTES: Final = 2 * JOURNAL_BYTES
WRITE_EVERY_S: Final = 5.0
"""Between two writes: a node that never rests writes some 0.1 MB/s at the very most, mostly a hundredth of that."""
LAST_WRITE_S: Final = 2.0
"""What a stop waits for the last notes."""
_DIGEST_BYTES: Final = 32

_log = logging.getLogger(__name__)


class Answer(Record):
    """What was said of a result: by the learner, or by this node, which does not send what cannot pass."""

    by: Literal["learner", "node"]
    accepted: int = Field(ge=0, le=limits.MAX_SAMPLES_PER_GROUP)
    code: str | None = Field(max_length=64)
    detail: Sentence


class Entry(Record):
    """One result. ``answer`` is None until there is a receipt; ``at``: seconds since the epoch by this node's clock."""

    lease: Lease
    result: Result
    answer: Answer | None
    at: float

    @property
    def is_refused(self) -> bool:
        """True when anything of it was refused."""
        return self.answer is not None and self.answer.code is not None

    @property
    def num_bytes(self) -> int:
        """Of prompt, tokens and log-probabilities."""
        return len(self.lease.prompt) + sum(map(_sample_bytes, self.result.samples))


class Notes(Record):
    """The journal as it is written: entries oldest first, and how the learner last regarded the node."""

    max_items: ClassVar[int] = limits.MAX_CARD_ITEMS

    run: str = Field(min_length=1, max_length=RUN_ID_CHARS)
    learner: Peer
    entries: tuple[Entry, ...] = Field(max_length=2 * KEPT_RESULTS)
    standing: Standing | None


class Journal:
    """Of the run ``run`` of ``learner``. Run :meth:`run` in a nursery; the other methods return at once."""

    def __init__(self, file: Path, *, run: str, learner: str, clock: Callable[[], float] = time.time) -> None:
        """Take up what the file says of this run. Blocks for a moment; whatever is wrong with it is not a failure."""
        self._file = file
        self._clock = clock
        self._notes = Notes(run=run, learner=learner, entries=(), standing=None)
        self._news = trio.Event()
        self._is_written = True
        try:
            before = read_journal(file)
        except HostError as error:
            event(_log, "the journal begins afresh", why=error.detail)
            return
        if before is not None and (before.run, before.learner) == (run, learner):
            self._notes = before

    @property
    def notes(self) -> Notes:
        """All that is noted by now."""
        return self._notes

    def made(self, lease: Lease, result: Result) -> None:
        """A result was made; nothing is known of its fate."""
        others = tuple(entry for entry in self._notes.entries if entry.lease.lease_id != lease.lease_id)
        self._keep((*others, _fitted(lease, result, at=self._clock())))

    def answered(
        self,
        lease_id: bytes,
        *,
        accepted: int = 0,
        code: str | None = None,
        detail: str = "",
        by: Literal["learner", "node"] = "learner",
    ) -> None:
        """What became of a result; nothing where it is not among the last any more."""
        answer = Answer(by=by, accepted=accepted, code=code and code[:64], detail=detail[: limits.MAX_TEXT_CHARS])
        self._keep(
            tuple(
                entry.model_copy(update={"answer": answer}) if entry.lease.lease_id == lease_id else entry
                for entry in self._notes.entries
            )
        )

    def regarded(self, standing: Standing | None) -> None:
        """How the learner regards this node; written soon when it is more than other counts."""
        known = self._notes.standing
        if standing is None or standing == known:
            return
        self._notes = self._notes.model_copy(update={"standing": standing})
        if known is None or (known.state, known.reason) != (standing.state, standing.reason):
            self._stir()

    async def run(self, standing: Callable[[], Standing | None]) -> None:
        """Write behind until cancelled, and once more then."""
        try:
            while True:
                with trio.move_on_after(WRITE_EVERY_S):
                    await self._news.wait()
                self.regarded(standing())
                if not self._is_written:
                    await self._write()
                    await trio.sleep(WRITE_EVERY_S)
        finally:
            self.regarded(standing())
            with trio.CancelScope(shield=True, deadline=trio.current_time() + LAST_WRITE_S):
                if not self._is_written:
                    await self._write()

    def _keep(self, entries: tuple[Entry, ...]) -> None:
        self._notes = self._notes.model_copy(update={"entries": _bounded(entries)})
        self._stir()

    def _stir(self) -> None:
        self._is_written = False
        self._news.set()

    async def _write(self) -> None:
        self._news, self._is_written = trio.Event(), True
        notes = self._notes
        try:
            await trio.to_thread.run_sync(lambda: write_journal(self._file, notes))
        except HostError as error:  # it is for looking at: work goes on without it
            _log.debug("%s", error)


def write_journal(file: Path, notes: Notes) -> None:
    """Replace the file. Not flushed: it survives this process and need not survive a power cut. HostError: the disk."""
    body = notes.encode()
    unfinished = file.with_name(file.name + UNFINISHED)
    with disk_errors("the journal cannot be written"):
        try:
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as draft:
                draft.write(blake3(body).digest() + body)
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)


def read_journal(file: Path) -> Notes | None:
    """What the file says; None when there is none.

    Raises:
        HostError: it cannot be read, or is damaged.
    """
    try:
        with file.open("rb") as opened:
            raw = opened.read(FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostError(f"the journal {file} cannot be read: {error.strerror}") from error
    digest, body = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
    if len(raw) > FILE_BYTES or blake3(body).digest() != digest:
        raise HostError(f"the journal {file} is damaged")
    try:
        return Notes.decode(body, limit=FILE_BYTES)
    except Refused as error:
        raise HostError(f"the journal {file} is not of this version of rollmesh: {error.detail}") from error


def _sample_bytes(sample: SampleResult) -> int:
    return len(sample.tokens) + len(sample.logprobs)


def _fitted(lease: Lease, result: Result, *, at: float) -> Entry:
    """The entry of a result, with as many of its first samples as there is room for, and at least one."""
    room = ENTRY_BYTES - len(lease.prompt)
    samples: list[SampleResult] = []
    for sample in result.samples:
        room -= _sample_bytes(sample)
        if samples and room < 0:
            kept = {one.index for one in samples}
            ordered = tuple(one for one in lease.samples if one.index in kept)
            return Entry(
                lease=lease.model_copy(update={"samples": ordered}),
                result=result.model_copy(update={"samples": tuple(samples)}),
                answer=None,
                at=at,
            )
        samples.append(sample)
    return Entry(lease=lease, result=result, answer=None, at=at)


def _bounded(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The newest of both kinds within their number, and within the bytes; what was refused is the last to go."""
    refused = [entry for entry in entries if entry.is_refused][-KEPT_RESULTS:]
    others = [entry for entry in entries if not entry.is_refused][-KEPT_RESULTS:]
    size = sum(entry.num_bytes for entry in (*refused, *others))
    while size > JOURNAL_BYTES:
        size -= (others if len(others) > 1 else refused).pop(0).num_bytes
    kept = {id(entry) for entry in (*refused, *others)}
    return tuple(entry for entry in entries if id(entry) in kept)
