"""Which rollouts are scored together: bounded by their number and by their tokens, and never none."""

from __future__ import annotations

from rollmesh_learner.work import scoring
from rollmesh_learner.work.groups import StoredRollout


def rollout(sample: int, *, num_tokens: int) -> StoredRollout:
    return StoredRollout(
        lease_id=bytes(16), sample=sample, group_id=1, node="n", version=0, step=0, root=bytes(32), seed=1,
        tokens=bytes(4 * num_tokens), logprobs=b"", finish="stop", drawn=False,
    )  # fmt: skip


def test_rounds_hold_what_one_frame_can_carry() -> None:
    assert scoring.one_round([]) == []
    small = [rollout(number, num_tokens=10) for number in range(1000)]
    assert scoring.one_round(iter(small)) == small[: scoring._MOST_AT_ONCE]
    long = [rollout(number, num_tokens=32_768) for number in range(40)]
    assert scoring.one_round(long) == long[: scoring._MOST_TOKENS // 32_768]
    huge = [rollout(number, num_tokens=scoring._MOST_TOKENS + 1) for number in range(2)]
    assert scoring.one_round(huge) == huge[:1]
