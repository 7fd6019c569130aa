"""What looks odd, and what does not: honest answers, short ones, and the same seed given twice."""

from __future__ import annotations

import numpy as np
import pytest

from rollmesh_learner.audit.oddities import looped_share, marks_of
from rollmesh_learner.audit.twins import Twins

RNG = np.random.default_rng(0)
LONG = RNG.integers(0, 49_000, size=64).astype(np.uint32)
SURPRISED = RNG.uniform(-3.0, -0.1, size=64).astype(np.float32)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "marks"),
    [
        (LONG, SURPRISED, ()),
        (LONG[:3], SURPRISED[:3], ()),
        (np.tile(LONG[:4], 16), SURPRISED, ("loop",)),
        (np.full(64, 7, np.uint32), SURPRISED, ("loop",)),
        (np.full(12, 7, np.uint32), SURPRISED[:12], ()),  # too short to be odd
        (LONG, np.full(64, -1.25, np.float32), ("flat",)),
        (LONG, np.zeros(64, np.float32), ()),  # a model that is sure of every token
        (LONG, SURPRISED - 8, ("improbable",)),
    ],
)
def test_marks(tokens: np.ndarray, logprobs: np.ndarray, marks: tuple[str, ...]) -> None:
    assert marks_of(tokens, logprobs) == marks


def test_a_loop_that_begins_late_is_seen_and_a_refrain_is_none() -> None:
    assert looped_share(np.concatenate([LONG[:20], np.tile(LONG[20:25], 20)])) > 0.5
    assert looped_share(np.concatenate([LONG, LONG[:20]])) < 0.3


def test_a_long_answer_under_another_seed_has_a_twin() -> None:
    twins = Twins()
    assert not twins.has_twin(LONG, SURPRISED, seed=1)
    assert twins.has_twin(LONG, SURPRISED, seed=2)
    assert not twins.has_twin(LONG[:63], SURPRISED[:63], seed=3)


def test_the_same_seed_given_to_another_node_is_expected_to_give_the_same_answer() -> None:
    twins = Twins()
    assert not twins.has_twin(LONG, SURPRISED, seed=1)
    assert not twins.has_twin(LONG, SURPRISED - 0.01, seed=1)


@pytest.mark.parametrize(("length", "nats"), [(31, 3.0), (64, 0.1)])
def test_short_answers_and_those_that_a_converged_model_always_gives_are_no_twins(length: int, nats: float) -> None:
    twins = Twins()
    logprobs = np.full(length, -nats, np.float32)
    assert not twins.has_twin(LONG[:length], logprobs, seed=1)
    assert not twins.has_twin(LONG[:length], logprobs, seed=2)


def test_only_so_many_are_remembered() -> None:
    twins = Twins(kept=2)
    for number in range(3):
        twins.has_twin(LONG + np.uint32(number), SURPRISED, seed=number)
    assert not twins.has_twin(LONG, SURPRISED, seed=9), "the oldest is forgotten"
    assert twins.has_twin(LONG + np.uint32(2), SURPRISED, seed=9)
