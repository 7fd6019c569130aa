"""The forest of prefixes: every sample's own sequence can be read off it, and blocks lose no pair."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_learner.training.batch import Sample
from rollmesh_learner.training.forest import Forest, blocks, grow, micro_batches, visible
from tests.unit.training.samples import random_samples, sample

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=7)
batches = st.lists(st.builds(sample, tokens, tokens), min_size=1, max_size=9)


def above(forest: Forest, node: int) -> list[int]:
    return [j for j in range(node + 1) if node < forest.ends[j]]


def test_by_hand() -> None:
    forest = grow([sample([5, 6], [1, 2, 3]), sample([5, 6], [1, 4, 9]), sample([5, 7], [8])])
    assert forest.tokens.tolist() == [5, 6, 1, 2, 4, 7]
    assert forest.positions.tolist() == [0, 1, 2, 3, 3, 1]
    assert forest.ends.tolist() == [6, 5, 5, 4, 5, 6]
    assert forest.sources.tolist() == [1, 2, 3, 1, 2, 4, 5]


@given(batches)
def test_a_samples_path_is_what_it_reads(samples: list[Sample]) -> None:
    forest = grow(samples)
    at = 0
    for each in samples:
        sources = forest.sources[at : at + len(each.tokens)]
        at += len(each.tokens)
        path = above(forest, int(sources[-1]))
        assert forest.tokens[path].tolist() == each.read.tolist()
        assert forest.positions[path].tolist() == list(range(len(path)))
        assert path[len(each.prompt) - 1 :] == sources.tolist()
    assert at == len(forest.sources)


@given(batches)
def test_nothing_is_computed_twice(samples: list[Sample]) -> None:
    forest = grow(samples)
    prefixes = {tuple(s.read[: n + 1].tolist()) for s in samples for n in range(len(s.read))}
    assert len(forest.tokens) == len(prefixes)


@given(batches, st.integers(1, 12))
def test_blocks_hold_every_pair_of_node_and_ancestor(samples: list[Sample], most: int) -> None:
    forest = grow(samples)
    found = blocks(forest, max_nodes=most)
    assert [b.first for b in found] + [len(forest.tokens)] == [0] + [b.last for b in found]
    for block in found:
        keys = np.concatenate([block.above, np.arange(block.first, block.last)])
        seen = visible(forest, block=block)
        for row, node in enumerate(range(block.first, block.last)):
            assert keys[seen[row]].tolist() == above(forest, node)


def test_blocks_are_small_where_the_forest_forks() -> None:
    forest = grow(random_samples(0, groups=8, size=8, longest=12))
    found = blocks(forest, max_nodes=40)
    pairs = sum((b.last - b.first) * (b.last - b.first + len(b.above)) for b in found)
    assert max(b.last - b.first for b in found) <= 40
    assert pairs < len(forest.tokens) ** 2 / 3


def test_a_long_trunk_is_one_block() -> None:
    forest = grow([sample(range(100), [1, 2]), sample(range(100), [3, 4])])
    assert [(b.first, b.last, len(b.above)) for b in blocks(forest, max_nodes=10)] == [(0, 100, 0), (100, 102, 100)]


@given(batches, st.integers(1, 30))
def test_micro_batches_hold_each_sample_once_and_stay_within_bounds(samples: list[Sample], most: int) -> None:
    found = micro_batches(samples, max_tokens=most)
    assert sorted(index for batch in found for index in batch) == list(range(len(samples)))
    assert found == micro_batches(samples, max_tokens=most)
    for batch in found:
        assert len(grow([samples[i] for i in batch]).tokens) <= most or len(batch) == 1


@pytest.mark.parametrize("most", [20, 60, 1000])
def test_micro_batches_keep_what_is_shared_together(most: int) -> None:
    samples = random_samples(1, groups=6, size=6)
    found = micro_batches(samples, max_tokens=most)
    computed = sum(len(grow([samples[i] for i in batch]).tokens) for batch in found)
    assert computed < sum(len(s.read) for s in samples)
    assert (len(found) == 1) == (most == 1000)
