"""Token buckets and the book of offences, with the time as an argument."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmesh_peer.mesh.rates import OffenceBook, TokenBucket
from rollmesh_protocol import limits


def test_a_bucket_gives_its_burst_and_then_its_rate():
    bucket = TokenBucket(rate=2.0, burst=3.0, now=10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(10.4)
    assert bucket.take(10.5)
    assert not bucket.is_full(11.0)
    assert bucket.is_full(13.0)
    assert [bucket.take(1000.0) for _ in range(4)] == [True, True, True, False]


def test_a_clock_that_goes_back_gives_nothing():
    bucket = TokenBucket(rate=1.0, burst=1.0, now=10.0)
    assert bucket.take(10.0)
    assert not bucket.take(5.0)
    assert not bucket.take(10.5)
    assert bucket.take(11.0)


@given(st.lists(st.floats(min_value=0, max_value=5), min_size=1, max_size=200))
def test_no_more_is_given_than_burst_and_rate_allow(gaps):
    bucket = TokenBucket(rate=3.0, burst=5.0, now=0.0)
    now = given_out = 0.0
    for gap in gaps:
        now += gap
        given_out += bucket.take(now)
        assert given_out <= 5.0 + 3.0 * now + 1e-6


def test_offences_add_up_and_a_ban_ends():
    book = OffenceBook()
    assert [book.record("mallory", now=0.0) for _ in range(limits.MAX_OFFENCES + 1)] == (
        [False] * limits.MAX_OFFENCES + [True]
    )
    assert book.is_banned("mallory", now=1.0)
    assert not book.is_banned("alice", now=1.0)
    assert not book.is_banned("mallory", now=limits.BAN_S)
    assert not book.record("mallory", now=limits.BAN_S)


def test_time_forgives():
    book = OffenceBook()
    step_s = 1.1 * limits.OFFENCE_WINDOW_S / limits.MAX_OFFENCES
    assert not any(book.record("clumsy", now=n * step_s) for n in range(500))


def test_light_offences_count_less():
    book = OffenceBook()
    assert not any(book.record("bursty", now=0.0, weight=0.05) for _ in range(20 * limits.MAX_OFFENCES - 1))


def test_the_book_is_bounded():
    book = OffenceBook()
    for number in range(2 * limits.MAX_BANS):
        book.record(str(number), now=0.0, weight=limits.MAX_OFFENCES + 1.0)
    assert book.is_banned(str(2 * limits.MAX_BANS - 1), now=0.0)
    assert not book.is_banned("0", now=0.0)
    assert len(book._banned_until) == limits.MAX_BANS
    for number in range(2 * limits.MAX_BANS):
        book.record(f"x{number}", now=0.0)
    assert len(book._patience) == limits.MAX_BANS


def test_what_is_given_back_fits_the_bucket():
    bucket = TokenBucket(rate=1.0, burst=2.0, now=0.0)
    assert bucket.take(0.0, tokens=2.0)
    bucket.give(1.5)
    assert bucket.take(0.0) and not bucket.take(0.0)
    bucket.give(100.0)
    assert bucket.take(0.0, tokens=2.0) and not bucket.take(0.0)
