"""The node's command line: what it prints, and one sentence for what is wrong."""

from __future__ import annotations

import io
import json
import tomllib

import pytest

from rollmesh_node.cli import JOIN_ENV
from rollmesh_peer.command import main
from rollmesh_peer.keys import EXPORT_PREFIX, load_key


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMESH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(JOIN_ENV, raising=False)
    return tmp_path / "home"


def node(*words: str) -> int:
    return main(["node", *words])


def test_the_id_is_made_once_and_printed(home, capsys) -> None:
    assert node("id") == 0
    printed = capsys.readouterr().out.strip()
    assert printed == load_key(home / "node" / "key").peer
    assert node("id") == 0
    assert capsys.readouterr().out.strip() == printed


def test_a_key_moves_to_another_folder(tmp_path, capsys, monkeypatch) -> None:
    node("id")
    node("key", "export")
    peer, exported = capsys.readouterr().out.split()
    assert exported.startswith(EXPORT_PREFIX)
    monkeypatch.setattr("sys.stdin", io.StringIO(exported + "\n"))
    assert node("key", "import", "--folder", str(tmp_path / "moved")) == 0
    assert capsys.readouterr().out.strip() == peer
    assert node("id", "--folder", str(tmp_path / "moved")) == 0
    assert capsys.readouterr().out.strip() == peer


def test_a_broken_import_is_one_sentence(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert node("key", "import") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_resolved_configuration_loads_again(tmp_path, capsys) -> None:
    assert node("run", "--check-config", "--set", "engine.threads=3", "--set", "node.role=seed") == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["engine"]["threads"] == 3
    file = tmp_path / "node.toml"
    file.write_text(printed)
    assert node("run", "--check-config", "--config", str(file)) == 0
    assert tomllib.loads(capsys.readouterr().out)["node"]["role"] == "seed"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run"], "give the join line"),
        (["run", "--join", ""], "give the join line"),
        (["run", "--join", "nonsense"], "nonsense"),
        (["run", "--set", "engine.treads=3"], "threads"),
        (["run", "--config", "/nowhere.toml"], "cannot be read"),
    ],
)
def test_mistakes_are_one_sentence_and_status_two(words, sentence, capsys) -> None:
    assert node(*words) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.startswith("rollmesh: ") and told.count("\n") == 1


def test_a_selfcheck_before_the_first_run_says_why_it_cannot_be(capsys) -> None:
    assert node("selfcheck") == 2
    told = " ".join(capsys.readouterr().out.split())
    assert "there is nothing to check" in told and "has not taken part in any run yet" in told
    assert node("selfcheck", "--json", "--tokens", "0") == 2
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "unchecked" and len(report["notes"]) == 1


def test_the_join_line_may_come_from_the_environment(capsys, monkeypatch) -> None:
    monkeypatch.setenv(JOIN_ENV, "broken/line")
    assert node("run") == 2
    assert "broken/line" in capsys.readouterr().err
