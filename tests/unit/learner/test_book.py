"""The book's rules, driven by hand and by chance. No loop, no clock, no disk."""

from __future__ import annotations

import secrets
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_learner.work.book import RELEASE_DELAY_S, Book, Rules
from rollmesh_learner.work.groups import LeaseRecord, Prompt, StoredRollout
from rollmesh_protocol.messages import Head

RULES = Rules(steps=20, staleness=2, groups_per_step=2, samples_per_group=3)
A, B = "node-a", "node-b"


def _head(step: int) -> Head:
    return Head(version=step + 1, step=step, root=step.to_bytes(32, "little"))


class Desk:
    """Does with a book what the learner's desks do, without ledger or mesh."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.book = Book(rules)
        self.now = 0.0
        self.trained: list[tuple[int, int]] = []

    def lease(self, node: str, *, step: int = 0, samples: int = 100, groups: int = 10) -> list[LeaseRecord]:
        self.book.prompts.extend(Prompt(0, "{}", b"\x01\x00\x00\x00") for _ in range(20 - len(self.book.prompts)))
        head = _head(step)
        records = []
        for offer in self.book.offers(node, held=head, samples=samples, groups=groups, now=self.now):
            record = LeaseRecord(
                secrets.token_bytes(16), node, offer.group.group_id, offer.indices, head.version, head.step, head.root,
                30.0, self.now,
            )  # fmt: skip
            self.book.lease(offer, record, wall_time=0)
            records.append(record)
        return records

    def fill(self, lease: LeaseRecord, *, ready: bool = True, drawn: bool = False) -> list[StoredRollout]:
        rollouts = [
            StoredRollout(
                lease.lease_id, index, lease.group_id, lease.node, lease.version, lease.step, lease.root, index,
                b"\x01\x00\x00\x00", b"\x00\x00\x00\x00", "stop", False,
            )
            for index in self.book.wanted(lease)
        ]  # fmt: skip
        self.book.fill(lease, rollouts, digest=b"d", receipt=b"r", wall_time=0)
        if ready:
            for rollout in rollouts:
                self.book.score(rollout.key, 1.0, error=None)
                self.book.draw(rollout.key, drawn=drawn)
        return rollouts

    def train(self) -> int:
        assert self.book.batch_is_ready()
        step = self.book.next_step
        groups, _ = self.book.assemble(wall_time=0)
        for group in groups:
            for sample in group.samples:
                assert sample.rollout is not None
                assert 0 <= step - sample.rollout.step <= self.book.rules.staleness
                self.trained.append((group.group_id, sample.index))
        assert len(self.trained) == len(set(self.trained)), "a sample was trained on twice"
        return step


def test_a_batch_is_complete_groups_in_lease_order() -> None:
    desk = Desk()
    leases = desk.lease(A)
    assert [lease.group_id for lease in leases] == list(range(6))  # S = 2: three steps of two groups
    for lease in reversed(leases[1:]):
        desk.fill(lease)
    assert not desk.book.batch_is_ready(), "five complete groups must wait for the first"
    assert "3 samples leased" in desk.book.waits_for()
    desk.fill(leases[0])
    assert desk.train() == 0
    assert {group for group, _ in desk.trained} == {0, 1}


def test_no_more_is_ordered_than_can_be_consumed() -> None:
    desk = Desk()
    assert len(desk.lease(A)) == 6
    assert desk.lease(B) == []
    for lease in list(desk.book.leases.values()):
        desk.fill(lease)
    desk.train()
    assert desk.lease(B) == [], "the head did not move, so the freed places would be too old"
    assert len(desk.lease(B, step=1)) == 2


def test_the_run_s_last_steps_order_no_waste() -> None:
    desk = Desk(Rules(steps=1, staleness=2, groups_per_step=2, samples_per_group=3))
    assert len(desk.lease(A)) == 2


def test_an_expired_lease_goes_to_another_node_first() -> None:
    desk = Desk()
    (first, *_) = desk.lease(A)
    desk.book.end_lease(first, "expired", now=desk.now)
    assert all(lease.group_id != first.group_id for lease in desk.lease(A))
    (again, *_) = desk.lease(B)
    assert (again.group_id, again.indices) == (first.group_id, first.indices)


def test_the_same_node_may_try_again_after_a_while() -> None:
    desk = Desk()
    (first, *_) = desk.lease(A)
    desk.book.end_lease(first, "expired", now=desk.now)
    desk.now += RELEASE_DELAY_S
    assert desk.lease(A)[0].group_id == first.group_id


def test_a_late_result_fills_what_nobody_else_has() -> None:
    desk = Desk()
    (first, *_) = desk.lease(A)
    desk.book.end_lease(first, "expired", now=desk.now)
    (again, *_) = desk.lease(B)
    assert len(desk.fill(first)) == 3
    assert desk.book.wanted(again) == ()
    assert desk.book.tally.late == 3


def test_a_lease_of_part_of_a_group_is_completed_by_others() -> None:
    desk = Desk()
    (first,) = desk.lease(A, groups=1)
    desk.book.end_lease(first, "returned", now=desk.now)
    (part,) = desk.lease(B, samples=2, groups=1)
    assert part.indices == (0, 1)
    desk.now += RELEASE_DELAY_S
    (rest,) = desk.lease(A, groups=1, samples=2)
    assert rest.indices == (2,)


def test_a_group_too_old_is_dropped_whole_and_counted() -> None:
    desk = Desk()
    leases = desk.lease(A)
    for lease in leases[:4]:
        desk.fill(lease)
    desk.train()
    desk.train()
    desk.fill(leases[4])
    desk.book.next_step = 3  # as if other groups had made the step
    desk.book.drop_stale()
    assert leases[4].group_id not in desk.book.groups
    assert leases[5].group_id in desk.book.groups, "a group without rollouts has no age yet"
    assert desk.book.tally.stale == 3
    assert desk.book.wanted(leases[5]) == ()


def test_a_rollout_drawn_for_audit_waits_for_its_verdict() -> None:
    desk = Desk()
    leases = desk.lease(A, groups=2)
    desk.fill(leases[0])
    rollouts = desk.fill(leases[1], drawn=True)
    assert not desk.book.batch_is_ready()
    for rollout in rollouts:
        desk.book.pass_audit(rollout.key, rollout.logprobs)
    assert desk.book.batch_is_ready()


def test_quarantine_voids_everything_unconsumed_of_the_node_alone() -> None:
    desk = Desk()
    of_a = desk.lease(A, groups=2)
    of_b = desk.lease(B, groups=2)
    for lease in (of_a[0], of_b[0]):
        desk.fill(lease)
    desk.book.void_node(A, now=desk.now)
    group_a, group_b = (desk.book.groups[lease.group_id] for lease in (of_a[0], of_b[0]))
    assert all(sample.state == "open" for sample in group_a.samples)
    assert group_b.is_complete
    assert of_a[1].state == "void"
    assert desk.book.wanted(of_a[1]) == ()
    assert desk.book.tally.void == 3


def test_consumed_work_is_not_voided() -> None:
    desk = Desk()
    for lease in desk.lease(A):
        desk.fill(lease)
    desk.train()
    desk.book.void_node(A, now=desk.now)
    assert desk.book.tally.consumed == 6
    assert desk.book.tally.void == 12


@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 3))
def test_whatever_happens_nothing_is_trained_twice_or_too_old(seed: int, staleness: int, per_step: int) -> None:
    """A run by chance: leases, results, expiry, returns, quarantine, slow publication. It ends and keeps every rule."""
    random = Random(seed)
    rules = Rules(steps=5, staleness=staleness, groups_per_step=per_step, samples_per_group=2)
    desk = Desk(rules)
    published = 0
    held: list[LeaseRecord] = []
    for _ in range(3000):
        if desk.book.next_step >= rules.steps:
            break
        desk.now += random.random()
        match random.randrange(7):
            case 0 | 1:
                held += desk.lease(random.choice([A, B]), step=random.choice([published, max(0, published - 1)]))
            case 2 | 3 if held:
                lease = held.pop(random.randrange(len(held)))
                if desk.book.wanted(lease):
                    desk.fill(lease)
            case 4 if held:
                lease = random.choice(held)
                desk.book.end_lease(lease, random.choice(["expired", "returned"]), now=desk.now)
            case 5 if random.random() < 0.1:
                desk.book.void_node(random.choice([A, B]), now=desk.now)
            case 6:
                published = min(desk.book.next_step, published + 1)
        desk.book.drop_stale()
        if desk.book.batch_is_ready():
            desk.train()
    else:
        pytest.fail(f"the run came to a halt: {desk.book.waits_for()}")
    assert len(desk.trained) == rules.steps * per_step * 2
