"""The host's book: what a completion is made of when its weights change on the way."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_node.engine.backend import Partial, Rollout
from rollmesh_node.engine.segments import Book
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed
from tests.unit.engine.requests import group

PIECE = limits.SEGMENT_TOKENS


def drawn(root: bytes, first: int, count: int):
    """Tokens and log-probs that tell their position and the weights that drew them."""
    positions = np.arange(first, first + count, dtype=np.uint32)
    return root[0] * 100_000 + positions, -positions.astype(np.float32)


def partial(root: bytes, first: int, count: int, *, index: int = 0) -> Partial:
    tokens, logprobs = drawn(root, first, count)
    return Partial(key=0, index=index, tokens=tokens, logprobs=logprobs)


def rollout(root: bytes, first: int, count: int, *, index: int = 0) -> Rollout:
    tokens, logprobs = drawn(root, first, count)
    return Rollout(key=0, index=index, tokens=tokens, logprobs=logprobs, finish="length")


def begun_of(requests) -> dict[int, int]:
    return {sample.index: len(sample.begun) for request in requests for sample in request.samples}


def spans(done) -> list[tuple[int, bytes]]:
    return [(span.first_token, span.root) for span in done.segments]


def opened(*roots: bytes, samples: int = 1) -> Book:
    book = Book()
    assert book.reopen(roots[0]) == []
    book.add(group(0, [1], seeds=range(samples), max_new_tokens=10_000), now=5.0)
    return book


def test_a_sample_that_is_never_held_has_one_segment() -> None:
    book = opened(b"A")
    done = book.finish(rollout(b"A", 0, 300), now=7.5)
    assert spans(done) == [(0, b"A")] and len(done.tokens) == 300 and done.elapsed_s == 2.5
    assert len(book) == 0


@pytest.mark.parametrize(
    ("drew", "begins", "expected"),
    [
        (0, 0, [(0, b"B")]), (127, 0, [(0, b"B")]), (128, 128, [(0, b"A"), (128, b"B")]),
        (300, 256, [(0, b"A"), (256, b"B")]),
    ],
)  # fmt: skip
def test_held_samples_go_on_from_a_boundary_under_new_weights(drew, begins, expected) -> None:
    book = opened(b"A")
    book.hold([partial(b"A", 0, drew)])
    assert begun_of(book.reopen(b"B")) == {0: begins}
    done = book.finish(rollout(b"B", begins, 40), now=6.0)
    assert spans(done) == expected
    assert done.logprobs.tolist() == [-position for position in range(begins + 40)]
    assert (done.tokens // 100_000).tolist() == [65] * begins + [66] * 40


def test_the_same_weights_go_on_where_they_were() -> None:
    book = opened(b"A")
    book.hold([partial(b"A", 0, 200)])
    assert begun_of(book.reopen(b"A")) == {0: 200}
    assert spans(book.finish(rollout(b"A", 200, 1), now=6.0)) == [(0, b"A")]


def test_weights_that_drew_nothing_leave_no_segment() -> None:
    book = opened(b"A")
    book.hold([partial(b"A", 0, 130)])
    book.reopen(b"B")
    book.hold([partial(b"B", 128, 100)])
    assert begun_of(book.reopen(b"C")) == {0: 128}
    book.hold([partial(b"C", 128, 0)])
    assert begun_of(book.reopen(b"A")) == {0: 128}
    assert spans(book.finish(rollout(b"A", 128, 1), now=6.0)) == [(0, b"A")]


def test_samples_of_a_group_are_held_on_their_own() -> None:
    book = opened(b"A", samples=3)
    assert spans(book.finish(rollout(b"A", 0, 9, index=1), now=6.0)) == [(0, b"A")]
    book.hold([partial(b"A", 0, 128, index=0), partial(b"A", 0, 500, index=2)])
    (request,) = book.reopen(b"B")
    assert begun_of([request]) == {0: 128, 2: 384}
    assert request.prompt.tolist() == [1] and request.max_new_tokens == 10_000
    assert [sample.seed for sample in request.samples] == [0, 2]


def test_a_sample_with_too_many_segments_begins_anew() -> None:
    book = opened(b"\0")
    position = 0
    for number in range(1, limits.MAX_SEGMENTS + 1):
        book.hold([partial(b"x", position, PIECE)])
        position = begun_of(book.reopen(bytes([number])))[0]
    assert position == 0
    assert spans(book.finish(rollout(b"x", 0, 3), now=6.0)) == [(0, bytes([limits.MAX_SEGMENTS]))]


def test_what_is_not_here_is_an_error() -> None:
    book = opened(b"A")
    with pytest.raises(ChildFailed, match="was not given"):
        book.finish(rollout(b"A", 0, 1, index=1), now=6.0)
    book.forget()
    with pytest.raises(ChildFailed, match="was not given"):
        book.finish(rollout(b"A", 0, 1), now=6.0)


@given(st.lists(st.tuples(st.integers(0, 400), st.sampled_from([b"A", b"B", b"C", b"D"])), max_size=8))
def test_every_token_is_labelled_with_the_weights_that_drew_it(story) -> None:
    book, root, position = opened(b"A"), b"A", 0
    for drew, then in story:
        book.hold([partial(root, position, drew)])
        position = begun_of(book.reopen(then))[0]
        root = then
    done = book.finish(rollout(root, position, 5), now=6.0)
    assert len(done.tokens) == len(done.logprobs) == position + 5
    starts = [span.first_token for span in done.segments]
    assert starts == sorted(set(starts)) and starts[0] == 0 and all(start % PIECE == 0 for start in starts)
    ends = [*starts[1:], len(done.tokens)]
    for span, end in zip(done.segments, ends, strict=True):
        assert set((done.tokens[span.first_token : end] // 100_000).tolist()) == {span.root[0]}
    assert (done.tokens % 100_000).tolist() == list(range(position + 5))
    roots = [span.root for span in done.segments]
    assert all(one != other for one, other in itertools.pairwise(roots))
