"""The place in memory: private, one owner, reclaimed after a kill, and honest about room."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh_peer import free_memory
from rollmesh_peer.weights import durable, ram
from rollmesh_peer.weights.ram import Place, memory_left, open_place
from rollmesh_protocol.errors import HostError

HOLDER = """
import sys, time
from pathlib import Path
from rollmesh_peer.weights.ram import open_place
with open_place(Path(sys.argv[1]), ram_folder=Path(sys.argv[2]), needed_bytes=1000) as place:
    (place.folder / "image").write_bytes(b"x" * 1000)
    print(place.folder, flush=True)
    time.sleep(60)
"""


def hold(data: Path, memory: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another process with a place of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(data), str(memory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def test_a_place_is_private_and_gone_afterwards(data: Path, memory: Path) -> None:
    with open_place(data, ram_folder=memory, needed_bytes=1000) as place:
        assert place.is_memory
        assert place.folder.is_relative_to(memory)
        for folder in (place.folder, place.folder.parent):
            assert folder.stat().st_mode & 0o777 == 0o700
        (place.folder / "image").write_bytes(b"x")
    assert not place.folder.exists()


def test_what_a_killed_process_left_is_reclaimed_by_any_other(data: Path, memory: Path, tmp_path: Path) -> None:
    process, place = hold(data, memory)
    try:
        with open_place(tmp_path, ram_folder=memory, needed_bytes=1):
            assert (place / "image").exists()  # its owner lives
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (place / "image").exists()
        with open_place(tmp_path, ram_folder=memory, needed_bytes=1):
            assert not place.exists()
    finally:
        process.kill()
        process.wait()


def test_a_place_starts_empty_for_the_next_owner(data: Path, memory: Path) -> None:
    process, place = hold(data, memory)
    process.kill()
    process.wait()
    with open_place(data, ram_folder=memory, needed_bytes=1) as mine:
        assert mine.folder == place
        assert not (place / "image").exists()


def test_two_processes_with_one_data_folder_collide_in_words(data: Path, memory: Path) -> None:
    process, _ = hold(data, memory)
    try:
        with (
            pytest.raises(HostError, match="another process uses"),
            open_place(data, ram_folder=memory, needed_bytes=1),
        ):
            pytest.fail("two owners")
    finally:
        process.kill()
        process.wait()


def test_without_memory_the_disk_is_used_and_said_so(
    data: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beyond = shutil.disk_usage(memory).total
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(durable, "free_bytes", lambda folder: 2 * beyond)
        with open_place(data, ram_folder=memory, needed_bytes=beyond) as place:
            assert not place.is_memory
            assert place.folder.is_relative_to(data)
    assert "on disk instead of in memory" in caplog.text
    assert "GiB" in caplog.text
    assert not place.folder.exists()


def test_the_disk_can_be_asked_for(data: Path) -> None:
    with open_place(data, ram_folder=None, needed_bytes=1000) as place:
        assert not place.is_memory


def test_on_a_disk_the_named_files_survive_and_nothing_else(data: Path, memory: Path) -> None:
    def opened(ram_folder: Path | None = None) -> contextlib.AbstractContextManager[Place]:
        return open_place(data, ram_folder=ram_folder, needed_bytes=1000, kept=("image", "log"))

    with opened() as place:
        (place.folder / "image").write_bytes(b"x" * 1000)
        (place.folder / "other").write_bytes(b"y")
    assert {file.name for file in place.folder.iterdir()} == {"image", "lock"}
    (place.folder / "left-by-a-kill").mkdir()
    with opened():
        assert (place.folder / "image").read_bytes() == b"x" * 1000
        assert {file.name for file in place.folder.iterdir()} == {"image", "lock"}
        (place.folder / "image").unlink()
    assert not place.folder.exists()
    with opened() as place:
        (place.folder / "image").write_bytes(b"x")
    with opened(memory) as mine:
        assert not place.folder.exists()
        (mine.folder / "image").write_bytes(b"x")
    assert not mine.folder.exists()
    with opened(memory) as mine:
        assert not (mine.folder / "image").exists()


def test_what_is_there_already_needs_no_room(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "free_bytes", lambda folder: 500)
    with (
        pytest.raises(HostError, match="no room"),
        open_place(data, ram_folder=None, needed_bytes=1000, kept=("image",)),
    ):
        pytest.fail("let in")
    (data / "working").mkdir()
    (data / "working" / "image").write_bytes(b"x" * 600)
    with open_place(data, ram_folder=None, needed_bytes=1000, kept=("image",)) as place:
        assert (place.folder / "image").exists()


def test_a_missing_memory_folder_is_no_reason_to_fail(data: Path, tmp_path: Path) -> None:
    with open_place(data, ram_folder=tmp_path / "nowhere", needed_bytes=1000) as place:
        assert not place.is_memory


def test_too_little_of_both_is_refused_with_numbers(data: Path, memory: Path) -> None:
    with (
        pytest.raises(HostError, match=r"no room for weights of \d+\.\d\d GiB: .* are free; .* free"),
        open_place(data, ram_folder=memory, needed_bytes=1 << 60),
    ):
        pytest.fail("let in")


def test_a_folder_that_others_may_write_into_is_not_trusted(data: Path, memory: Path) -> None:
    home = memory / f"rollmesh-{os.getuid()}"
    home.mkdir()
    home.chmod(0o777)
    with open_place(data, ram_folder=memory, needed_bytes=1000) as place:
        assert not place.is_memory


def test_the_smallest_bound_counts(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < memory_left(memory) <= shutil.disk_usage(memory).free
    group = tmp_path / "cgroup"
    group.mkdir()
    (group / "memory.max").write_text(f"{ram.SPARE_BYTES + 5000}\n")
    (group / "memory.current").write_text("2000\n")
    monkeypatch.setattr(free_memory, "_CGROUP", group)
    assert memory_left(memory) == 3000
    (group / "memory.max").write_text("max\n")
    assert memory_left(memory) > 3000
