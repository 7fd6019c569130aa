"""The key file: made once, private, locked, moved between machines, and never trusted when others may have it."""

from __future__ import annotations

import logging
import multiprocessing
import stat
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rollmesh_peer.keys import EXPORT_PREFIX, create_key, export_key, hold_key, import_key, load_key
from rollmesh_protocol.errors import HostError, UsageError
from rollmesh_protocol.identity import Identity


def _path(tmp_path: Path) -> Path:
    return tmp_path / "node" / "key"


def test_a_key_is_made_once_and_stays_the_same(tmp_path: Path) -> None:
    path = _path(tmp_path)
    with hold_key(path) as first:
        pass
    with hold_key(path) as second:
        assert second.peer == first.peer
    assert path.read_bytes() == first.seed
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]  # no drafts are left


def test_two_new_keys_differ(tmp_path: Path) -> None:
    assert create_key(tmp_path / "a" / "key") and create_key(tmp_path / "b" / "key")
    assert load_key(tmp_path / "a" / "key").peer != load_key(tmp_path / "b" / "key").peer


def _hold(path: Path, pipe: Connection) -> None:
    with hold_key(path):
        pipe.send("held")
        pipe.recv()


def test_a_second_daemon_with_the_same_key_is_told_so_and_a_killed_one_frees_it(tmp_path: Path) -> None:
    path = _path(tmp_path)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=_hold, args=(path, theirs))
    other.start()
    try:
        assert ours.poll(30) and ours.recv() == "held"
        with pytest.raises(HostError, match="another rollmesh daemon already uses this key") as caught, hold_key(path):
            pass
        assert str(path) in caught.value.detail
        assert load_key(path).peer  # looking is allowed
    finally:
        other.kill()
        other.join(10)
    with hold_key(path):
        pass


def test_the_lock_ends_with_the_block(tmp_path: Path) -> None:
    path = _path(tmp_path)
    with hold_key(path), pytest.raises(HostError), hold_key(path):
        pass
    with hold_key(path):
        pass


def test_a_key_that_others_can_read_is_mended_with_a_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _path(tmp_path)
    create_key(path)
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING), hold_key(path):
        pass
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "others could read the key file" in caplog.text


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33, b"x" * 4096])
def test_another_file_is_not_taken_for_a_key(tmp_path: Path, content: bytes) -> None:
    path = _path(tmp_path)
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(HostError, match="is not a key file"), hold_key(path):
        pass
    assert path.read_bytes() == content


def test_a_link_and_a_folder_are_not_followed(tmp_path: Path) -> None:
    create_key(tmp_path / "elsewhere")
    path = _path(tmp_path)
    path.parent.mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostError, match="cannot be read"), hold_key(path):
        pass
    path.unlink()
    path.mkdir()
    with pytest.raises(HostError, match="is not a key file"), hold_key(path):
        pass


def test_loading_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="there is no key file"):
        load_key(tmp_path / "key")
    assert list(tmp_path.iterdir()) == []


def test_a_key_moves_to_another_machine(tmp_path: Path) -> None:
    create_key(tmp_path / "old")
    text = export_key(tmp_path / "old")
    assert text.startswith(EXPORT_PREFIX) and "\n" not in text
    moved = import_key(tmp_path / "new" / "key", text=f"  {text}\n")
    assert moved.peer == load_key(tmp_path / "old").peer == load_key(tmp_path / "new" / "key").peer
    assert import_key(tmp_path / "new" / "key", text=text).peer == moved.peer  # again is no harm


def test_an_import_never_replaces_another_key(tmp_path: Path) -> None:
    create_key(tmp_path / "mine")
    create_key(tmp_path / "other")
    before = (tmp_path / "mine").read_bytes()
    with pytest.raises(HostError, match="already holds the key of"):
        import_key(tmp_path / "mine", text=export_key(tmp_path / "other"))
    assert (tmp_path / "mine").read_bytes() == before


def test_every_single_mistyped_letter_of_an_export_is_noticed(tmp_path: Path) -> None:
    create_key(tmp_path / "key")
    text = export_key(tmp_path / "key")
    for position in range(len(EXPORT_PREFIX), len(text)):
        letter = "A" if text[position] != "A" else "B"
        with pytest.raises(UsageError):
            import_key(tmp_path / "new", text=text[:position] + letter + text[position + 1 :])
    for broken in ("", "hello", EXPORT_PREFIX, text[:-1], text + "A", EXPORT_PREFIX + "é" * 48):
        with pytest.raises(UsageError):
            import_key(tmp_path / "new", text=broken)
    assert not (tmp_path / "new").exists()


def test_the_key_signs_as_its_peer(tmp_path: Path) -> None:
    with hold_key(_path(tmp_path)) as identity:
        assert identity.peer == Identity(_path(tmp_path).read_bytes()).peer
