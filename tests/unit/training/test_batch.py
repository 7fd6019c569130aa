"""Records from the pipe: decoded exactly, or refused; minibatches of whole groups."""

import numpy as np
import pytest
from pydantic import ValidationError

from rollmesh_learner.training.batch import RolloutRecord, open_rollout, split_groups
from rollmesh_protocol.errors import ChildFailed
from tests.unit.training.samples import random_samples, record, sample

GOOD = sample([1, 2, 3], [7, 8], group="g", reward=0.5)


def test_a_record_comes_back_as_it_was() -> None:
    opened = open_rollout(record(GOOD), vocabulary=10)
    assert opened.prompt.tolist() == [1, 2, 3]
    assert opened.tokens.tolist() == [7, 8]
    assert opened.mu.tolist() == [-1.0, -1.0]
    assert (opened.group, opened.reward, opened.exact) == ("g", 0.5, False)
    assert opened.read.tolist() == [1, 2, 3, 7]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokens": b"\x07\x00\x00\x00\x08"}, "half a number"),
        ({"tokens": np.array([7, 10], "<u4").tobytes()}, "outside the vocabulary"),
        ({"prompt": np.array([0xFFFFFFFF], "<u4").tobytes()}, "outside the vocabulary"),
        ({"mu": np.array([-1], "<f4").tobytes()}, "1 log-probabilities for 2"),
        ({"mu": np.array([-1, np.nan], "<f4").tobytes()}, "not finite"),
        ({"mu": np.array([-1, -np.inf], "<f4").tobytes()}, "not finite"),
    ],
)
def test_what_cannot_be_computed_with_is_refused(change: dict[str, bytes], sentence: str) -> None:
    bad = RolloutRecord(**(record(GOOD).model_dump() | change))
    with pytest.raises(ChildFailed, match=sentence):
        open_rollout(bad, vocabulary=10)


@pytest.mark.parametrize(
    "change", [{"reward": float("nan")}, {"tokens": b""}, {"prompt": b""}, {"group": ""}, {"x": 1}]
)
def test_records_are_strict(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RolloutRecord(**(record(GOOD).model_dump() | change))


def test_minibatches_hold_whole_groups_once() -> None:
    samples = random_samples(0, groups=7, size=3)
    parts = split_groups(samples, parts=3, generator=np.random.default_rng(5))
    assert sorted(index for part in parts for index in part) == list(range(len(samples)))
    groups = [{samples[i].group for i in part} for part in parts]
    assert sum(map(len, groups)) == 7
    assert max(map(len, parts)) - min(map(len, parts)) <= 3
    assert parts == split_groups(samples, parts=3, generator=np.random.default_rng(5))
    assert parts != split_groups(samples, parts=3, generator=np.random.default_rng(6))


def test_no_empty_minibatches() -> None:
    samples = random_samples(0, groups=2)
    assert len(split_groups(samples, parts=5, generator=np.random.default_rng(0))) == 2
    assert split_groups([], parts=5, generator=np.random.default_rng(0)) == []
