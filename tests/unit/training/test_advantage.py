"""Group-relative advantages: by hand, and as properties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_learner.training.advantage import EPSILON, group_advantages


def test_by_hand() -> None:
    found = group_advantages([1, 0, 0, 1, 3, 1], groups=["a", "a", "b", "b", "c", "c"], scale="none")
    assert found.tolist() == [0.5, -0.5, -0.5, 0.5, 1.0, -1.0]
    scaled = group_advantages([1, 0, 0, 0], groups=["a"] * 4, scale="std")
    deviation = np.sqrt(3) / 4 + EPSILON
    np.testing.assert_allclose(scaled, [0.75 / deviation, *[-0.25 / deviation] * 3])


def test_interleaved_groups_are_told_apart() -> None:
    found = group_advantages([1, 5, 0, 7], groups=["a", "b", "a", "b"], scale="none")
    assert found.tolist() == [0.5, -1.0, -0.5, 1.0]


@pytest.mark.parametrize("scale", ["std", "none"])
@given(reward=st.floats(-1e3, 1e3), size=st.integers(1, 9))
def test_equal_rewards_give_exact_zeros(scale: str, reward: float, size: int) -> None:
    assert not group_advantages([reward] * size, groups=["g"] * size, scale=scale).any()


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12), st.floats(-5, 5))
def test_a_group_sums_to_zero_and_a_shift_of_its_rewards_changes_nothing(rewards: list[float], shift: float) -> None:
    groups = ["g"] * len(rewards)
    found = group_advantages(rewards, groups=groups, scale="none")
    assert abs(found.sum()) < 1e-9
    np.testing.assert_allclose(
        group_advantages(np.array(rewards) + shift, groups=groups, scale="none"), found, atol=1e-7
    )


def test_refuses_what_is_not_a_number() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, float("nan")], groups=["a", "a"], scale="std")
    with pytest.raises(ValueError, match="2 rewards"):
        group_advantages([1.0, 2.0], groups=["a"], scale="std")
