"""Passes, conduct, served bytes, offers, edge book and introductions: the pure parts around the swarm."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_peer.weights.conduct import ConductBook
from rollmesh_peer.weights.edge_book import EdgeBook
from rollmesh_peer.weights.introductions import introduce
from rollmesh_peer.weights.offers import Offers
from rollmesh_peer.weights.passes import PassBook
from rollmesh_peer.weights.seeding import ServedBytes
from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.manifest import Edge
from tests.unit.swarm.peers import pass_for, peer_of, seed
from tests.unit.weights.kit import LEARNER, RUN

A, B = peer_of(1), peer_of(2)


# --- passes ----------------------------------------------------------------------------------------------------------
def book(*, newest=0, admits=None):
    return PassBook(run=RUN, learner=LEARNER.peer, newest_version=lambda: newest, admits=admits)


def code_of(refused):
    return refused.value.code


def test_a_pass_admits_its_peer_and_no_other():
    passes = book()
    with pytest.raises(Refused) as refused:
        passes.require(A)
    assert code_of(refused) == "node.not_admitted"
    passes.present(A, pass_for(A))
    passes.require(A)
    with pytest.raises(Refused) as refused:
        passes.present(B, pass_for(A))
    assert code_of(refused) == "node.not_admitted"


@pytest.mark.parametrize(
    ("sealed", "code"),
    [
        (pass_for(A, identity=Identity(seed(5))), "envelope.key"),
        (pass_for(A, run="another-run"), "envelope.run"),
        (pass_for(A)[:-1] + b"\x00", "envelope.signature"),
        (b"", "request.invalid"),
    ],
)
def test_a_forged_pass_is_refused(sealed, code):
    passes = book()
    with pytest.raises(Refused) as refused:
        passes.present(A, sealed)
    assert code_of(refused) == code
    with pytest.raises(Refused):
        passes.require(A)


def test_a_pass_grows_old():
    fresh, old = book(newest=limits.PASS_VERSIONS + 3), book(newest=limits.PASS_VERSIONS + 4)
    fresh.present(A, pass_for(A, version=3))
    with pytest.raises(Refused, match="too old"):
        old.present(A, pass_for(A, version=3))
    old.present(A, pass_for(A, version=4))


def test_a_revoked_peer_stays_out_whatever_it_shows():
    passes = book()
    passes.present(A, pass_for(A))
    passes.revoke(A)
    for attempt in (lambda: passes.require(A), lambda: passes.present(A, pass_for(A))):
        with pytest.raises(Refused) as refused:
            attempt()
        assert code_of(refused) == "node.quarantined"
    passes.restore(A)
    passes.present(A, pass_for(A))


def test_the_learners_own_list_decides_on_the_learner():
    passes = book(admits=lambda peer: peer == A)
    passes.present(A, b"never looked at")
    with pytest.raises(Refused):
        passes.present(B, pass_for(B))


def test_the_learner_is_always_admitted():
    book().require(LEARNER.peer)


def test_remembered_passes_are_bounded(monkeypatch):
    monkeypatch.setattr(limits, "MAX_CONDUCT_PEERS", 3)
    passes = book()
    for number in range(1, 6):
        passes.present(peer_of(number), pass_for(peer_of(number)))
    with pytest.raises(Refused):
        passes.require(peer_of(1))
    passes.require(peer_of(5))


# --- conduct ---------------------------------------------------------------------------------------------------------
def test_a_penalty_doubles_and_is_forgotten_in_the_end():
    conduct = ConductBook()
    now, pauses = 0.0, []
    for _ in range(12):
        until = conduct.penalise("a", now=now)
        pauses.append(until - now)
        assert not conduct.is_free("a", now=until - 0.1)
        assert conduct.is_free("a", now=until)
        now = until
    assert pauses[:3] == [5.0, 10.0, 20.0]
    assert pauses[-1] == limits.PENALTY_MOST_S
    now += limits.SHUN_S + 1
    assert conduct.penalise("a", now=now) - now == limits.PENALTY_FIRST_S
    assert not conduct.is_shunned("a", now=now)


def test_a_shunned_peer_is_kept_away_for_an_hour():
    conduct = ConductBook()
    conduct.shun("a", now=10.0)
    assert conduct.is_shunned("a", now=10.0)
    assert not conduct.is_free("a", now=limits.SHUN_S)
    assert conduct.next_release(now=10.0) == 10.0 + limits.SHUN_S
    assert conduct.is_free("a", now=10.0 + limits.SHUN_S)
    assert conduct.is_free("stranger", now=0.0)


# --- served bytes ----------------------------------------------------------------------------------------------------
@given(chunks=st.integers(1, 50), chunk=st.integers(1, 1000))
def test_no_peer_gets_more_than_its_share_and_a_chunk(chunks, chunk):
    served, payload, sent = ServedBytes(), chunks * chunk, 0
    with pytest.raises(Refused) as refused:
        for _ in range(2 * chunks + 2):
            served.charge("a", b"m", num_bytes=chunk, payload_bytes=payload, now=0.0)
            sent += chunk
    assert refused.value.code == "chunk.served"
    assert payload <= sent < limits.SERVED_FILE_RATIO * payload + chunk
    served.charge("b", b"m", num_bytes=chunk, payload_bytes=payload, now=0.0)
    served.charge("a", b"other", num_bytes=chunk, payload_bytes=payload, now=0.0)
    served.charge("a", b"m", num_bytes=chunk, payload_bytes=payload, now=limits.SERVED_WINDOW_S + 1)


# --- offers ----------------------------------------------------------------------------------------------------------
def none(count):
    return np.zeros(count, np.bool_)


def test_different_peers_are_offered_different_chunks_as_long_as_there_are_any():
    offers = Offers(64, random=Random(0))
    seen = Counter()
    for peer in "abcdefgh":
        seen.update(np.flatnonzero(offers.update(peer, none(64))).tolist())
    assert len(seen) == 64
    assert set(seen.values()) == {1}


def test_a_peer_with_nothing_else_to_ask_for_is_offered_a_little_of_what_others_were():
    offers = Offers(limits.FIRST_OFFERS, random=Random(0))
    assert offers.update("a", none(limits.FIRST_OFFERS)).all()
    assert offers.update("b", none(limits.FIRST_OFFERS)).sum() == limits.SPARE_OFFERS


def test_what_a_lost_peer_was_offered_is_offered_again():
    offers = Offers(limits.FIRST_OFFERS, random=Random(0))
    offers.update("a", none(limits.FIRST_OFFERS))
    offers.leave("a")
    assert offers.update("b", none(limits.FIRST_OFFERS)).all()


def test_the_window_grows_with_a_peer_that_keeps_up():
    offers, has, sizes = Offers(4096, random=Random(0)), none(4096), []
    for _ in range(8):
        told = offers.update("a", has)
        sizes.append(int((told & ~has).sum()))
        has = told
    assert sizes == [8, 16, 32, 64, 128, 256, 256, 256]


@given(seed_=st.integers(0, 1000), peers=st.integers(1, 6), chunks=st.integers(1, 80))
def test_everybody_is_always_offered_something_it_lacks_until_it_has_everything(seed_, peers, chunks):
    chance = Random(seed_)
    offers = Offers(chunks, random=chance)
    has = {str(number): none(chunks) for number in range(peers)}
    for _ in range(10_000):
        peer = chance.choice(list(has))
        told = offers.update(peer, has[peer])
        assert (told & has[peer] == has[peer]).all()
        lacking = np.flatnonzero(told & ~has[peer])
        assert len(lacking) or has[peer].all()
        for index in lacking:
            if chance.random() < 0.6:
                has[peer][index] = True
        if chance.random() < 0.05:
            offers.leave(peer)
        if all(bits.all() for bits in has.values()):
            return
    raise AssertionError("somebody is starved")


# --- edge book -------------------------------------------------------------------------------------------------------
def edge(start, end, cost):
    parent = bytes([start]) * 32
    name = bytes([start, end]) * 16
    return Edge(
        kind="patch", version=end, step=end, parent=parent, root=bytes([end]) * 32,
        manifest=name, manifest_bytes=10, payload_bytes=cost,
    )  # fmt: skip


def test_what_is_on_disk_is_free_so_a_fetch_is_left_only_for_a_cheaper_whole_way():
    one, two, skip = edge(0, 1, 100), edge(1, 2, 100), edge(0, 2, 150)
    edges = EdgeBook()
    for item in (one, two, skip):
        edges.learn(item)
    held, goal = bytes(32), bytes([2]) * 32
    assert edges.plan({item: item.payload_bytes for item in edges.edges}, held=held, goal=goal) == (skip,)
    assert edges.plan({one: 10, two: 100, skip: 150}, held=held, goal=goal) == (one, two)
    assert edges.plan({one: 0, two: 0, skip: 150}, held=held, goal=goal) == (one, two)
    assert edges.plan({one: 0, two: 0}, held=held, goal=bytes([9]) * 32) is None


def test_the_learners_list_replaces_what_was_known_up_to_its_head():
    edges = EdgeBook()
    old, kept, newer = edge(0, 1, 5), edge(0, 2, 5), edge(2, 3, 5)
    for item in (old, newer):
        edges.learn(item)
    edges.replace([kept], head_version=2)
    assert set(edges.edges) == {kept, newer}


def test_a_discarded_edge_does_not_come_back():
    edges, bad = EdgeBook(), edge(0, 1, 5)
    edges.discard(bad, why="it lies")
    edges.learn(bad)
    assert edges.edges == ()
    assert edges.why_useless(bad) == "it lies"


# --- introductions ---------------------------------------------------------------------------------------------------
def members(*addresses):
    return {
        peer_of(number): (f"/ip4/{host}/tcp/4700/p2p/{peer_of(number)}",)
        for number, host in enumerate(addresses, start=1)
    }


def test_nobody_is_introduced_to_itself_and_only_those_that_can_be_dialled_are_named():
    known = {**members("198.51.100.1", "203.0.113.1"), peer_of(3): (), peer_of(4): ("/ip4/nonsense",)}
    known[peer_of(5)] = (f"/ip4/192.0.2.1/tcp/4700/p2p/{peer_of(1)}",)
    chosen = introduce(known, to=peer_of(1), count=16, random=Random(0))
    assert [neighbour.peer for neighbour in chosen] == [peer_of(2)]


def test_one_address_block_gets_a_quarter_while_there_are_others():
    crowd = [f"198.51.100.{number}" for number in range(1, 41)]
    others = [f"203.0.{number}.1" for number in range(8)]
    known = members(*crowd, *others)
    for seed_ in range(20):
        chosen = introduce(known, to="x", count=8, random=Random(seed_))
        blocks = Counter(neighbour.addresses[0].split(".")[0:3][0] for neighbour in chosen)
        assert len(chosen) == 8
        assert blocks["/ip4/198"] <= 2
    alone = introduce(members(*crowd), to="x", count=8, random=Random(0))
    assert len(alone) == 8


def test_introductions_are_random_and_bounded():
    known = members(*[f"127.0.0.{number}" for number in range(1, 60)])
    first, second = (introduce(known, to="x", count=16, random=Random(seed_)) for seed_ in (1, 2))
    assert len(first) == limits.MAX_NEIGHBOURS
    assert first != second
