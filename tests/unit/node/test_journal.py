"""The journal: the last results and their fate, bounded, private, written behind, about one run."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
import trio

from rollmesh_node import journal as journal_module
from rollmesh_node.journal import (
    ENTRY_BYTES,
    JOURNAL_BYTES,
    KEPT_RESULTS,
    WRITE_EVERY_S,
    Journal,
    read_journal,
    write_journal,
)
from rollmesh_protocol.errors import HostError
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import Standing
from rollmesh_protocol.rollout import Result, SampleResult, Segment, check_result
from tests.unit.node.leases import make_lease

PEER = "12D3KooWlearner"
OUT = Standing(state="quarantined", accepted=1, rejected=2, audited=3, reason="result.sampling")


def journal_in(folder: Path, *, run: str = "run-1") -> Journal:
    return Journal(folder / "journal", run=run, learner=PEER, clock=lambda: 1000.0)


def result_of(lease: Lease, *, logprob: float = -1.0) -> Result:
    samples = tuple(
        SampleResult(
            index=sample.index,
            tokens=np.full(lease.max_new_tokens, 7, "<u4").tobytes(),
            logprobs=np.full(lease.max_new_tokens, logprob, "<f4").tobytes(),
            finish="length",
            segments=(Segment(first_token=0, root=lease.root),),
        )
        for sample in lease.samples
    )
    return Result(lease_id=lease.lease_id, samples=samples, engine="test", generate_s=1.0)


def make(journal: Journal, **fields) -> Lease:
    lease = make_lease(**fields)
    journal.made(lease, result_of(lease))
    return lease


def saved(journal: Journal, folder: Path) -> Path:
    write_journal(folder / "journal", journal.notes)
    return folder / "journal"


def test_a_result_and_its_fate_are_read_again(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    lease = make_lease()
    journal.made(lease, result_of(lease, logprob=float("nan")))
    assert journal.notes.entries[0].answer is None
    journal.answered(lease.lease_id, code="result.logprob", detail="not a number", by="node")
    journal.answered(b"x" * 16, code="lease.unknown")  # of nothing that is kept
    path = saved(journal, tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    notes = read_journal(path)
    assert notes == journal.notes and notes is not None
    (entry,) = notes.entries
    assert entry.lease == lease and entry.is_refused and entry.answer is not None and entry.answer.by == "node"
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


def test_results_go_oldest_first_and_refused_ones_have_room_of_their_own(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    bad = make(journal)
    journal.answered(bad.lease_id, code="result.sampling")
    others = [make(journal) for _ in range(KEPT_RESULTS + 5)]
    kept = [entry.lease.lease_id for entry in journal.notes.entries]
    assert kept == [bad.lease_id, *(lease.lease_id for lease in others[5:])]
    for lease in others:
        journal.answered(lease.lease_id, code="lease.expired")
    assert len(journal.notes.entries) == KEPT_RESULTS


def test_bytes_are_bounded_and_of_a_large_result_the_first_samples_are_kept(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    for _ in range(KEPT_RESULTS):
        lease = make(journal, samples=64, max_new_tokens=4096)
    entries = journal.notes.entries
    assert sum(entry.num_bytes for entry in entries) <= JOURNAL_BYTES
    assert entries[-1].lease.lease_id == lease.lease_id and ENTRY_BYTES // 2 < entries[-1].num_bytes <= ENTRY_BYTES
    rollouts = check_result(entries[-1].result, entries[-1].lease, vocabulary=100, stop_tokens=frozenset({2}))
    assert 1 < len(rollouts) < 64
    assert saved(journal, tmp_path).stat().st_size < JOURNAL_BYTES + 100_000


def test_one_huge_sample_is_kept_whole(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    make(journal, samples=2, max_new_tokens=32_768, prompt_tokens=32_768)
    (entry,) = journal.notes.entries
    assert len(entry.result.samples) == len(entry.lease.samples) == 1


def test_another_run_begins_afresh_and_the_same_one_goes_on(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    make(journal)
    journal.regarded(OUT)
    saved(journal, tmp_path)
    assert journal_in(tmp_path).notes == journal.notes
    assert journal_in(tmp_path, run="run-2").notes.entries == ()


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"", lambda raw: raw[:40] + b"?" + raw[41:]])
def test_a_damaged_file_is_said_to_be_and_does_not_stop_the_node(tmp_path: Path, damage) -> None:
    journal = journal_in(tmp_path)
    make(journal)
    path = saved(journal, tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(HostError, match="damaged"):
        read_journal(path)
    assert journal_in(tmp_path).notes.entries == ()
    assert read_journal(tmp_path / "none") is None


async def test_notes_are_written_behind_at_intervals_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock
) -> None:
    written: list[tuple[float, int]] = []
    write = journal_module.write_journal

    def watched(file: Path, notes) -> None:
        written.append((began[0], len(notes.entries)))
        write(file, notes)

    async def inline(function) -> None:  # a virtual clock does not wait for threads
        function()

    began = [0.0]
    monkeypatch.setattr(journal_module, "write_journal", watched)
    monkeypatch.setattr(trio.to_thread, "run_sync", inline)
    journal = journal_in(tmp_path)
    standing: list[Standing | None] = [None]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.run, lambda: standing[0])
        for number in range(12):
            began[0] = float(number)
            make(journal)
            await trio.sleep(1)
        assert [count for _, count in written] == [1, 6, 11]
        assert [when for when, _ in written] == [0, WRITE_EVERY_S, 2 * WRITE_EVERY_S]
        await trio.sleep(20)
        quiet = len(written)
        await trio.sleep(60)
        assert len(written) == quiet  # nothing new
        standing[0] = OUT
        await trio.sleep(2 * WRITE_EVERY_S)
        assert len(written) == quiet + 1
        standing[0] = OUT.model_copy(update={"rejected": 3})
        await trio.sleep(2 * WRITE_EVERY_S)
        assert len(written) == quiet + 1  # other counts wait for other news
        make(journal)
        await trio.sleep(1)
        make(journal)
        nursery.cancel_scope.cancel()
    notes = read_journal(tmp_path / "journal")
    assert notes == journal.notes and notes is not None and len(notes.entries) == 14
    assert notes.standing is not None and notes.standing.rejected == 3


async def test_a_full_disk_costs_the_notes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock
) -> None:
    def full(file: Path, notes) -> None:
        raise HostError("the journal cannot be written: the disk is full")

    monkeypatch.setattr(journal_module, "write_journal", full)
    journal = journal_in(tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.run, lambda: None)
        make(journal)
        await trio.sleep(3 * WRITE_EVERY_S)
        nursery.cancel_scope.cancel()
    assert len(journal.notes.entries) == 1
