"""The desk where nodes get work and give it back: the ``lease`` and ``return`` streams.

Leases are in the ledger before they are sent. A node gets work for the weights it holds, as long as what it makes can
still be consumed within S; a node that is behind is told which version the work needs.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from rollmesh_learner.members.nodes import Node, Nodes
from rollmesh_learner.members.shares import Pace, Shares
from rollmesh_learner.members.standing import audit_rate, is_steady
from rollmesh_learner.publishing.versions import Versions
from rollmesh_learner.records.ledger import Ledger, Statement
from rollmesh_learner.work.book import Book, Offer
from rollmesh_learner.work.groups import LeaseRecord
from rollmesh_learner.work.overtaking import patience_s
from rollmesh_learner.work.throttle import audit_allowance
from rollmesh_peer.faults import fault_point
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import Identity, short
from rollmesh_protocol.lease import LEASE_ID_BYTES, Lease, LeasedSample, SwapMode, seed_of
from rollmesh_protocol.messages import Head, LeaseAnswer, LeaseRequest, ReturnAnswer, ReturnRequest, Wait

_log = logging.getLogger("rollmesh.learner.leasing")

_WAIT_FOR_WEIGHTS_S: Final = 0.5
_WAIT_FOR_WORK_S: Final = 0.5
"""Short, because the next step may free a whole batch of work; an answer costs a few hundred bytes."""
_WATCH_S: Final = 1.0
RETURN_S: Final = 10.0
"""Who gives a lease back later than this has kept others from it: that counts like one that ran out. A node that
stops, or whose game begins, may do it once; what is accepted next clears it."""
_AUDITS_BEHIND: Final = "audits, which are behind: until they catch up, nodes below full standing get less work"
WEIGHTS_MOVED_ON: Final = "node.weights"
"""The code of leases that came back because the node had newer weights by then: no reason to prefer others, where
there are newer weights; and then it gets no more for the old ones, or it could hold work up by taking it to and fro."""


@dataclass(frozen=True, kw_only=True)
class LeaseTerms:
    """What every lease of the run says, and how long it may stand."""

    run: str
    seed_key: bytes
    max_new_tokens: int
    most_groups: int
    least_duration_s: float
    most_duration_s: float
    swap_mode: SwapMode = "drain"


class LeaseDesk:
    """Answers nodes that ask for work, and takes leases back that were returned, ran out or whose node is gone."""

    def __init__(
        self,
        terms: LeaseTerms,
        *,
        identity: Identity,
        book: Book,
        nodes: Nodes,
        versions: Versions,
        ledger: Ledger,
        is_over: Callable[[], bool],
        shares: Shares,
        on_heard: Callable[[Node], None] = lambda _node: None,
    ) -> None:
        self._terms = terms
        self._identity = identity
        self._book = book
        self._nodes = nodes
        self._versions = versions
        self._ledger = ledger
        self._is_over = is_over
        self._shares = shares
        self._on_heard = on_heard

    async def lease(self, peer: str, request: bytes) -> bytes:
        """One :class:`LeaseRequest` and its :class:`LeaseAnswer`."""
        asked = LeaseRequest.decode(request, limit=limits.LEASE_REQUEST_BYTES)
        if self._is_over():
            raise Refused("run.ended")
        node = self._nodes.admitted(peer)
        now = trio.current_time()
        node.heard(asked, now=now)
        self._on_heard(node)
        leases: tuple[bytes, ...] = ()
        wait: Wait | None = None
        if asked.groups:
            leases, wait = await self._give(node, asked, now=now)
        return LeaseAnswer(
            head=self._versions.head, leases=leases, wait=wait, standing=self._nodes.standing_of(node.peer)
        ).encode()

    async def take_back(self, peer: str, request: bytes) -> bytes:
        """One :class:`ReturnRequest` and its :class:`ReturnAnswer`."""
        asked = ReturnRequest.decode(request, limit=limits.SMALL_BYTES)
        node = self._nodes.admitted(peer)
        now = trio.current_time()
        node.last_seen = now
        statements: list[Statement] = []
        returned = 0
        for lease_id in asked.lease_ids:
            lease = self._book.leases.get(lease_id)
            if lease is not None and lease.node == peer and lease.state == "open":
                blame = asked.code != WEIGHTS_MOVED_ON or lease.version >= self._versions.head.version
                if not blame:
                    node.moved_past = max(node.moved_past, lease.version)
                elif now - lease.issued_at > RETURN_S:
                    node.failed_to_return(now=now)
                statements += self._book.end_lease(lease, "returned", now=now, blame=blame)
                returned += 1
        if statements:
            await self._ledger.commit(*statements)
            _log.info("%s gave %d leases back: %s", short(peer), returned, asked.code)
        return ReturnAnswer(returned=returned, head=self._versions.head).encode()

    async def watch(self) -> None:
        """Once a second, open the samples of leases that ran out or whose node fell silent. Never returns."""
        while True:
            await trio.sleep(_WATCH_S)
            now = trio.current_time()
            silent = {node.peer for node in self._nodes.silent(now)}
            over = self._book.expired(now)
            gone = [r for r in self._book.leases.values() if r.state == "open" and r.node in silent and r not in over]
            statements: list[Statement] = []
            for lease in [*over, *gone]:
                statements += self._book.end_lease(lease, "expired", now=now)
                node = self._nodes.get(lease.node)
                if node:
                    node.failed_to_return(now=now)
            if statements:
                who = sorted({short(lease.node) for lease in [*over, *gone]})
                _log.info(
                    "%d leases of %s ran out; their samples are open again", len(over) + len(gone), ", ".join(who)
                )
                await self._ledger.commit(*statements)

    async def _give(self, node: Node, asked: LeaseRequest, *, now: float) -> tuple[tuple[bytes, ...], Wait | None]:
        if self._book.is_suspended:
            return (), Wait(seconds=_WAIT_FOR_WORK_S, why="the learner is going back to a checkpoint")
        held = self._versions.by_root(asked.root_held) if asked.root_held else None
        if held is None or not self._book.is_young(held.step):
            why = f"the weights of version {self._versions.head.version}: there is no work for older ones"
            return (), Wait(seconds=_WAIT_FOR_WEIGHTS_S, why=why)
        if held.version <= node.moved_past:
            why = f"weights newer than version {node.moved_past}, for which it gave leases back"
            return (), Wait(seconds=_WAIT_FOR_WEIGHTS_S, why=why)
        holding = self._book.outstanding(node.peer)
        size = self._book.rules.samples_per_group
        groups = min(asked.groups, self._terms.most_groups)
        tokens = (holding + size * groups) * self._terms.max_new_tokens
        pace = self._shares.pace(now=now)
        duration_s = node.lease_duration(
            tokens=tokens,
            least_s=self._terms.least_duration_s,
            most_s=self._terms.most_duration_s,
            typical_s=pace.typical_lease_s,
        )
        earned = node.allowance(duration_s=duration_s, samples_per_group=size, now=now)
        allowance = min(earned, self._fair_share(held, sharers=pace.sharers))
        if allowance - holding < 1:
            why = f"its results for {holding} samples; more work comes as they arrive"
            return (), Wait(seconds=_WAIT_FOR_WORK_S, why=why)
        left = self._audited(node, allowance, holding=holding, now=now) - holding
        offers = self._offers(node, pace, held=held, samples=left, groups=groups, now=now)
        if not offers:
            why = self._why_no_work(held, node=node.peer) if left == allowance - holding else _AUDITS_BEHIND
            return (), Wait(seconds=_WAIT_FOR_WORK_S, why=why)
        statements: list[Statement] = []
        sealed = []
        for offer in offers:
            lease, row = self._make(offer, node=node, held=held, duration_s=duration_s, now=now)
            statements += self._book.lease(offer, row, wall_time=time.time())
            sealed.append(seal(lease.encode(), run=self._terms.run, kind="lease", identity=self._identity).encode())
        await self._ledger.commit(*statements)
        fault_point("lease.committed")
        return tuple(sealed), None

    def _offers(self, node: Node, pace: Pace, *, held: Head, samples: int, groups: int, now: float) -> list[Offer]:
        """What there is to do; for a node that delivers and would be idle, also what others are late with."""
        delivers = node.samples_per_s > 0 and not node.failures
        offers = self._book.offers(
            node.peer, held=held, samples=samples, groups=groups, now=now, is_preferred=delivers or not pace.working
        )
        if offers or not delivers or not self._book.is_young(held.step):
            return offers

        def is_late(lease: LeaseRecord) -> bool:
            holder = self._nodes.get(lease.node)
            has_delivered = holder is not None and holder.samples_per_s > 0 and not holder.failures
            patience = patience_s(lease, has_delivered=has_delivered, typical_s=pace.typical_lease_s)
            return now - lease.issued_at >= patience

        return self._book.overdue(node.peer, samples=samples, groups=groups, is_late=is_late)

    def _audited(self, node: Node, allowance: int, *, holding: int, now: float) -> int:
        """What is left of ``allowance`` while audits are behind; everything in full standing."""
        rules = self._nodes.rules
        if is_steady(node.record, rules):
            return allowance
        return audit_allowance(
            allowance,
            holding=holding,
            rate=audit_rate(node.record, rules),
            load=self._shares.load(now=now),
            least=self._book.rules.samples_per_group,
        )

    def _fair_share(self, held: Head, *, sharers: int) -> int:
        """No node may hold so much that the others find nothing to do."""
        rules = self._book.rules
        steps = max(1, held.step + rules.staleness - self._book.next_step + 1)
        groups = math.ceil(steps * rules.groups_per_step / max(1, sharers))
        return max(1, groups) * rules.samples_per_group

    def _why_no_work(self, held: Head, *, node: str) -> str:
        share = self._book.share_of(node)
        if share < 1 and self._book.prompts and self._book.budget(held):
            return f"others: below full standing a node makes at most {share:.0%} of a batch"
        if not self._book.prompts and self._book.budget(held):
            return "prompts, which the learner is preparing"
        if held.version < self._versions.head.version:
            return f"the weights of version {self._versions.head.version}: the work left is for them"
        return f"the next step: all work within staleness {self._book.rules.staleness} is given out"

    def _make(
        self, offer: Offer, *, node: Node, held: Head, duration_s: float, now: float
    ) -> tuple[Lease, LeaseRecord]:
        lease_id = secrets.token_bytes(LEASE_ID_BYTES)
        group = offer.group
        samples = tuple(
            LeasedSample(
                index=index,
                seed=seed_of(self._terms.seed_key, run=self._terms.run, group=group.group_id, sample=index),
            )
            for index in offer.indices
        )
        lease = Lease(
            lease_id=lease_id,
            node=node.peer,
            group=group.group_id,
            samples=samples,
            version=held.version,
            step=held.step,
            root=held.root,
            prompt=group.prompt.prompt,
            max_new_tokens=self._terms.max_new_tokens,
            temperature=1.0,
            duration_s=duration_s,
            swap_mode=self._terms.swap_mode,
        )
        row = LeaseRecord(
            lease_id=lease_id,
            node=node.peer,
            group_id=group.group_id,
            indices=offer.indices,
            version=held.version,
            step=held.step,
            root=held.root,
            duration_s=duration_s,
            issued_at=now,
            swap_mode=self._terms.swap_mode,
        )
        return lease, row
