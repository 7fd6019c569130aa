"""What a selfcheck makes of results whose weights changed on the way, before anything is recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from rollmesh_node.selfcheck.check import Order, _by_root, _Check
from rollmesh_node.selfcheck.report import Report
from rollmesh_peer.weights.copies import Way
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.rollout import Result, Rollout, SampleResult, Segment
from tests.unit.node.cards import make_card
from tests.unit.node.leases import make_lease, root_of

LENGTH = 300
Parts = Sequence[tuple[int, int]]
"""(first token, version)."""


def result(lease: Lease, *samples: Parts) -> Result:
    made = tuple(
        SampleResult(
            index=index, tokens=np.full(LENGTH, 5, "<u4").tobytes(), logprobs=np.full(LENGTH, -1.0, "<f4").tobytes(),
            finish="length", segments=tuple(Segment(first_token=first, root=root_of(v)) for first, v in parts),
        )
        for index, parts in enumerate(samples)
    )  # fmt: skip
    return Result(lease_id=lease.lease_id, samples=made, engine="", generate_s=0.0)


def opened(*samples: Parts, swap_mode: str = "recompute") -> list[Rollout]:
    lease = make_lease(samples=2, max_new_tokens=LENGTH, swap_mode=swap_mode)
    check = _Check(cast(Order, None), card=make_card(), place=Path(), report=Report())
    return check._open(result(lease, *samples), lease)


def test_samples_may_have_gone_through_different_versions() -> None:
    rollouts = opened([(0, 1), (128, 2), (256, 4)], [(0, 1), (128, 3), (256, 4)])
    assert [len(rollout.segments) for rollout in rollouts] == [3, 3]
    way = cast(Way, SimpleNamespace(roots={root_of(version): version for version in (2, 3, 4)}))
    by_root = _by_root(rollouts, way)
    assert {way.roots[root]: [piece.first for piece in pieces] for root, pieces in by_root.items()} == {
        4: [256, 256], 3: [128], 2: [128],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "samples", "swap_mode"),
    [
        ("result.schema", [[(0, 1)], [(0, 1), (64, 2)]], "recompute"),
        ("result.root", [[(0, 1)], [(0, 1), (128, 2)]], "drain"),
        ("result.samples", [[(0, 1)]], "recompute"),
        ("result.samples", [[(0, 1)], [(0, 1)], [(0, 1)]], "recompute"),
    ],
)
def test_what_the_learner_would_refuse_is_found(code: str, samples: list[Parts], swap_mode: str) -> None:
    with pytest.raises(Refused) as refused:
        opened(*samples, swap_mode=swap_mode)
    assert refused.value.code == code
