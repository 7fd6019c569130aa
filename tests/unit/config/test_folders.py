"""Where things lie, and who may get at them."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from rollmesh_peer import folders
from rollmesh_protocol.errors import HostError


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def environ(tmp_path):
    return {"ROLLMESH_HOME": str(tmp_path / "home")}


def test_the_data_folder_is_chosen_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folders.data_folder({}) == tmp_path / ".local/share/rollmesh"
    assert folders.data_folder({"XDG_DATA_HOME": "relative/is/ignored"}) == tmp_path / ".local/share/rollmesh"
    shared = {"XDG_DATA_HOME": str(tmp_path / "xdg")}
    assert folders.data_folder(shared) == tmp_path / "xdg/rollmesh"
    assert folders.data_folder({**shared, "ROLLMESH_HOME": "~/own"}) == tmp_path / "own"


def test_folders_are_made_private(environ):
    for path in (
        folders.data_folder(environ),
        folders.run_folder("demo", environ=environ),
        folders.node_folder(environ=environ),
        folders.models_folder(environ=environ),
    ):
        assert mode(path) == 0o700


def test_a_folder_that_was_there_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    assert mode(folders.private_folder(tmp_path)) == 0o755


@pytest.mark.parametrize("loose", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_may_write_into_is_refused(tmp_path, loose):
    tmp_path.chmod(loose)
    with pytest.raises(HostError, match="others may write into the folder .*: run chmod go-w"):
        folders.private_folder(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_of_another_user_is_refused(tmp_path):
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(HostError, match="belongs to another user"):
        folders.private_folder(tmp_path)


def test_a_file_in_the_way_is_told(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(HostError, match="cannot be used: (Not a directory|File exists)"):
        folders.private_folder(tmp_path / "x" / "y")
    with pytest.raises(HostError, match="cannot be used: File exists"):
        folders.private_folder(tmp_path / "x")


def test_looking_for_daemons_makes_nothing(tmp_path, environ):
    assert folders.control_sockets(environ=environ) == []
    assert list(tmp_path.iterdir()) == []


def test_a_daemon_is_found_by_its_socket(tmp_path, environ):
    path = folders.control_socket("node", tmp_path / "state", environ=environ)
    assert mode(path.parent) == 0o700
    assert path == folders.control_socket("node", tmp_path / "x" / ".." / "state", environ=environ)
    assert path != folders.control_socket("learner", tmp_path / "state", environ=environ)
    assert path != folders.control_socket("node", tmp_path / "other", environ=environ)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.with_suffix(".txt").write_text("no socket")
        assert folders.control_sockets(environ=environ) == [path]


@pytest.fixture
def short():
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        yield Path(folder)


def test_sockets_of_a_deep_data_folder_can_still_be_bound(tmp_path, short, monkeypatch):
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(short))
    environ = {"ROLLMESH_HOME": str(tmp_path / ("deep" * 40))}
    path = folders.control_socket("learner", tmp_path, environ=environ)
    assert short in path.parents
    assert mode(path.parent) == mode(path.parent.parent) == 0o700
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert folders.control_sockets(environ=environ) == [path]
