"""Files that are whole or not there, whatever the disk does in the middle."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from rollmesh_peer.weights import durable
from rollmesh_protocol.errors import HostError
from tests.unit.weights.kit import write


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    durable.write_file(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(HostError):
            durable.write_file(path, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_full_disk_is_told_in_words() -> None:
    with pytest.raises(HostError, match="the disk is full"), durable.disk_errors("nothing works"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_taking_a_file_links_where_it_can_and_copies_where_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", b"content")
    durable.take_file(source, tmp_path / "linked")
    assert (tmp_path / "linked").stat().st_ino == source.stat().st_ino

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(os, "link", refuse)
    durable.take_file(source, tmp_path / "copied")
    assert (tmp_path / "copied").read_bytes() == b"content"
    assert (tmp_path / "copied").stat().st_ino != source.stat().st_ino


@pytest.mark.parametrize("in_kernel", [True, False])
@pytest.mark.parametrize("size", [0, 1, durable.COPY_BYTES + 5])
def test_copies_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_kernel: bool, size: int) -> None:
    if not in_kernel:
        monkeypatch.setattr(durable, "_in_kernel", lambda *_: 0)
    content = os.urandom(size)
    durable.copy_bytes(write(tmp_path / "a", content), tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == content


def test_sweeping_removes_what_was_cut_off_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / ("state" + durable.UNFINISHED), b"half")
    write(tmp_path / "state", b"whole")
    durable.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
