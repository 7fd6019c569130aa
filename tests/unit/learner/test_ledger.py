"""The ledger's promises: durable before told, a slip is one job's alone, and a disk without room is waited for."""

from __future__ import annotations

import shutil
import sqlite3
import stat
from pathlib import Path

import pytest
import trio
import trio.testing

from rollmesh_learner.records.ledger import SCHEMA_VERSION, Ledger, Statement, blob, number, open_ledger, real
from rollmesh_protocol.errors import HostError


def _put(name: str, value: bytes = b"x") -> Statement:
    return Statement("INSERT INTO meta (name, value) VALUES (?, ?)", (name, value))


def _as_after_a_kill(path: Path, target: Path) -> list[str]:
    """What a ledger that is killed now would hold: its files as they are, opened somewhere else."""
    for suffix in ("", "-wal"):
        if Path(f"{path}{suffix}").exists():
            shutil.copyfile(f"{path}{suffix}", f"{target}{suffix}")
    with sqlite3.connect(target) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM meta ORDER BY name")]


async def test_what_was_committed_is_in_the_files_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.sqlite"
    async with open_ledger(path) as ledger:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for count in range(5):
            await ledger.commit(_put(f"{count}"), _put(f"{count}b"))
            held = _as_after_a_kill(path, tmp_path / f"copy-{count}.sqlite")
            assert held == sorted(f"{n}{letter}" for n in range(count + 1) for letter in ("", "b"))
    async with open_ledger(path) as ledger:
        assert await ledger.fetch("SELECT count(*) FROM meta") == [(10,)]


async def test_many_writers_share_a_transaction(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    begun = 0

    def count(statement: str) -> None:
        nonlocal begun
        begun += statement.startswith("BEGIN")

    async with open_ledger(path) as ledger:
        ledger._connection.set_trace_callback(count)
        async with trio.open_nursery() as nursery:
            for number_ in range(500):
                nursery.start_soon(ledger.commit, _put(f"{number_:03}"))
        assert len(await ledger.fetch("SELECT * FROM meta")) == 500
        assert begun <= 500 / 64 + 12, "almost every transaction carries a full load of jobs"


async def test_a_wrong_statement_fails_its_own_job_whole_and_no_other(tmp_path: Path) -> None:
    slips: list[type[Exception]] = []

    async def slip(ledger: Ledger, statement: Statement) -> None:
        try:
            await ledger.commit(_put(f"beside {statement.sql}"), statement)
        except (sqlite3.Error, OverflowError) as error:
            slips.append(type(error))

    async with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        await ledger.commit(_put("taken"))
        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(ledger.commit, _put(name))
            nursery.start_soon(slip, ledger, Statement("this is no SQL"))
            nursery.start_soon(slip, ledger, _put("taken"))
            nursery.start_soon(slip, ledger, Statement("INSERT INTO steps VALUES (?, 'final', 0, NULL)", (1 << 70,)))
            nursery.start_soon(slip, ledger, Statement("INSERT INTO steps VALUES (1, 'no such state', 0, NULL)"))
            for name in "def":
                nursery.start_soon(ledger.commit, _put(name))
        assert sorted(name for (name,) in await ledger.fetch("SELECT name FROM meta")) == [*"abcdef", "taken"]
        assert ledger.trouble == ""
    assert sorted(slip.__name__ for slip in slips) == [
        "IntegrityError", "IntegrityError", "OperationalError", "OverflowError",
    ]  # fmt: skip


async def test_a_query_sees_what_was_handed_over_before_it(tmp_path: Path) -> None:
    async with open_ledger(tmp_path / "ledger.sqlite") as ledger, trio.open_nursery() as nursery:
        nursery.start_soon(ledger.commit, _put("before"))
        await trio.testing.wait_all_tasks_blocked()
        assert await ledger.fetch("SELECT name FROM meta") == [("before",)]


async def test_a_cancelled_caller_leaves_a_whole_transaction(tmp_path: Path) -> None:
    async with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        with trio.CancelScope() as scope:
            scope.cancel()
            await ledger.commit(_put("one"), _put("two"))
        assert len(await ledger.fetch("SELECT * FROM meta")) == 2


async def test_a_disk_without_room_is_waited_for_and_nothing_is_told_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's own limit on pages stands for the disk: the same error, from the same places."""
    monkeypatch.setattr("rollmesh_learner.records.ledger._RETRY_S", 0.01)
    done: list[str] = []

    async def write(ledger: Ledger, name: str, size: int) -> None:
        await ledger.commit(_put(name, bytes(size)))
        done.append(name)

    async with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        ((pages,),) = await ledger.fetch("PRAGMA page_count")
        await ledger.fetch(f"PRAGMA max_page_count = {number(pages) + 2}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, ledger, "large", 1_000_000)
            nursery.start_soon(write, ledger, "small", 10)
            with trio.fail_after(10):
                while not ledger.trouble:
                    await trio.sleep(0.01)
            assert "full" in ledger.trouble
            await trio.sleep(0.1)
            assert done == [], "a job in the transaction that failed was told that it is done"
            ledger._connection.execute("PRAGMA max_page_count = 100000")  # as when others delete files
        assert sorted(done) == ["large", "small"]
        assert ledger.trouble == ""
        assert len(await ledger.fetch("SELECT * FROM meta")) == 2


async def test_a_ledger_in_use_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh_learner.records.ledger._BUSY_S", 0.1)
    path = tmp_path / "ledger.sqlite"
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(HostError, match="in use by another process"):
        async with open_ledger(path):
            pytest.fail("opened")
    holder.close()


@pytest.mark.parametrize("content", [b"this is no database" * 100, b""])
async def test_a_file_that_is_no_ledger(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(content)
    if not content:  # what a kill between the file's creation and its first page leaves
        async with open_ledger(path) as ledger:
            await ledger.commit(_put("fine"))
        return
    with pytest.raises(HostError, match="cannot be opened"):
        async with open_ledger(path):
            pytest.fail("opened")


async def test_a_ledger_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(HostError, match="another version of rollmesh"):
        async with open_ledger(path):
            pytest.fail("opened")


async def test_a_file_that_is_damaged_under_way_ends_waits_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    async with open_ledger(path) as ledger:
        await ledger.commit(*(_put(f"{count}", bytes(3000)) for count in range(50)))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    async with open_ledger(path) as ledger:
        for _ in range(2):
            with pytest.raises(HostError, match="damaged"), trio.fail_after(10):
                await ledger.commit(_put("more"))


def test_columns_of_the_wrong_type_are_told() -> None:
    assert (number(3), real(3), real(0.5), blob(b"x")) == (3, 3.0, 0.5, b"x")
    for read, value in ((number, 0.5), (number, None), (real, "1"), (blob, "x")):
        with pytest.raises(TypeError):
            read(value)
