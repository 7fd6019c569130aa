"""Who goes next: similar lengths together, the oldest first, and never more than memory holds."""

from __future__ import annotations

from rollmesh_node.engine.rows import Row
from rollmesh_node.engine.waiting import Waiting
from tests.unit.engine.requests import group, with_begun

PLENTY = 1 << 40


def queue(*adds: list[tuple[int, int]]) -> Waiting:
    """Groups of (prompt tokens, samples), 10 new tokens each; keys count up."""
    waiting, key = Waiting(), 0
    for added in adds:
        requests = []
        for prompt, samples in added:
            requests.append(group(key, [1] * prompt, seeds=range(samples), max_new_tokens=10))
            key += 1
        waiting.add(requests)
    return waiting


def keys(rows: list[Row]) -> list[int]:
    return [row.group.key for row in rows]


def test_the_shortest_of_what_came_at_once_goes_first():
    waiting = queue([(30, 2), (5, 2), (12, 2)])
    assert keys(waiting.take(3, cells=PLENTY, live=[])) == [1, 1, 2]
    assert keys(waiting.take(9, cells=PLENTY, live=[])) == [2, 0, 0]
    assert len(waiting) == 0
    assert waiting.take(9, cells=PLENTY, live=[]) == []


def test_older_work_leads_and_takes_along_what_is_like_it():
    waiting = queue([(50, 1), (90, 1)], [(5, 1), (52, 1)])
    assert keys(waiting.take(2, cells=PLENTY, live=[])) == [0, 3]
    assert keys(waiting.take(1, cells=PLENTY, live=[])) == [1]
    assert keys(waiting.take(1, cells=PLENTY, live=[])) == [2]


def test_a_long_row_is_not_overtaken_for_ever():
    waiting = queue([(500, 1)])
    taken = []
    for _ in range(20):
        waiting.add([group(9, [1], seeds=range(4))])
        taken += waiting.take(4, cells=PLENTY, live=[])
    assert any(len(row.group.prompt) == 500 for row in taken[:4])


def test_rows_times_columns_fit():
    waiting = queue([(10, 5), (70, 5)])  # 20 and 80 tokens at most
    assert keys(waiting.take(99, cells=100, live=[])) == [0] * 5
    assert waiting.take(99, cells=159, live=queue([(70, 1)]).take(1, cells=PLENTY, live=[])) == []
    assert keys(waiting.take(99, cells=160, live=[])) == [1, 1]


def test_live_rows_become_as_wide_as_the_widest():
    live = queue([(10, 3)]).take(3, cells=PLENTY, live=[])
    waiting = queue([(70, 2)])
    assert waiting.take(1, cells=319, live=live) == []
    assert len(waiting.take(1, cells=320, live=live)) == 1


def test_one_row_goes_where_nothing_fits():
    assert len(queue([(70, 2)]).take(9, cells=1, live=[])) == 1


def test_cleared_rows_are_gone():
    waiting = queue([(3, 2)], [(4, 1)])
    assert keys(waiting.clear()) == [0, 0, 1]
    assert len(waiting) == 0
    assert waiting.leader is None


def test_a_row_knows_where_it_is():
    request = with_begun(group(0, [5, 6], seeds=[1], max_new_tokens=5, stop=[9]), [[7, 8]])
    row = Row(group=request, sample=request.samples[0])
    assert row.start.tolist() == [5, 6, 7, 8]
    assert (row.position, row.longest, row.finish) == (2, 7, None)
    row.tokens.append(4)
    assert (row.position, row.cached, row.finish) == (3, 4, None)
    row.tokens.append(4)
    assert row.finish is None
    row.tokens.append(4)
    assert row.finish == "length"
    row.tokens[-1] = 9
    assert row.finish == "stop"
