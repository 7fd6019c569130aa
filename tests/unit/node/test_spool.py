"""The spool: a result stays byte for byte until its receipt, over restarts and crashes in the middle of a write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rollmesh_node import spool as spool_module
from rollmesh_node.spool import Spool
from rollmesh_protocol.errors import HostError


def test_a_result_survives_a_restart_byte_for_byte(tmp_path: Path) -> None:
    Spool(tmp_path / "s").put(b"a" * 16, b"\x00sealed\xff")
    again = Spool(tmp_path / "s")
    assert again.pending() == (b"a" * 16,)
    assert again.get(b"a" * 16) == b"\x00sealed\xff"
    again.drop(b"a" * 16)
    assert again.pending() == () and again.get(b"a" * 16) is None
    again.drop(b"a" * 16)  # twice is no harm
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700


def test_the_oldest_is_sent_first(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for serial, mtime in ((b"\x03", 30), (b"\x01", 10), (b"\x02", 20)):
        spool.put(serial * 16, serial)
        os.utime(tmp_path / f"{(serial * 16).hex()}.result", (mtime, mtime))
    assert spool.pending() == (b"\x01" * 16, b"\x02" * 16, b"\x03" * 16)


def test_a_write_that_was_cut_off_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "00ff.result.new").write_bytes(b"half")
    (tmp_path / "not hex.result").write_bytes(b"somebody else's file")
    assert Spool(tmp_path).pending() == ()
    assert not (tmp_path / "00ff.result.new").exists()


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path)
    monkeypatch.setattr(spool_module, "free_bytes", lambda folder: 3)
    with pytest.raises(HostError, match="full"):
        spool.put(b"a" * 16, b"four")
    spool.put(b"a" * 16, b"thr")


def test_the_spool_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "MAX_RESULTS", 2)
    spool = Spool(tmp_path)
    spool.put(b"a" * 16, b"1")
    spool.put(b"b" * 16, b"2")
    with pytest.raises(HostError, match="wait for the learner already"):
        spool.put(b"c" * 16, b"3")
