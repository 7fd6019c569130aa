"""Shares of a batch: how large they are, that work is leased within them, and that a batch keeps them."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_learner.work.book import Book, Rules
from rollmesh_learner.work.caps import SLACK, effective_nodes, most_samples, share_of_batch
from rollmesh_learner.work.groups import Group, LeaseRecord, Prompt, StoredRollout
from rollmesh_protocol.messages import Head

RULES = Rules(steps=20, staleness=2, groups_per_step=4, samples_per_group=4)
BATCH = 16
A, B, C = "node-a", "node-b", "node-c"


class Desk:
    """A book whose nodes have the shares in :attr:`shares`, and what desks do with it."""

    def __init__(self, shares: dict[str, float], *, rules: Rules = RULES) -> None:
        self.shares = shares
        self.book = Book(rules, share_of=lambda node: self.shares.get(node, 1.0))

    def lease(self, node: str, *, samples: int = 1000, groups: int = 100, now: float = 0.0) -> list[LeaseRecord]:
        self.book.prompts.extend(Prompt(0, "{}", b"\1\0\0\0") for _ in range(40 - len(self.book.prompts)))
        step = self.book.next_step
        head = Head(version=step + 1, step=step, root=step.to_bytes(32, "little"))
        records = []
        for offer in self.book.offers(node, held=head, samples=samples, groups=groups, now=now):
            record = LeaseRecord(
                secrets.token_bytes(16), node, offer.group.group_id, offer.indices, head.version, head.step, head.root,
                30.0, now,
            )  # fmt: skip
            self.book.lease(offer, record, wall_time=0)
            records.append(record)
        return records

    def fill(self, leases: Iterable[LeaseRecord], *, tokens: int = 1) -> None:
        for lease in leases:
            rollouts = [
                StoredRollout(
                    lease.lease_id, index, lease.group_id, lease.node, lease.version, lease.step, lease.root, index,
                    bytes(4 * tokens), bytes(4 * tokens), "stop", False,
                )
                for index in self.book.wanted(lease)
            ]  # fmt: skip
            self.book.fill(lease, rollouts, digest=b"d", receipt=b"r", wall_time=0)
            for rollout in rollouts:
                self.book.score(rollout.key, 1.0, error=None)
                self.book.draw(rollout.key, drawn=False)

    def train(self) -> list[Group]:
        assert self.book.batch_is_ready(), self.book.waits_for()
        groups, _ = self.book.assemble(wall_time=0)
        return groups


def makers(groups: Iterable[Group]) -> Counter[str]:
    return Counter(sample.rollout.node for group in groups for sample in group.samples if sample.rollout)


# --- how large a share is --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("speeds", "nodes"),
    [([], 1), ([0.0], 1), ([3.0], 1), ([2.0, 2.0], 2), ([1.0] * 10, 10), ([1.0, 0.001], 1.002), ([2.0, 1.0], 1.8)],
)
def test_nodes_count_by_what_they_deliver(speeds: list[float], nodes: float) -> None:
    assert effective_nodes(speeds) == pytest.approx(nodes, rel=1e-3)


@pytest.mark.parametrize(
    ("nodes", "share"), [(1, 1.0), (1.5, 1.0), (2, 0.75), (3, 0.5), (6, 0.25), (100, 0.25), (0, 1.0)]
)
def test_a_share_is_the_cap_or_one_and_a_half_equal_parts(nodes: float, share: float) -> None:
    assert share_of_batch(cap=0.25, nodes=nodes) == pytest.approx(share)


@given(st.integers(1, 200), st.integers(1, 400), st.floats(0, 1))
def test_shares_together_always_make_a_batch_and_none_is_more_than_rounding_above_itself(
    nodes: int, size: int, cap: float
) -> None:
    share = share_of_batch(cap=cap, nodes=nodes)
    most = most_samples(share, size)
    assert nodes * most >= size
    assert most <= max(1, share * size + 1e-6) or (most == 2 and SLACK < share * size < 2)


# --- held where work is leased ---------------------------------------------------------------------------------------
def test_work_is_leased_within_the_share_of_each_batch_to_come() -> None:
    desk = Desk({A: 0.5, B: 0.5})
    assert sum(len(lease.indices) for lease in desk.lease(A)) == 8
    assert desk.lease(A) == [], "the next group would be in the same batch"
    assert [lease.group_id for lease in desk.lease(B)] == [2, 3, 4, 5], "half of this batch and half of the next"
    assert [lease.group_id for lease in desk.lease(A)] == [6, 7, 8, 9]


def test_in_full_standing_there_is_no_share() -> None:
    assert len(Desk({A: 0.5}).lease(C)) == 12


def test_a_group_is_split_where_the_share_is_smaller_than_a_group() -> None:
    desk = Desk({A: 3 / BATCH, B: 3 / BATCH})
    (mine,) = desk.lease(A)
    assert mine.indices == (0, 1, 2)
    rest = desk.lease(C, groups=1)
    assert (rest[0].group_id, rest[0].indices) == (mine.group_id, (3,))


def test_in_a_group_of_several_nodes_the_share_holds_too() -> None:
    desk = Desk({B: 0.5})
    (first,) = desk.lease(A, groups=1, samples=4)
    desk.book.end_lease(first, "returned", now=0.0)
    desk.lease(C, groups=1, samples=1)
    taken = [lease for lease in desk.lease(B, groups=1) if lease.group_id == first.group_id]
    assert [lease.indices for lease in taken] == [(1, 2)]


# --- looked at again where a batch is taken --------------------------------------------------------------------------
def test_who_lost_full_standing_meanwhile_is_put_behind_others_that_are_under_way() -> None:
    desk = Desk({})
    of_a = desk.lease(A, groups=6)
    of_b = desk.lease(B, groups=6)
    desk.fill(of_a)
    desk.shares = {A: 0.5}
    assert not desk.book.batch_is_ready(), "whether the others are complete does not matter"
    desk.fill(of_b)
    batch = desk.train()
    assert [group.group_id for group in batch] == [0, 1, 6, 7], "in lease order all the same"
    assert makers(batch) == {A: 8, B: 8}
    assert [group.group_id for group in desk.train()] == [2, 3, 8, 9]
    assert desk.book.tally.over_cap == 0


def test_where_nobody_else_has_work_under_way_the_run_goes_on_and_it_is_told() -> None:
    desk = Desk({})
    desk.fill(desk.lease(A, groups=4))
    desk.shares = {A: 0.5}
    assert makers(desk.train()) == {A: 16}
    assert desk.book.tally.over_cap == 8


def test_a_batch_that_is_not_complete_is_not_taken() -> None:
    desk = Desk({})
    desk.lease(A, groups=4)
    assert not desk.book.batch_is_ready()
    with pytest.raises(ValueError, match="before it was complete"):
        desk.book.assemble(wall_time=0)


# --- what is dropped and what is topped up ---------------------------------------------------------------------------
def test_dropped_and_consumed_lengths_stand_side_by_side() -> None:
    desk = Desk({}, rules=Rules(steps=20, staleness=0, groups_per_step=1, samples_per_group=2))
    desk.fill(desk.lease(A, groups=1), tokens=5)
    desk.train()
    desk.fill(desk.lease(A, groups=1), tokens=100)
    desk.book.next_step += 1
    desk.book.drop_stale()
    assert desk.book.tally.lengths == {4: {"consumed": 2, "dropped": 0}, 64: {"consumed": 0, "dropped": 2}}


def test_voided_samples_are_leased_again_and_those_of_others_in_the_group_stay() -> None:
    desk = Desk({B: 0.5})
    (first,) = desk.lease(A, groups=1, samples=4)
    desk.book.end_lease(first, "returned", now=0.0)
    desk.fill(desk.lease(B, groups=1, samples=2))
    desk.fill(desk.lease(C, groups=1, samples=2))
    desk.book.void_node(C, now=0.0)
    group = desk.book.groups[first.group_id]
    assert [sample.state for sample in group.samples] == ["filled", "filled", "open", "open"]
    (again,) = desk.lease(A, groups=1, now=20.0)
    assert (again.group_id, again.indices) == (first.group_id, (2, 3))
    desk.fill([again])
    assert group.is_complete and makers([group]) == {A: 2, B: 2}


@given(st.integers(0, 2**32), st.integers(2, 6))
def test_nobody_below_full_standing_makes_more_than_its_share_while_others_work(seed: int, count: int) -> None:
    """Nodes of chance speeds, leases lost and voided now and then: shares are kept, the run ends."""
    random = Random(seed)
    names = [f"node-{number}" for number in range(count)]
    share = share_of_batch(cap=0.25, nodes=count)
    desk = Desk(dict.fromkeys(names, share), rules=Rules(steps=6, staleness=2, groups_per_step=4, samples_per_group=4))
    held: list[LeaseRecord] = []
    now = 0.0
    for _ in range(4000):
        if desk.book.next_step >= desk.book.rules.steps:
            return
        now += 1.0
        chance = random.random()
        if chance < 0.5:
            held += desk.lease(random.choice(names), samples=random.randrange(1, 9), groups=2, now=now)
        elif held:
            lease = held.pop(random.randrange(len(held)))
            if chance < 0.9:
                desk.fill([lease])
            else:
                desk.book.end_lease(lease, "expired", now=now)
        if random.random() < 0.01:
            desk.book.void_node(random.choice(names), now=now)
        desk.book.drop_stale()
        if desk.book.batch_is_ready():
            excess = desk.book.tally.over_cap
            batch = desk.train()
            above = max(makers(batch).values()) - most_samples(share, 16)
            assert above <= 0 or desk.book.tally.over_cap > excess
    pytest.fail(f"the run came to a halt: {desk.book.waits_for()}")
