"""The demo's picture and its lines: what matters is in them, and no peer can draw in them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rollmesh_learner.demo.narrator import QUIET_S, Narrator
from rollmesh_learner.demo.view import render, step_line, wait_line
from rollmesh_learner.demo.watching import Scene
from tests.unit.demo.scenes import beginning, middle, step
from tests.unit.status.samples import node_status


def drawn(scene: Scene, *, width: int = 110, notice: str = "") -> str:
    page = io.StringIO()
    Console(file=page, width=width, highlight=False).print(render(scene, notice=notice))
    return page.getvalue()


@pytest.mark.parametrize("width", [80, 110, 160])
def test_the_picture_has_everything_and_fits(width: int) -> None:
    page = drawn(middle(), width=width, notice="Ctrl-C stops politely")
    assert max(map(len, page.splitlines())) <= width
    for fact in (
        "training step 12", "12 of 40", "version 12, a patch of 3.3 MB (1.2 % of 269 MB)", "1,768 accepted, 2 rejected",
        "31 done, 0 failed", "1.5 steps on average, 2 at most", "8.0 s training and 1.0 s waiting", "0.220 in step 12",
        "node-a", "143", "996", "49 of 62", "node-b: waits for leases", "node-a: generating", "3 min 5 s",
        "Ctrl-C stops politely",
    ):  # fmt: skip
        assert fact in page


def test_before_anybody_answers_the_picture_says_so() -> None:
    page = drawn(beginning(), notice="the learner starts")
    assert "node-a: not started yet" in page and "the learner starts" in page and "reward" not in page


def test_the_first_wait_is_for_the_nodes_to_start_and_not_averaged() -> None:
    scene = Scene(elapsed_s=60, run=middle().run, nodes={}, steps=(step(0, waited_s=70.0), step(1, waited_s=2.0)))
    assert "2.0 s waiting" in drawn(scene)


def test_words_of_peers_are_only_text() -> None:
    hostile = middle(state="[red]boo[/red]\x1b[2J\nnext")
    node = node_status(waiting_for="[bold]x\x1b]0;t\x07")
    page = drawn(Scene(elapsed_s=1, run=hostile.run, nodes={"node-a": node}, steps=()))
    assert "[red]boo[/red]?[2J next" in page and "\x1b" not in page and "[bold]x" in page


def test_a_step_is_one_line() -> None:
    scene = middle()
    line = step_line(scene, scene.steps[-1])
    assert line == (
        "step 12 of 40: reward 0.220; version 12, a patch of 3.3 MB (1.2 % of 269 MB); 1,768 accepted, 2 rejected; "
        "31 audited, 0 failed; age 1.5; node-a 143 tok/s; node-b 99 tok/s"
    )


def test_an_anchor_is_no_patch() -> None:
    assert "patch" not in step_line(middle(head_bytes=269_040_000), step(0))


def test_a_wait_is_one_line() -> None:
    assert wait_line(beginning()) == "learner: starting; node-a: not started yet; node-b: not started yet"
    assert wait_line(middle()) == "learner: training step 12; node-a: generating; node-b: waits for leases"


def test_without_a_terminal_each_step_is_told_once_and_long_waits_now_and_then() -> None:
    page = io.StringIO()
    with Narrator(Console(file=page, width=400, highlight=False, soft_wrap=True)) as narrator:
        for elapsed_s, steps in ((0.0, 0), (1.0, 0), (2.0, 1), (3.0, 1), (4.0, 3), (4.0 + QUIET_S, 3)):
            narrator.tell(middle(steps=steps, elapsed_s=elapsed_s), "at work")
    lines = page.getvalue().splitlines()
    assert [line.split()[2:4] for line in lines] == [
        ["at", "work"], ["step", "1"], ["step", "2"], ["step", "3"], ["learner:", "training"],
    ]  # fmt: skip
    assert "\x1b" not in page.getvalue()


def test_in_a_terminal_the_picture_is_drawn_over() -> None:
    page = io.StringIO()
    with Narrator(Console(file=page, width=110, height=50, force_terminal=True, highlight=False)) as narrator:
        narrator.tell(middle(), "at work")
        narrator.tell(middle(steps=13), "at work")
    assert page.getvalue().count("mean reward") >= 2 and "\x1b[1A" in page.getvalue()
