"""When a snapshot is worth its bytes, and what a day's budget is."""

from __future__ import annotations

from rollmesh_peer.weights.kept_state import DAY_S, Budget, KeptState, Named, SnapshotPolicy

POLICY = SnapshotPolicy(chain_patches=10, chain_most=100, daily_bytes=5000)


def is_due(*, patches: int, chain_bytes: int = 0, spent_bytes: int = 0) -> bool:
    return POLICY.is_due(patches=patches, chain_bytes=chain_bytes, image_bytes=1000, spent_bytes=spent_bytes)


def test_a_long_chain_is_replaced() -> None:
    assert not is_due(patches=9)
    assert is_due(patches=10)


def test_a_large_chain_is_replaced() -> None:
    assert not is_due(patches=1, chain_bytes=999)
    assert is_due(patches=1, chain_bytes=1000)


def test_the_budget_holds_until_the_chain_is_far_too_long() -> None:
    assert is_due(patches=99, spent_bytes=4000)
    assert not is_due(patches=99, spent_bytes=4001)
    assert is_due(patches=100, spent_bytes=4001)


def test_no_patches_no_snapshot() -> None:
    assert not is_due(patches=0, chain_bytes=10_000)


def test_the_budget_starts_afresh_each_day_and_when_the_clock_was_set_back() -> None:
    budget = Budget(started_at=1000.0, spent_bytes=0).spend(700)
    assert budget.at(1000.0 + DAY_S - 1).spend(1).spent_bytes == 701
    assert budget.at(1000.0 + DAY_S) == Budget(started_at=1000.0 + DAY_S, spent_bytes=0)
    assert budget.at(999.0) == Budget(started_at=999.0, spent_bytes=0)


def test_a_state_survives_its_file() -> None:
    named = Named(root=bytes(32), version=3, step=2, tensors=bytes(64))
    state = KeptState(
        layout=bytes(32), highest=5, snapshot=named, chain=(b"x" * 32, b"y" * 32), root=bytes(32), version=5, step=4,
        budget=Budget(started_at=1.5, spent_bytes=7),
    )  # fmt: skip
    assert KeptState.decode(state.encode(), limit=10_000) == state
