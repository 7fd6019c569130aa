"""The command line over real processes, with a sub-command that a test installs beside the true ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest

PROBE = '''
"""Does what the test says.

More about it."""
import sys
from rollmesh_protocol.errors import HostError, Refused, UsageError

def add_parser(subparsers):
    parser = subparsers.add_parser("probe", description="a probe")
    parser.add_argument("what")
    parser.add_argument("--loud", action="store_true")

def run(arguments):
    match arguments.what:
        case "usage":
            raise UsageError("one thing\\nand another")
        case "host":
            raise HostError("the disk is full")
        case "refused":
            raise Refused("run.full")
        case "unknown-code":
            raise Refused("code.of.the.future", "in words")
        case "interrupt":
            raise KeyboardInterrupt
        case "group":
            raise BaseExceptionGroup("", [ExceptionGroup("", [HostError("in a nursery")]), KeyboardInterrupt()])
        case "interrupted-group":
            raise BaseExceptionGroup("", [BaseExceptionGroup("", [KeyboardInterrupt()])])
        case "bug":
            raise ExceptionGroup("", [HostError("told"), ZeroDivisionError("a bug")])
        case "many":
            for number in range(100_000):
                print(number)
        case "loaded":
            print([name for name in sys.modules if name.partition(".")[0] in ("torch", "trio", "rollmesh_node")])
        case status:
            return int(status)
    return 0
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    (folder / "probe_command.py").write_text(PROBE.strip())
    entry = folder / "rollprobe-1.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: rollprobe\nVersion: 1\n")
    (entry / "entry_points.txt").write_text(
        textwrap.dedent("""\
        [rollmesh.commands]
        probe = probe_command
        broken = rollmesh_of_the_future.cli
        poor = poor_command
        """)
    )
    (folder / "poor_command.py").write_text("import torch_of_the_future")
    return folder


@pytest.fixture
def rollmesh(place):
    def rollmesh(*words, **options):
        return subprocess.run(
            [sys.executable, "-m", "rollmesh_peer.command", *words],
            env={**os.environ, "PYTHONPATH": str(place), "COLUMNS": "100"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **options,
        )

    return rollmesh


def test_version_and_help_import_no_command(rollmesh):
    from importlib.metadata import version

    assert rollmesh("--version").stdout == f"rollmesh {version('rollmesh')}\n"
    told = rollmesh("--help")
    assert told.returncode == 0
    assert re.search(r"^  probe +Does what the test says\.$", told.stdout, re.MULTILINE)
    assert re.search(r"^  broken$", told.stdout, re.MULTILINE)


def test_without_words_the_help_is_an_error(rollmesh):
    told = rollmesh()
    assert told.returncode == 2
    assert told.stdout == ""
    assert "commands:" in told.stderr


@pytest.mark.parametrize("words", [["nonsense"], ["--nonsense"], ["probe"], ["probe", "0", "--quiet"]])
def test_wrong_words_end_with_2(rollmesh, words):
    told = rollmesh(*words)
    assert told.returncode == 2
    assert told.stderr.startswith("usage: rollmesh")


def test_a_command_gets_its_own_arguments(rollmesh):
    assert "--loud" in rollmesh("probe", "--help").stdout
    assert [rollmesh("probe", status).returncode for status in ("0", "7")] == [0, 7]


def test_only_the_command_that_was_asked_for_is_imported(rollmesh):
    assert rollmesh("probe", "loaded").stdout == "[]\n"


@pytest.mark.parametrize(
    ("what", "status", "lines"),
    [
        ("usage", 2, ["rollmesh: one thing", "rollmesh: and another"]),
        ("host", 1, ["rollmesh: the disk is full"]),
        (
            "refused",
            1,
            ["rollmesh: the run has all the nodes that it takes", "rollmesh: (run.full) wait; it is tried again"],
        ),
        ("unknown-code", 1, ["rollmesh: in words"]),
        ("interrupt", 130, []),
        ("group", 1, ["rollmesh: in a nursery"]),
        ("interrupted-group", 130, []),
    ],
)
def test_errors_become_sentences_and_a_status(rollmesh, what, status, lines):
    told = rollmesh("probe", what)
    assert (told.returncode, told.stderr.splitlines()) == (status, lines)


def test_a_bug_keeps_its_traceback(rollmesh):
    told = rollmesh("probe", "bug")
    assert told.returncode == 1
    assert "ZeroDivisionError: a bug" in told.stderr
    assert "Traceback" in told.stderr


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("broken", "rollmesh: `rollmesh broken` needs rollmesh_of_the_future: this installation lacks it\n"),
        (
            "poor",
            "rollmesh: `rollmesh poor` needs torch_of_the_future: install it with: pip install 'rollmesh[poor]'\n",
        ),
    ],
)
def test_a_command_that_cannot_be_loaded_says_what_is_missing(rollmesh, name, sentence):
    told = rollmesh(name)
    assert (told.returncode, told.stderr) == (2, sentence)


def test_a_reader_that_leaves_early_is_no_error(place):
    command = f"{sys.executable} -m rollmesh_peer.command probe many | head -n 1; echo ${{PIPESTATUS[0]}}"
    told = subprocess.run(
        ["/bin/bash", "-c", command],
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (told.stdout, told.stderr) == ("0\n141\n", "")
