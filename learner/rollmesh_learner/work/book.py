"""The book of work: which sample is open, leased or filled, by whom, and what may be ordered or trained on next.

A pure state machine. Methods take the time as an argument, change the state, and return the statements that make the
change durable; the caller commits them before anyone outside hears of it. The rules:

- A sample is filled by at most one rollout, and a group is trained on at most once.
- A batch takes complete groups in the order in which they were leased, never in order of completion, because
  completion order favours short answers.
- A group whose oldest rollout would be older than S when consumed is dropped whole.
- Below full standing no node makes more than its share of a batch (:mod:`rollmesh_learner.work.caps`).
- No more groups are ordered than can still be consumed within S (:mod:`rollmesh_protocol.staleness`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rollmesh_learner.records import rows
from rollmesh_learner.records.ledger import Statement
from rollmesh_learner.work import lengths
from rollmesh_learner.work.caps import Room, choose_batch
from rollmesh_learner.work.groups import (
    Group,
    LeaseRecord,
    LeaseState,
    Prompt,
    RolloutKey,
    RolloutState,
    Sample,
    StoredRollout,
    Tally,
)
from rollmesh_protocol.messages import Head
from rollmesh_protocol.staleness import age, group_budget, is_admissible

RELEASE_DELAY_S = 10.0
"""How long a sample waits for another node after the one that had it failed; then the same node may try again."""
KEPT_LEASES = 20_000
"""Ended leases remembered in memory, so that a result sent again finds its receipt; older ones are in the ledger."""


@dataclass(frozen=True)
class Rules:
    """What the operator fixed: steps of the run, staleness S, and the shape of a batch."""

    steps: int
    staleness: int
    groups_per_step: int
    samples_per_group: int


@dataclass(frozen=True)
class Offer:
    """What may be leased to one node now: some open samples of one group."""

    group: Group
    indices: tuple[int, ...]
    is_new: bool


class Book:
    """The state of all work of a run."""

    def __init__(
        self,
        rules: Rules,
        *,
        next_group: int = 0,
        next_step: int = 0,
        share_of: Callable[[str], float] = lambda _node: 1.0,
    ) -> None:
        self.rules = rules
        self.share_of = share_of
        """The largest share of a batch that a node may have."""
        self.next_group = next_group
        """The id of the next new group: ids are never used twice, and each is also an index into the prompts."""
        self.next_step = next_step
        """The lowest step whose batch is not yet assembled."""
        self.groups: dict[int, Group] = {}
        """Live groups only, by id; in order of their first lease, because ids grow."""
        self.leases: dict[bytes, LeaseRecord] = {}
        self.prompts: deque[Prompt | None] = deque()
        """Prompts made in advance for the groups from ``next_group`` on; None for one that is passed over."""
        self.tally = Tally()
        self.is_suspended = False
        """True while the ledger is being brought back to a checkpoint: nothing is ordered, taken in or trained on."""
        self._ended: deque[bytes] = deque()
        self._rollouts: dict[RolloutKey, StoredRollout] = {}
        self._next_batch: tuple[list[Group], int] = [], 0
        """What :meth:`batch_is_ready` looked at last, and how much of it is above a share."""

    # --- leasing -----------------------------------------------------------------------------------------------------
    def budget(self, held: Head) -> int:
        """How many new groups may be ordered under the weights of ``held``."""
        rules = self.rules
        if self.is_suspended:
            return 0
        within_staleness = group_budget(
            head_step=held.step,
            next_step=self.next_step,
            staleness=rules.staleness,
            groups_per_step=rules.groups_per_step,
            open_groups=len(self.groups),
        )
        left_in_run = (rules.steps - self.next_step) * rules.groups_per_step - len(self.groups)
        return max(0, min(within_staleness, left_in_run))

    def offers(
        self, node: str, *, held: Head, samples: int, groups: int, now: float, is_preferred: bool = True
    ) -> list[Offer]:
        """Up to ``groups`` pieces of work of together at most ``samples`` samples that ``node`` may have now.

        Open samples of groups that are under way come first, oldest group first: they hold a batch up. For a while
        those that somebody let go of are for ``is_preferred`` nodes. A new group is split where the node's share of its
        batch is smaller.
        """
        if not self.is_young(held.step):
            return []
        room = self._room(node)

        def free(group: Group) -> list[int]:
            open_ones = [sample for sample in group.samples if sample.state == "open"]
            return [s.index for s in open_ones if _may_have(s, node, now=now, is_preferred=is_preferred)]

        offers = self._under_way(room, free, samples=samples, groups=groups)
        samples -= sum(len(offer.indices) for offer in offers)
        new_groups = self.budget(held)
        while len(offers) < groups and new_groups > 0 and self.prompts:
            position = len(self.groups)
            size = min(self.rules.samples_per_group, room.of_batch(position))
            if size < 1 or samples < size:
                break
            prompt = self.prompts.popleft()
            self.next_group += 1
            if prompt is None:
                continue
            group = Group(self.next_group - 1, prompt, [Sample(i) for i in range(self.rules.samples_per_group)])
            self.groups[group.group_id] = group
            offers.append(Offer(group, tuple(range(size)), is_new=True))
            new_groups -= 1
            samples -= size
            room.took(position, size)
        return offers

    def overdue(self, node: str, *, samples: int, groups: int, is_late: Callable[[LeaseRecord], bool]) -> list[Offer]:
        """Samples that the next batch waits for and that others hold on leases that ``is_late`` says to overtake.

        Both leases stand, and the first result counts (:mod:`rollmesh_learner.work.overtaking`).
        """
        awaited = {group.group_id for group in self._next_groups()[0]}

        def late(group: Group) -> list[int]:
            there = group.samples if group.group_id in awaited else ()
            return [sample.index for sample in there if self._is_late(sample, node, is_late)]

        return self._under_way(self._room(node), late, samples=samples, groups=groups)

    def _under_way(self, room: Room, choose: Callable[[Group], list[int]], *, samples: int, groups: int) -> list[Offer]:
        """Of live groups, oldest first: the samples that ``choose`` names, as far as there is room for them."""
        offers: list[Offer] = []
        for position, group in enumerate(self.groups.values()):
            if len(offers) >= groups:
                break
            chosen = choose(group)[: max(0, min(samples, room.of_group(position, group)))]
            if chosen:
                offers.append(Offer(group, tuple(chosen), is_new=False))
                samples -= len(chosen)
                room.took(position, len(chosen))
        return offers

    def _is_late(self, sample: Sample, node: str, is_late: Callable[[LeaseRecord], bool]) -> bool:
        lease = self.leases.get(sample.lease_id) if sample.state == "leased" and sample.lease_id is not None else None
        return lease is not None and lease.node != node and is_late(lease)

    def _room(self, node: str) -> Room:
        return Room(
            node,
            list(self.groups.values()),
            groups_per_step=self.rules.groups_per_step,
            samples_per_group=self.rules.samples_per_group,
            share=self.share_of(node),
            lease_nodes=self._lease_node,
        )

    def _lease_node(self, lease_id: bytes) -> str:
        lease = self.leases.get(lease_id)
        return lease.node if lease is not None else ""

    def lease(self, offer: Offer, record: LeaseRecord, *, wall_time: float) -> list[Statement]:
        """``record`` is given out for ``offer``."""
        for index in record.indices:
            sample = offer.group.samples[index]
            sample.state = "leased"
            sample.lease_id = record.lease_id
        self.leases[record.lease_id] = record
        self.tally.leased += len(record.indices)
        statements = [rows.insert_group(offer.group)] if offer.is_new else []
        return [*statements, rows.insert_lease(record, wall_time=wall_time)]

    def outstanding(self, node: str) -> int:
        """Samples that ``node`` holds on open leases."""
        return sum(len(lease.indices) for lease in self.leases.values() if lease.node == node and lease.state == "open")

    def end_lease(self, lease: LeaseRecord, state: LeaseState, *, now: float, blame: bool = True) -> list[Statement]:
        """An open lease is over without a result (returned, expired, void); its unfilled samples are open again.

        With ``blame`` others are preferred for them for a while; without, the node had a good reason.
        """
        if lease.state != "open":
            return []
        lease.state = state
        if state == "returned":
            self.tally.returned += len(lease.indices)
        elif state == "expired":
            self.tally.expired += len(lease.indices)
        self._reopen(lease, until=now + RELEASE_DELAY_S if blame else now)
        self._remember_ended(lease)
        return [rows.end_lease(lease.lease_id, lease.state)]

    def expired(self, now: float) -> list[LeaseRecord]:
        """Open leases whose time is over."""
        return [lease for lease in self.leases.values() if lease.state == "open" and now >= lease.expires_at]

    def _reopen(self, lease: LeaseRecord, *, until: float) -> None:
        group = self.groups.get(lease.group_id)
        if group is None:
            return
        for index in lease.indices:
            sample = group.samples[index]
            if sample.state == "leased" and sample.lease_id == lease.lease_id:
                sample.reopen(not_for=lease.node, until=until)
                if lease.state in ("returned", "expired"):
                    sample.abandoned.append((lease.lease_id, lease.node))

    def _remember_ended(self, lease: LeaseRecord) -> None:
        self._ended.append(lease.lease_id)
        while len(self._ended) > KEPT_LEASES:
            self.leases.pop(self._ended.popleft(), None)

    # --- results -----------------------------------------------------------------------------------------------------
    def refuse(self, lease: LeaseRecord, *, digest: bytes, receipt: bytes, now: float) -> list[Statement]:
        """The result for ``lease`` was refused; its samples are open again."""
        was_open = lease.state == "open"
        lease.state = "refused"
        lease.result_digest, lease.receipt = digest, receipt
        self.tally.rejected += len(lease.indices)
        if was_open:
            self._reopen(lease, until=now + RELEASE_DELAY_S)
            self._remember_ended(lease)
        return [rows.update_lease(lease)]

    def wanted(self, lease: LeaseRecord) -> tuple[int, ...]:
        """The sample indices of ``lease`` that a result can still fill: unfilled, and young enough.

        Under a lease that allows swaps a rollout may be younger than the lease: each has to be looked at.
        """
        group = self.groups.get(lease.group_id)
        may_be_young = lease.swap_mode == "recompute" or self.is_young(lease.step)
        if group is None or lease.state == "void" or not may_be_young:
            return ()
        return tuple(index for index in lease.indices if group.samples[index].state != "filled")

    def is_young(self, step: int) -> bool:
        """True when work made with the weights of ``step`` could still be consumed."""
        return is_admissible(consuming_step=self.next_step, weights_step=step, staleness=self.rules.staleness)

    def fill(
        self, lease: LeaseRecord, rollouts: Sequence[StoredRollout], *, digest: bytes, receipt: bytes, wall_time: float
    ) -> list[Statement]:
        """``rollouts`` (all :meth:`wanted` and young) are accepted as the result of ``lease``.

        Other samples of it are open again, for anybody.
        """
        late = lease.state != "open"
        lease.state = "done"
        lease.result_digest, lease.receipt = digest, receipt
        if not late:
            self._remember_ended(lease)
        group = self.groups.get(lease.group_id)
        for rollout in rollouts:
            if group is None:
                raise ValueError("a rollout for a group that is not live")
            sample = group.samples[rollout.sample]
            sample.state = "filled"
            sample.lease_id = rollout.lease_id
            sample.rollout = rollout
            self._rollouts[rollout.key] = rollout
        self._reopen(lease, until=0.0)
        self.tally.accepted += len(rollouts)
        if late:
            self.tally.late += len(rollouts)
        inserts = (statement for r in rollouts for statement in rows.insert_rollout(r, wall_time=wall_time))
        return [rows.update_lease(lease), *inserts]

    def rollout(self, key: RolloutKey) -> StoredRollout | None:
        """A rollout that is not consumed or given up yet."""
        return self._rollouts.get(key)

    def score(self, key: RolloutKey, reward: float, *, error: str | None) -> list[Statement]:
        """The reward of a rollout is known; it counts once :meth:`draw` has told whether it is audited."""
        rollout = self._rollouts.get(key)
        if rollout is None or rollout.state != "scoring":
            return []
        rollout.reward = reward
        return [rows.update_rollout(rollout, score_error=error)]

    def unscored(self) -> Iterable[StoredRollout]:
        """Rollouts whose reward is not known yet, in group order."""
        return (rollout for rollout in self.pending("scoring") if rollout.reward is None)

    def draw(self, key: RolloutKey, *, drawn: bool) -> list[Statement]:
        """Whether a scored rollout is audited before it counts: said once, and final."""
        rollout = self._rollouts.get(key)
        if rollout is None or rollout.state != "scoring" or rollout.reward is None:
            return []
        rollout.drawn = drawn
        rollout.state = "auditing" if drawn else "ready"
        return [rows.update_rollout(rollout)]

    def pass_audit(self, key: RolloutKey, exact_logprobs: bytes) -> list[Statement]:
        """The audit of a rollout found nothing; its exact log-probabilities are known now."""
        rollout = self._rollouts.get(key)
        if rollout is None or rollout.state != "auditing":
            return []
        rollout.exact_logprobs = exact_logprobs
        rollout.state = "ready"
        return [rows.update_rollout(rollout)]

    def void_node(self, node: str, *, now: float) -> list[Statement]:
        """Nothing of ``node`` that is not yet assigned to a step counts any more; its samples are open again."""
        statements: list[Statement] = []
        for lease in [lease for lease in self.leases.values() if lease.node == node]:
            statements += self.end_lease(lease, "void", now=now)
        for rollout in [r for r in self._rollouts.values() if r.node == node]:
            if rollout.state in ("scoring", "auditing", "ready"):
                statements += self.give_up(rollout, "void", now=now)
        return statements

    def give_up(self, rollout: StoredRollout, state: RolloutState, *, now: float) -> list[Statement]:
        """``rollout`` will not be trained on; its sample is open again where its group is still live."""
        rollout.state = state
        self._rollouts.pop(rollout.key, None)
        self.tally.tokens_wasted += rollout.num_tokens
        if state == "void":
            self.tally.void += 1
        elif state == "orphaned":
            self.tally.orphaned += 1
        group = self.groups.get(rollout.group_id)
        if group is not None and group.samples[rollout.sample].rollout is rollout:
            group.samples[rollout.sample].reopen(not_for=rollout.node, until=now + RELEASE_DELAY_S)
        return rows.end_rollouts([rollout], rollout.state)

    # --- batches -----------------------------------------------------------------------------------------------------
    def drop_stale(self) -> list[Statement]:
        """Drop whole every live group that can no longer be consumed within S."""
        statements: list[Statement] = []
        for group in list(self.groups.values()):
            oldest = group.oldest_step
            if oldest is None or self.is_young(oldest):
                continue
            group.state = "dropped"
            del self.groups[group.group_id]
            self.tally.groups_dropped += 1
            statements.append(rows.update_group(group, why=f"its oldest weights are of step {oldest}"))
            for sample in group.samples:
                if sample.rollout is not None:
                    sample.rollout.state = "stale"
                    self._rollouts.pop(sample.rollout.key, None)
                    self.tally.stale += 1
                    self.tally.tokens_wasted += sample.rollout.num_tokens
                    lengths.add(self.tally.lengths, "dropped", sample.rollout.num_tokens)
                    statements += rows.end_rollouts([sample.rollout], "stale")
        return statements

    def batch_is_ready(self) -> bool:
        """True when the first groups in lease order that keep the shares, as many as a step takes, are complete."""
        self._next_batch = self._next_groups()
        return self._is_whole(self._next_batch[0])

    def waits_for(self) -> str:
        """In words, what the next batch still lacks."""
        first, _ = self._next_groups()
        counts = {"open": 0, "leased": 0, "scoring": 0, "auditing": 0}
        for sample in (sample for group in first for sample in group.samples):
            if sample.rollout is None:
                counts[sample.state] += 1
            elif sample.rollout.state in counts:
                counts[sample.rollout.state] += 1
        missing = self.rules.groups_per_step - len(first)
        words = [f"{count} samples {name}" for name, count in counts.items() if count]
        if missing:
            words.append(f"{missing} groups not leased yet")
        return f"the batch of step {self.next_step} lacks: {', '.join(words) or 'nothing'}"

    def assemble(self, *, wall_time: float) -> tuple[list[Group], list[Statement]]:
        """Take the next batch and assign it to ``next_step``, which moves on. Call when :meth:`batch_is_ready`.

        Raises:
            ValueError: the batch is not complete.
        """
        # The batch that was looked at: by now the shares may say another one, which need not be complete.
        batch, over_cap = self._next_batch if self._is_whole(self._next_batch[0]) else self._next_groups()
        if not self._is_whole(batch):
            raise ValueError("a batch was taken before it was complete")
        self._next_batch = [], 0
        self.tally.over_cap += over_cap
        step = self.next_step
        self.next_step += 1
        statements = [rows.insert_step(step, wall_time=wall_time)]
        for group in batch:
            group.state = "assigned"
            del self.groups[group.group_id]
            statements.append(rows.update_group(group, step=step))
            rollouts = [sample.rollout for sample in group.samples if sample.rollout is not None]
            statements += rows.assign_rollouts(rollouts, step=step)
            for rollout in rollouts:
                rollout.state = "assigned"
                self._rollouts.pop(rollout.key, None)
                self.tally.consumed += 1
                lengths.add(self.tally.lengths, "consumed", rollout.num_tokens)
                how_old = age(consuming_step=step, weights_step=rollout.step)
                self.tally.ages[how_old] = self.tally.ages.get(how_old, 0) + 1
        return batch, statements

    def pending(self, state: RolloutState) -> Iterable[StoredRollout]:
        """Rollouts in ``state`` ('scoring' or 'auditing'), in group order."""
        for group in self.groups.values():
            for sample in group.samples:
                if sample.rollout is not None and sample.rollout.state == state:
                    yield sample.rollout

    def suspend(self) -> None:
        """Forget all work: what of it still counts is read from the ledger, and then :meth:`resume` is called."""
        self.is_suspended = True
        self.groups.clear()
        self.leases.clear()
        self.prompts.clear()
        self._ended.clear()
        self._rollouts.clear()

    def resume(
        self, groups: Iterable[Group], leases: Iterable[LeaseRecord], *, next_group: int, next_step: int
    ) -> None:
        """Go on from what the ledger holds: live ``groups`` in order of their ids, and open ``leases``."""
        self.suspend()
        self.next_group = next_group
        self.next_step = next_step
        for group in groups:
            self.groups[group.group_id] = group
            for sample in group.samples:
                if sample.rollout is not None:
                    self._rollouts[sample.rollout.key] = sample.rollout
        self.leases.update((lease.lease_id, lease) for lease in leases)
        self.is_suspended = False

    def _is_whole(self, batch: list[Group]) -> bool:
        return len(batch) == self.rules.groups_per_step and all(
            group.is_complete and group.group_id in self.groups for group in batch
        )

    def _next_groups(self) -> tuple[list[Group], int]:
        return choose_batch(
            list(self.groups.values()),
            size=self.rules.groups_per_step,
            share_of=self.share_of,
            lease_nodes=self._lease_node,
        )


def _may_have(sample: Sample, node: str, *, now: float, is_preferred: bool) -> bool:
    return now >= sample.not_for_until or (is_preferred and sample.not_for != node)
