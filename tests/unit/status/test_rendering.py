"""The picture in the terminal: everything that matters is in it at any width, and strangers cannot draw in it."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from rollmesh_peer.status.rendering import render
from rollmesh_peer.status_cli import as_json_line
from rollmesh_protocol.status import StatusAnswer
from tests.unit.status.samples import PEERS, node_status, peer, run_status, standing, trust_status


def drawn(answer: StatusAnswer, *, width: int, colour: bool = False) -> str:
    page = io.StringIO()
    console = Console(file=page, width=width, force_terminal=colour, highlight=False)
    console.print(render(answer, width=width))
    return page.getvalue()


def of_run(*peers, width: int = 160, **fields) -> str:
    return drawn(StatusAnswer(run=run_status(*peers, **fields), node=None), width=width)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 200])
def test_every_width_shows_each_peer_its_counts_and_what_it_waits_for(width: int) -> None:
    page = of_run(peer(1), peer(2, waiting_for="the weights of version 12"), peer(3, waiting_for="leases"), width=width)
    lines = page.splitlines()
    assert max(map(len, lines)) <= width
    for number in (1, 2, 3):
        (row,) = [line for line in lines if PEERS[number][-8:] in line and "accepted" not in line and " 12 " in line]
        assert f" {10 * number} " in row
    assert "the weights of version 12" in page and "leases" in page
    for fact in ("step", "12 of 40", "version 12", "0.551", "1,768 accepted, 2 rejected", "31 done", "trainer"):
        assert fact in page


def test_all_columns_at_a_wide_terminal_and_the_telling_ones_at_a_narrow_one() -> None:
    wide, narrow = of_run(peer(1), width=200), of_run(peer(1), width=60)
    for title in ("peer", "name", "engine", "tok/s", "accepted", "rejected", "last accepted", "standing"):
        assert title in wide
    assert "engine" not in narrow and "accepted" in narrow and "standing" in narrow


def test_the_head_tells_what_a_patch_costs_and_an_anchor_is_none() -> None:
    assert "a patch of 3.3 MB for 269 MB of weights" in of_run(peer(1))
    assert "patch" not in of_run(peer(1), head_bytes=269_031_000)


def test_the_living_come_first_and_the_gone_say_since_when() -> None:
    page = of_run(peer(1, connected=False, path="none", last_seen_s=3700.0), peer(2))
    assert page.index(PEERS[2][-8:]) < page.index(PEERS[1][-8:])
    assert "gone, last seen 1 h ago" in page
    assert "1 of 2 connected" in page


def test_a_quarantined_peer_names_its_rule() -> None:
    page = of_run(peer(1, standing=standing("quarantined", rejected=1, reason="result.sampling")))
    assert "quarantined" in page and "result.sampling" in page and "✕" in page


def test_a_run_that_went_back_says_why() -> None:
    assert "rollbacks" not in of_run(peer(1))
    page = of_run(peer(1), rollbacks=2, last_rollback="step 12 tripped a wire (length: ...)\x1b[2J")
    (row,) = [line for line in page.splitlines() if line.strip().startswith("rollbacks")]
    assert "2; step 12 tripped a wire (length: ...)" in row
    assert "\x1b" not in row


def test_an_empty_run_says_what_to_do_next() -> None:
    assert "nobody yet" in of_run()
    assert "rollmesh node run --join" in of_run()


def test_strangers_cannot_draw_in_the_terminal() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07[bold red]x[/]\u202e\r\n"
    page = drawn(
        StatusAnswer(
            run=run_status(peer(1, name=evil, engine=evil, waiting_for=evil), name=evil, state=evil, children=(evil,)),
            node=None,
        ),
        width=200,
        colour=True,
    )
    assert "\x1b[2J" not in page and "\x1b]" not in page and "\x07" not in page and "\u202e" not in page
    assert "[bold red]x" in page  # shown as it is, never read as markup
    node = drawn(
        StatusAnswer(run=None, node=node_status(name=evil, last_refusal=evil, run=evil)), width=80, colour=True
    )
    assert "\x1b[2J" not in node and "\x07" not in node


def test_a_node_shows_its_link_its_weights_and_its_last_refusal() -> None:
    page = drawn(StatusAnswer(run=None, node=node_status()), width=100)
    for fact in (
        "attic", "connected", "generating, 143 tokens/s", "version 11, head is version 12", "996 accepted, 1 rejected",
        "2 s ago", "16 MB, 80 % of it from peers", "9.1 MB to 3 neighbours", "result.stale",
    ):  # fmt: skip
        assert fact in page
    lost = drawn(
        StatusAnswer(run=None, node=node_status(learner_connected=False, waiting_for="the learner; next try in 3 s")),
        width=100,
    )
    assert "not connected" in lost and "next try in 3 s" in lost and "generating" not in lost
    assert "chosen" not in lost
    chosen = drawn(StatusAnswer(run=None, node=node_status(engine_why="no NVIDIA GPU was found")), width=100)
    assert "chosen" in chosen and "no NVIDIA GPU was found" in chosen


def test_json_holds_everything_and_is_one_line() -> None:
    line = as_json_line(StatusAnswer(run=run_status(peer(1)), node=None))
    assert "\n" not in line
    told = json.loads(line)
    assert told["node"] is None
    assert told["run"]["head"]["root"] == "9a" * 32
    assert told["run"]["peers"][0]["standing"]["accepted"] == 10


def test_trust_is_told_in_a_few_words_and_only_where_something_is_wrong() -> None:
    page = of_run(peer(1), trust=trust_status(audits_waiting=4))
    assert "31 done, 0 failed, 4 waiting (at most 128); 10.0 % of all tokens, 3.0 % in full standing" in page
    assert "4+ tokens 0 of 100, 8+ tokens 25 of 325" in page
    assert "failed later" not in page and "share of a batch" not in page
    page = of_run(
        peer(1), trust=trust_status(consumed_bad=3, consumed_bad_steps=(7, 9), reaudits_waiting=2, over_cap=5)
    )
    assert "3 rollouts failed later, in steps 7, 9; 2 to look at again" in page
    assert "cannot be looked at" not in page
    assert "5 rollouts above their node's share of a batch" in page
    assert "0 rollouts failed later; 7 cannot be looked at again" in of_run(
        peer(1), trust=trust_status(reaudits_missed=7)
    )


def test_who_withholds_is_told_of() -> None:
    assert "9 leases that it let go of" in of_run(peer(1, withheld="9 leases that it let go of had lower rewards"))
