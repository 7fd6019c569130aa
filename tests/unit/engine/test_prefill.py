"""What is computed of rows that join, and from whom the rest is copied."""

from __future__ import annotations

from rollmesh_node.engine.prefill import plan, portions
from rollmesh_node.engine.rows import Row
from tests.unit.engine.requests import group, with_begun

TEMPLATE = list(range(100, 140))


def rows(*requests, first: int = 0) -> dict[int, Row]:
    made = [Row(group=request, sample=sample) for request in requests for sample in request.samples]
    return dict(enumerate(made, start=first))


def told(sources) -> list[tuple]:
    return [(source.rows, source.own, source.shared and source.donor, source.wave) for source in sources]


def test_a_group_is_computed_once():
    assert told(plan(rows(group(0, TEMPLATE, seeds=[1, 2, 3])), {})) == [((0, 1, 2), 40, 0, 0)]


def test_groups_share_a_template_of_some_length():
    found = plan(rows(group(0, [*TEMPLATE, 1], seeds=[1]), group(1, [*TEMPLATE, 2, 3], seeds=[1, 2])), {})
    assert told(found) == [((0,), 41, 0, 0), ((1, 2), 2, 0, 1)]
    short = plan(rows(group(0, [*TEMPLATE[:15], 1], seeds=[1]), group(1, [*TEMPLATE[:15], 2], seeds=[1])), {})
    assert [source.shared for source in short] == [0, 0]


def test_between_groups_there_is_one_step_of_giving():
    found = plan(
        rows(
            group(0, [*TEMPLATE[:20], 1, 2], seeds=[1]),
            group(1, [*TEMPLATE[:30], 1, 2], seeds=[1]),
            group(2, [*TEMPLATE[:32], 1, 2], seeds=[1]),
        ),
        {},
    )
    assert told(found) == [((0,), 22, 0, 0), ((1,), 12, 0, 1), ((2,), 14, 0, 1)]


def test_of_two_donors_the_one_that_shares_more_gives():
    live = rows(group(0, TEMPLATE[:20], seeds=[1]), group(1, TEMPLATE[:30], seeds=[1]), first=5)
    assert told(plan(rows(group(2, TEMPLATE, seeds=[1])), live)) == [((0,), 10, 6, 0)]


def test_a_row_that_is_decoded_gives_what_it_shares():
    request = group(7, TEMPLATE, seeds=[1, 2])
    sibling, other = rows(request, first=3), group(8, [*TEMPLATE[:35], 1], seeds=[1])
    assert told(plan(rows(request, other), sibling)) == [((2,), 1, 3, 0), ((0, 1), 1, 3, 0)]


def test_what_had_begun_comes_behind_its_own_prompt():
    request = with_begun(group(0, TEMPLATE, seeds=[1, 2, 3, 4]), [[], [1, 2], [1, 9, 9], [1, 2]])
    assert told(plan(rows(request), {})) == [((0,), 40, 0, 0), ((1, 3), 2, 0, 1), ((2,), 3, 0, 1)]


def test_there_are_three_waves_at_most():
    groups = [with_begun(group(key, [*TEMPLATE, *range(key)], seeds=[1, 2, 3]), [[], [7], [7, 8]]) for key in range(6)]
    found = plan(rows(*groups), {})
    assert [source.wave for source in found] == sorted(source.wave for source in found)
    assert {source.wave for source in found} == {0, 1, 2}
    done: set[int] = set()
    for wave in range(3):
        assert all(source.donor in done for source in found if source.wave == wave and source.shared)
        done |= {row for source in found if source.wave == wave for row in source.rows}
    assert done == set(range(18))


def test_a_portion_is_of_one_wave_and_its_padding_is_counted():
    sources = plan(rows(*(group(key, [key] * length, seeds=[1]) for key, length in enumerate((9, 3, 50, 4)))), {})
    assert [[source.own for source in portion] for portion in portions(sources, tokens=12)] == [[3, 4], [9], [50]]
    assert [[source.own for source in portion] for portion in portions(sources, tokens=300)] == [[3, 4, 9, 50]]
    waves = plan(rows(group(0, [*TEMPLATE, 1], seeds=[1]), group(1, [*TEMPLATE, 2], seeds=[1])), {})
    assert len(portions(waves, tokens=300)) == 2
