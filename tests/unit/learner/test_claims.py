"""Whether a node's word on its log-probabilities is believed: noise does not add up, lies do."""

from __future__ import annotations

import numpy as np

from rollmesh_learner.audit.claims import KEPT_NODES, Claims

EXACT = np.full(16, -2.0, dtype=np.float32)
TRUE = EXACT + np.float32(0.03)
FALSE = EXACT + np.float32(0.2)


def test_three_false_claims_are_an_offence_and_then_it_begins_anew() -> None:
    claims = Claims()
    assert [bool(claims.add("a", FALSE, exact=EXACT)) for _ in range(7)] == [False, False, True] * 2 + [False]
    assert "off by 22%" in [claims.add("b", FALSE, exact=EXACT) for _ in range(3)][-1]


def test_of_each_node_by_itself_and_noise_is_forgotten() -> None:
    claims = Claims()
    for _ in range(200):  # one in eleven, as nobody honest comes near to
        assert not claims.add("a", FALSE, exact=EXACT)
        assert not claims.add("b", FALSE, exact=EXACT)
        for _ in range(11):
            assert not claims.add("a", TRUE, exact=EXACT)
            assert not claims.add("b", TRUE, exact=EXACT)


def test_who_lies_more_often_than_in_one_of_eleven_is_found_out() -> None:
    claims = Claims()
    found = [claims.add("a", FALSE if place % 5 == 0 else TRUE, exact=EXACT) for place in range(100)]
    assert any(found)


def test_what_is_remembered_is_bounded() -> None:
    claims = Claims()
    for node in range(KEPT_NODES + 10):
        claims.add(str(node), FALSE, exact=EXACT)
    assert len(claims._counts) == KEPT_NODES
