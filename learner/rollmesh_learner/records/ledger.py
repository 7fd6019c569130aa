"""The durable record of a run: SQLite behind one writer thread.

Every change that the outside world may hear of (a receipt, a lease, a batch, a version) is committed here first, with
``synchronous=FULL``, so that a power cut loses nothing that was acknowledged. Writers hand over statements and wait;
the thread puts what is waiting into one transaction (group commit). A disk that is full or fails is retried until it
works again, and says so: nothing is acknowledged meanwhile and nothing is lost.

This module knows tables and durability, not rules; :mod:`rollmesh_learner.work.book` holds the rules, and
:mod:`rollmesh_learner.records.restore` turns rows back into it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from rollmesh_protocol.errors import HostError

_log = logging.getLogger("rollmesh.learner.ledger")

SCHEMA_VERSION: Final = 1
_BATCH: Final = 64
"""Statements' groups put into one transaction: 11k receipts a second instead of 300."""
_RETRY_S: Final = 1.0
_BUSY_S: Final = 5.0
"""How long another process may still have the file: one that was just killed is gone in less."""

Scalar = None | int | float | str | bytes
Row = tuple[Scalar, ...]


@dataclass(frozen=True)
class Statement:
    """One SQL statement and its parameters."""

    sql: str
    parameters: tuple[Scalar, ...] = ()


_SCHEMA: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, environment INTEGER NOT NULL, item TEXT NOT NULL, prompt BLOB NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('live', 'assigned', 'consumed', 'dropped')), step INTEGER, why TEXT);
CREATE INDEX groups_by_state ON groups (state);
CREATE TABLE leases (
    lease_id BLOB PRIMARY KEY, node TEXT NOT NULL, group_id INTEGER NOT NULL, samples BLOB NOT NULL,
    version INTEGER NOT NULL, step INTEGER NOT NULL, root BLOB NOT NULL, duration_s REAL NOT NULL,
    issued_at REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'done', 'refused', 'returned', 'expired', 'void')),
    result_digest BLOB, receipt BLOB) WITHOUT ROWID;
CREATE INDEX leases_by_group ON leases (group_id);
CREATE TABLE rollouts (
    lease_id BLOB NOT NULL, sample INTEGER NOT NULL, group_id INTEGER NOT NULL, node TEXT NOT NULL,
    version INTEGER NOT NULL, step INTEGER NOT NULL, root BLOB NOT NULL, seed BLOB NOT NULL,
    tokens BLOB NOT NULL, logprobs BLOB NOT NULL, finish TEXT NOT NULL, received_at REAL NOT NULL,
    drawn INTEGER NOT NULL, exact_logprobs BLOB, reward REAL, score_error TEXT,
    state TEXT NOT NULL CHECK (state IN (
        'scoring', 'auditing', 'ready', 'assigned', 'consumed', 'void', 'stale', 'orphaned')),
    trained_step INTEGER, PRIMARY KEY (lease_id, sample)) WITHOUT ROWID;
CREATE INDEX rollouts_by_group ON rollouts (group_id);
CREATE INDEX rollouts_by_node ON rollouts (node, state);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, state TEXT NOT NULL CHECK (state IN ('assigned', 'trained', 'final', 'rolled_back')),
    assigned_at REAL NOT NULL, metrics TEXT);
CREATE TABLE versions (
    version INTEGER PRIMARY KEY, step INTEGER NOT NULL, root BLOB, manifest BLOB, payload_bytes INTEGER,
    state TEXT NOT NULL CHECK (state IN ('reserved', 'published', 'orphaned')), reserved_at REAL NOT NULL);
