"""Which folders an answer may read, and the sentences about how it is held."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from rollmesh_peer.children.confinement import AnswerLimits, Protections, readable_paths
from rollmesh_peer.children.scoring import Confinement
from rollmesh_protocol.errors import UsageError


def covers(paths: tuple[str, ...], wanted: Path) -> bool:
    return any(wanted.is_relative_to(path) for path in paths)


def test_pythons_own_folders_are_readable_and_homes_are_not(tmp_path: Path) -> None:
    paths = readable_paths(())
    assert covers(paths, Path(sysconfig.get_path("stdlib")))
    assert covers(paths, Path(sysconfig.get_path("purelib")))
    assert not covers(paths, tmp_path)
    assert not covers(paths, Path("/etc/passwd"))
    assert not covers(paths, Path("/"))
    assert all(path not in paths for path in ("/", "/home", "/root", "/etc", "/tmp", "/var"))


def test_none_lies_in_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "inner"), str(tmp_path)])
    paths = readable_paths(())
    assert str(tmp_path) in paths
    assert all(not Path(one).is_relative_to(other) for one in paths for other in paths if one != other)


def test_a_folder_that_holds_something_hidden_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, run = tmp_path / "code", tmp_path / "code" / "runs" / "one"
    run.mkdir(parents=True)
    alias = tmp_path / "alias"
    alias.symlink_to(code)
    monkeypatch.setattr(sys, "path", [*sys.path, str(code), str(alias)])
    assert covers(readable_paths(()), run)
    for hidden in (run, code, alias / "runs", tmp_path):
        seen = readable_paths([str(hidden)])
        assert covers(seen, run) == (hidden == tmp_path), hidden
        assert not covers(seen, alias) or hidden == tmp_path
    # A folder of the import path inside the hidden one is what the operator put on the path.
    assert covers(readable_paths([str(tmp_path)]), code)


def test_missing_entries_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "not there"), ""])
    assert not covers(readable_paths(()), tmp_path / "not there")


def test_each_layer_is_active_or_missing_with_a_reason() -> None:
    def refuse() -> None:
        raise PermissionError(1, "Operation not permitted")

    done = Protections()
    assert done.attempt("one", lambda: None)
    assert not done.attempt("two", refuse)
    assert (done.active, done.missing) == (["one"], {"two": "[Errno 1] Operation not permitted"})


def test_confinement_is_a_sentence() -> None:
    good = Confinement(active=("namespaces", "seccomp"), missing={}, holes=())
    assert str(good) == "answers are held by namespaces, seccomp"
    poor = Confinement(active=(), missing={"seccomp": "no"}, holes=("open a socket",))
    assert str(poor) == "answers are held by nothing; missing: seccomp (no); they can still open a socket"


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"cpu_s": 1, "wall_s": 1},
        {"cpu_s": 0, "wall_s": 1, "memory_bytes": 1},
        {"cpu_s": 1, "wall_s": -1.0, "memory_bytes": 1},
        {"cpu_s": 1.5, "wall_s": 1, "memory_bytes": 1},
    ],
)
def test_limits_are_checked(plain: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        AnswerLimits.from_plain(plain)


@pytest.mark.parametrize(
    ("active", "words"),
    [
        ("namespaces, empty root, landlock, other user, limits, seccomp", []),
        ("landlock, limits, seccomp", ["seccomp alone keeps it"]),
        ("namespaces, empty root, limits, seccomp", []),
        ("limits, seccomp", ["that this user can read", "seccomp alone keeps it"]),
        ("other user, limits, seccomp", ["that is open to everybody", "seccomp alone keeps it"]),
        ("landlock, limits", ["every system call", "use the network"]),
        ("namespaces, empty root, limits", ["every system call"]),
        ("", ["that this user can read", "every system call", "use the network", "only the clock"]),
    ],
)
def test_what_missing_layers_leave_open_is_said(active: str, words: list[str]) -> None:
    layers = tuple(name for name in active.split(", ") if name)
    gaps = Confinement(active=layers, missing={}, holes=()).gaps
    assert len(gaps) == len(words)
    assert all(word in gap for word, gap in zip(words, gaps, strict=True))
