"""Who is audited: a share of the rollouts that only the learner can predict, drawn once."""

from __future__ import annotations

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_learner.audit.draw import is_drawn

KEY = b"audit key of thirty-two bytes ok"
LEASES = [blake3(number.to_bytes(4, "little")).digest(16) for number in range(5000)]
FROZEN = [True, True, False, False, True, False, True, False, False, True, True, False]
SHARES = st.floats(min_value=0, max_value=1)


def drawn(rate: float, *, key: bytes = KEY) -> set[tuple[bytes, int]]:
    return {(lease, i) for lease in LEASES for i in range(4) if is_drawn(key, lease_id=lease, sample=i, rate=rate)}


@pytest.mark.parametrize("rate", [0.03, 0.5, 0.9])
def test_the_rate_is_kept(rate: float) -> None:
    num_rollouts = 4 * len(LEASES)
    deviation = (num_rollouts * rate * (1 - rate)) ** 0.5
    assert abs(len(drawn(rate)) - num_rollouts * rate) < 4 * deviation


def test_all_or_nothing_means_that() -> None:
    assert len(drawn(1.0)) == 4 * len(LEASES)
    assert not drawn(0.0)


@given(st.binary(min_size=16, max_size=16), st.integers(0, 255), SHARES, SHARES)
def test_a_higher_rate_audits_a_superset(lease_id: bytes, sample: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    if is_drawn(KEY, lease_id=lease_id, sample=sample, rate=low):
        assert is_drawn(KEY, lease_id=lease_id, sample=sample, rate=high)


def test_a_crash_does_not_draw_again() -> None:
    """The draw is a function of key and rollout: these are frozen, for a restart must not change its mind."""
    assert [is_drawn(KEY, lease_id=LEASES[0], sample=sample, rate=0.5) for sample in range(12)] == FROZEN


def test_samples_leases_and_keys_are_drawn_apart() -> None:
    half = drawn(0.5)
    by_sample = [{lease for lease, index in half if index == sample} for sample in range(4)]
    for first in range(4):
        for second in range(first):
            both = len(by_sample[first] & by_sample[second])
            assert abs(both - len(LEASES) / 4) < 4 * (len(LEASES) * 3 / 16) ** 0.5
    both = len(half & drawn(0.5, key=bytes(32)))
    assert abs(both - len(LEASES)) < 4 * (4 * len(LEASES) * 3 / 16) ** 0.5
