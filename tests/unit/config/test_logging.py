"""The log: lines for people and for programs."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest

from rollmesh_peer.logging_setup import NOISY, OURS, event, set_up_logging, shorten_peers
from rollmesh_protocol.identity import peer_of, short

PEER = peer_of(bytes(32))


@pytest.fixture
def logged():
    root, loggers = logging.getLogger(), (*OURS, *NOISY)
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in loggers}

    def start(**options):
        stream = io.StringIO()
        set_up_logging(stream=stream, **options)
        return stream

    yield start
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def test_text_has_the_part_the_sentence_and_the_fields(logged):
    stream = logged()
    event(logging.getLogger("rollmesh.node.worker"), "leases taken", groups=2, peer=PEER, rate=1 / 3, why="a b", no="")
    line = stream.getvalue()
    assert re.match(r"\d\d:\d\d:\d\d INFO    node\.worker: leases taken groups=2 peer=\.\.", line)
    assert line.endswith(f' peer=..{short(PEER)} rate=0.3333 why="a b" no=""\n')


def test_json_lines_keep_everything(logged):
    stream = logged(form="json")
    event(logging.getLogger("rollmesh_learner.work.intake"), "result refused", peer=PEER, code="result.root", time=5)
    line = json.loads(stream.getvalue())
    assert line.pop("time") > 1.6e9
    assert line == {
        "level": "info",
        "part": "learner.work.intake",
        "event": "result refused",
        "peer": PEER,
        "code": "result.root",
        "time_": 5,
    }


def test_a_line_stays_one_line_in_json(logged):
    stream = logged(form="json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("rollmesh_node").exception("it\nbroke %s", "here")
    (text,) = stream.getvalue().splitlines()
    line = json.loads(text)
    assert line["event"] == "it\nbroke here"
    assert line["traceback"].endswith("ValueError: two\nlines")


def test_a_strangers_words_stay_on_one_line_and_move_no_cursor(logged):
    stream = logged(form="text")
    event(logging.getLogger("rollmesh.node"), "joined \x1b[2J\nWARNING forged", name="a\r\nb\x9b1m\u202e", run="Zürich")
    line = stream.getvalue()
    assert line.count("\n") == 1 and line[:-1].isprintable()
    assert "joined \\x1b[2J\\nWARNING forged" in line and "run=Zürich" in line


def test_a_per_cent_sign_in_a_sentence_is_a_per_cent_sign(logged):
    stream = logged()
    event(logging.getLogger("rollmesh_node"), "50 %s done")
    assert "50 %s done" in stream.getvalue()


def test_levels_are_ours_and_libraries_are_kept_quiet(logged):
    stream = logged(level="warning")
    event(logging.getLogger("rollmesh_node"), "unheard")
    event(logging.getLogger("rollmesh_node"), "heard", level=logging.WARNING)
    logging.getLogger("libp2p.host").error("a stranger's garbage")
    logging.getLogger("elsewhere").info("unheard too")
    logging.getLogger("elsewhere").error("an error elsewhere")
    assert [line.split(": ")[1] for line in stream.getvalue().splitlines()] == ["heard", "an error elsewhere"]


def test_setting_up_again_replaces(logged):
    first, second = logged(), logged()
    event(logging.getLogger("rollmesh_node"), "once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_peers_are_shortened_and_other_words_are_not():
    assert shorten_peers(f"from {PEER}, again {PEER}.") == f"from ..{short(PEER)}, again ..{short(PEER)}."
    assert shorten_peers("12D3KooW is short, " + "a" * 64) == "12D3KooW is short, " + "a" * 64
