"""Which weights a rollout's tokens may come from: each rule broken once, and every history that a node can have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.rollout import Result, Rollout, Segment, Swap, check_result, kept_tokens
from tests.unit.protocol.examples import LEASE, RESULT

LENGTH = 700
STEP = limits.SEGMENT_TOKENS


def root(version: int) -> bytes:
    return bytes([version]) * 32


def lease(version: int = 3, *, swap_mode: str = "recompute") -> Lease:
    changes = {"version": version, "root": root(version), "max_new_tokens": LENGTH, "swap_mode": swap_mode}
    return Lease.read(LEASE.model_dump() | {"samples": (LEASE.samples[0].model_dump(),), **changes})


def check(
    segments: list[tuple[int, int]], *, swaps: list[Swap], tokens: int = LENGTH, swap_mode: str = "recompute"
) -> Rollout:
    """The rollout of ``tokens`` tokens whose segments are given as (first token, version)."""
    made = np.full(tokens, 5, "<u4")
    made[-1] = 5 if tokens == LENGTH else 9
    sample = RESULT.samples[0].model_dump() | {
        "tokens": made.tobytes(),
        "logprobs": np.full(tokens, -1.0, "<f4").tobytes(),
        "finish": "length" if tokens == LENGTH else "stop",
        "segments": tuple({"first_token": first, "root": root(version)} for first, version in segments),
    }
    result = Result.read(RESULT.model_dump() | {"samples": (sample,)})
    (rollout,) = check_result(
        result, lease(swap_mode=swap_mode), vocabulary=10, stop_tokens=frozenset({9}), swaps=swaps
    )
    return rollout


def published(*versions: int) -> list[Swap]:
    return [(version, root(version)) for version in versions]


@pytest.mark.parametrize(
    "segments",
    [
        [(0, 3)],
        [(0, 3), (128, 4)],
        [(0, 3), (128, 6)],
        [(0, 3), (128, 4), (256, 5), (640, 6)],
        [(0, 5)],
        [(0, 4), (384, 6)],
    ],
)
def test_what_an_honest_node_may_have_done_is_let_through_as_it_is(segments: list[tuple[int, int]]) -> None:
    rollout = check(segments, swaps=published(4, 5, 6))
    assert rollout.segments == tuple(Segment(first_token=first, root=root(version)) for first, version in segments)


@pytest.mark.parametrize(
    ("code", "segments"),
    [
        ("result.schema", [(1, 3)]),
        ("result.schema", [(128, 3)]),
        ("result.schema", [(0, 3), (64, 4)]),
        ("result.schema", [(0, 3), (129, 4)]),
        ("result.schema", [(0, 3), (0, 4)]),
        ("result.schema", [(0, 3), (256, 4), (128, 5)]),
        ("result.schema", [(0, 3), (256, 4), (256, 5)]),
        ("result.schema", [(0, 3), (768, 4)]),
        ("result.root", [(0, 2)]),
        ("result.root", [(0, 9)]),
        ("result.root", [(0, 3), (128, 2)]),
        ("result.root", [(0, 3), (128, 3)]),
        ("result.root", [(0, 3), (128, 7)]),
        ("result.root", [(0, 3), (128, 4), (256, 4)]),
        ("result.root", [(0, 3), (128, 5), (256, 4)]),
        ("result.root", [(0, 4), (128, 3)]),
        ("result.root", [(0, 3), (128, 4), (256, 3)]),
    ],
)
def test_each_rule_broken_once(code: str, segments: list[tuple[int, int]]) -> None:
    with pytest.raises(Refused) as refused:
        check(segments, swaps=published(2, 4, 5, 6))
    assert refused.value.code == code


def test_a_segment_needs_a_token_of_its_own() -> None:
    assert len(check([(0, 3), (128, 4)], swaps=published(4), tokens=129).segments) == 2
    with pytest.raises(Refused) as refused:
        check([(0, 3), (128, 4)], swaps=published(4), tokens=128)
    assert refused.value.code == "result.schema"


def test_under_drain_the_leases_own_weights_alone() -> None:
    assert len(check([(0, 3)], swaps=published(4), swap_mode="drain").segments) == 1
    for segments in ([(0, 3), (128, 4)], [(0, 4)], [(0, 3), (64, 4)], [(1, 3)]):
        with pytest.raises(Refused) as refused:
            check(segments, swaps=published(4), swap_mode="drain")
        assert refused.value.code == "result.root"


def test_without_a_record_of_versions_nothing_follows_from_a_lease() -> None:
    check([(0, 3)], swaps=[])
    with pytest.raises(Refused):
        check([(0, 3), (128, 4)], swaps=[])


def test_weights_that_were_published_again_come_again() -> None:
    """The learner went back: version 6 has the root of version 4, and a node may have had both, with 5 between."""
    again = [*published(4, 5), (6, root(4))]
    check([(0, 3), (128, 4), (256, 5), (384, 4)], swaps=again)
    check([(0, 3), (128, 5), (256, 4)], swaps=again)
    with pytest.raises(Refused):
        check([(0, 3), (128, 4), (256, 5), (384, 4), (512, 4)], swaps=again)


@given(st.data())
def test_every_history_of_a_node_passes(data: st.DataObject) -> None:
    """A node draws, takes some of the versions at any moment, cuts back, and draws on."""
    versions = data.draw(st.lists(st.integers(4, 60), unique=True, max_size=12).map(sorted))
    taken = [version for version in versions if data.draw(st.booleans())]
    segments, drawn = [(0, 3)], 0
    for version in taken:
        drawn = kept_tokens(data.draw(st.integers(drawn, LENGTH - 1)))
        segments = [segment for segment in segments if segment[0] < drawn] + [(drawn, version)]
    tokens = data.draw(st.integers(drawn + 1, LENGTH))
    assert check(segments, swaps=published(*versions), tokens=tokens).tokens.size == tokens


@given(
    st.lists(st.tuples(st.integers(0, LENGTH), st.integers(0, 9)), min_size=1, max_size=6),
    st.lists(st.integers(0, 9), unique=True, max_size=8).map(sorted),
    st.integers(1, LENGTH),
)
def test_what_passes_keeps_every_rule(segments: list[tuple[int, int]], versions: list[int], tokens: int) -> None:
    try:
        check(segments, swaps=published(*versions), tokens=tokens)
    except Refused:
        return
    firsts, names = zip(*segments, strict=True)
    assert firsts[0] == 0 and firsts[-1] < tokens and not any(first % STEP for first in firsts)
    assert list(firsts) == sorted(set(firsts)) and list(names) == sorted(set(names))
    assert all(name == 3 or (name > 3 and name in versions) for name in names)