CREATE TABLE nodes (
    peer TEXT PRIMARY KEY, name TEXT NOT NULL, first_seen REAL NOT NULL, standing TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE offences (
    number INTEGER PRIMARY KEY, peer TEXT NOT NULL, code TEXT NOT NULL, detail TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE audits (
    lease_id BLOB NOT NULL, sample INTEGER NOT NULL, node TEXT NOT NULL, verdict TEXT NOT NULL, tokens INTEGER NOT NULL,
    over_half INTEGER NOT NULL, over_one INTEGER NOT NULL, over_three INTEGER NOT NULL, largest REAL NOT NULL,
    at REAL NOT NULL, PRIMARY KEY (lease_id, sample)) WITHOUT ROWID;
CREATE TABLE invites (token BLOB PRIMARY KEY, used_by TEXT NOT NULL, used_at REAL NOT NULL) WITHOUT ROWID;
"""
_ADDED: Final = """
CREATE TABLE IF NOT EXISTS rollbacks (
    number INTEGER PRIMARY KEY, tripped_step INTEGER NOT NULL, to_step INTEGER NOT NULL, voided INTEGER NOT NULL,
    detail TEXT NOT NULL, at REAL NOT NULL, state TEXT NOT NULL CHECK (state IN ('begun', 'done')));
CREATE TABLE IF NOT EXISTS stretches (
    lease_id BLOB NOT NULL, sample INTEGER NOT NULL, first_token INTEGER NOT NULL, version INTEGER NOT NULL,
    step INTEGER NOT NULL, root BLOB NOT NULL, PRIMARY KEY (lease_id, sample, first_token)) WITHOUT ROWID;
"""
"""Tables that ledgers of this format may have been made without."""
_ADDED_COLUMNS: Final = {
    "leases": ("swap_mode", "TEXT NOT NULL DEFAULT 'drain'"),
    "nodes": ("block", "TEXT NOT NULL DEFAULT ''"),
}
"""The same of columns: by table, a name and its declaration."""


class Ledger:
    """The open ledger. Get one from :func:`open_ledger`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.trouble = ""
        """What keeps the ledger from committing right now, in words; empty when all is well."""

    async def commit(self, *statements: Statement) -> None:
        """Run ``statements`` in one transaction; returns when they are on the disk.

        Shielded: a caller that is cancelled still leaves a whole transaction or none.

        Raises:
            HostError: the file is damaged. A disk that is full or fails is waited for instead.
            sqlite3.Error: a statement is wrong; nothing of this call is kept, other calls are not touched.
        """
        job = _Job(self._write(statements), trio.Event(), trio.lowlevel.current_trio_token())
        self._waiting.put(job)
        with trio.CancelScope(shield=True):
            await job.done.wait()
        if job.error is not None:
            raise job.error

    async def fetch(self, sql: str, *parameters: Scalar) -> list[Row]:
        """The rows of one query, in order with the writes handed over before it."""
        rows: list[Row] = []

        def read(connection: sqlite3.Connection) -> None:
            rows[:] = connection.execute(sql, parameters).fetchall()

        job = _Job(read, trio.Event(), trio.lowlevel.current_trio_token())
        self._waiting.put(job)
        with trio.CancelScope(shield=True):
            await job.done.wait()
        if job.error is not None:
            raise job.error
        return rows

    @staticmethod
    def _write(statements: Sequence[Statement]) -> Callable[[sqlite3.Connection], None]:
        def write(connection: sqlite3.Connection) -> None:
            for statement in statements:
                connection.execute(statement.sql, statement.parameters)

        return write

    def write_until_closed(self) -> None:
        """The writer thread's loop; returns after :meth:`close`."""
        closing = False
        while not closing:
            jobs = [self._waiting.get()]
            while len(jobs) < _BATCH and not self._waiting.empty():
                jobs.append(self._waiting.get())
            closing = None in jobs
            work = [job for job in jobs if job is not None]
            if work:
                self._run_together(work)
        with contextlib.suppress(sqlite3.Error):  # on a full disk the log is folded into the file at the next start
            self._connection.close()

    def close(self) -> None:
        """Let the writer thread finish what was handed over, and end."""
        self._waiting.put(None)

    def _run_together(self, jobs: list[_Job]) -> None:
        while True:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                for job in jobs:
                    job.attempt(self._connection)
                self._connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                if not self.trouble:
                    _log.warning("the ledger cannot be written (%s); trying again every %g s", error, _RETRY_S)
                self.trouble = f"the ledger cannot be written: {error}"
                time.sleep(_RETRY_S)
                continue
            except sqlite3.Error as error:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                for job in jobs:
                    job.error = HostError(f"the ledger is damaged: {error}")
            break
        if self.trouble:
            _log.info("the ledger can be written again")
            self.trouble = ""
        for job in jobs:
            job.finish()


def number(value: Scalar) -> int:
    """A column that holds a whole number."""
    if not isinstance(value, int):
        raise TypeError(f"the ledger holds a {type(value).__name__} where a number belongs")
    return value


def real(value: Scalar) -> float:
    """A column that holds a real number."""
    if not isinstance(value, int | float):
        raise TypeError(f"the ledger holds a {type(value).__name__} where a real number belongs")
    return float(value)


def blob(value: Scalar) -> bytes:
    """A column that holds bytes."""
    if not isinstance(value, bytes):
        raise TypeError(f"the ledger holds a {type(value).__name__} where bytes belong")
    return value


class _Job:
    """A piece of work for the writer thread and the trio task that waits for it."""

    def __init__(
        self, work: Callable[[sqlite3.Connection], None], done: trio.Event, token: trio.lowlevel.TrioToken
    ) -> None:
        self._work = work
        self._token = token
        self.done = done
        self.error: Exception | None = None

    def attempt(self, connection: sqlite3.Connection) -> None:
        """Run inside the open transaction. A slip fails this job alone; a full disk or a damaged file fails all."""
        self.error = None
        connection.execute("SAVEPOINT job")
        try:
            self._work(connection)
        except Exception as error:
            if _is_of_the_disk(error):
                raise
            connection.execute("ROLLBACK TO job")
            self.error = error
        connection.execute("RELEASE job")

    def finish(self) -> None:
        """Wake the task that waits."""
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self.done.set)


def _is_of_the_disk(error: Exception) -> bool:
    """False for a slip of the statement. SQLite reports bad SQL and a full disk with one exception type."""
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_ERROR
    return type(error) is sqlite3.DatabaseError


@contextlib.asynccontextmanager
async def open_ledger(path: Path) -> AsyncIterator[Ledger]:
    """The ledger at ``path`` (created 0600 when missing), with its writer thread, until the block ends.

    Raises:
        HostError: the file is not a ledger of this version, is in use, or cannot be opened.
    """
    ledger = Ledger(await trio.to_thread.run_sync(_connect, path))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, ledger.write_until_closed)
        try:
            yield ledger
        finally:
            ledger.close()


def _connect(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600, exist_ok=True)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_BUSY_S)
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            connection.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={SCHEMA_VERSION};COMMIT;")
        elif version != SCHEMA_VERSION:
            raise HostError(f"the ledger {path} was written by another version of rollmesh (format {version})")
        connection.executescript(f"BEGIN IMMEDIATE;{_ADDED}COMMIT;")
        for table, (column, declaration) in _ADDED_COLUMNS.items():
            if column not in [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]:
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {declaration}")
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            raise HostError(f"the ledger {path} is in use by another process") from error
        raise HostError(f"the ledger {path} cannot be opened: {error}") from error
    except (sqlite3.Error, OSError) as error:
        raise HostError(f"the ledger {path} cannot be opened: {error}") from error
    return connection
