"""Where results come in (layers L0 to L3), and the only way by which a rollout gets into the book.

A receipt is sent only after the ledger has it. The same bytes sent again get the stored receipt; other bytes for the
same lease are an offence. Nothing in the body is parsed before its signature has been checked against the peer that
Noise authenticated. While the book is suspended nothing is weighed: the node is asked to send it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio
from blake3 import blake3

from rollmesh_learner.members.discipline import Discipline
from rollmesh_learner.members.nodes import Node, Nodes
from rollmesh_learner.members.standing import after_absence
from rollmesh_learner.publishing.versions import Versions
from rollmesh_learner.records import rows
from rollmesh_learner.records.ledger import Ledger
from rollmesh_learner.records.restore import recall_lease
from rollmesh_learner.work.book import Book
from rollmesh_learner.work.groups import LeaseRecord, StoredRollout, Stretch
from rollmesh_peer.faults import fault_point
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.lease import Lease, LeasedSample, seed_of
from rollmesh_protocol.messages import Receipt
from rollmesh_protocol.rollout import Result, Rollout, Segment, check_result

_log = logging.getLogger("rollmesh.learner.intake")


@dataclass(frozen=True, kw_only=True)
class IntakeTerms:
    """What a result is checked against."""

    run: str
    seed_key: bytes
    vocabulary: int
    stop_tokens: frozenset[int]
    max_new_tokens: int


class Intake:
    """Answers the ``submit`` stream."""

    def __init__(
        self,
        terms: IntakeTerms,
        *,
        book: Book,
        nodes: Nodes,
        versions: Versions,
        ledger: Ledger,
        discipline: Discipline,
        on_accepted: Callable[[], None],
    ) -> None:
        self._terms = terms
        self._book = book
        self._nodes = nodes
        self._versions = versions
        self._ledger = ledger
        self._discipline = discipline
        self._on_accepted = on_accepted
        self._in_commit: dict[bytes, trio.Event] = {}
        self._decided = 0
        """How many results were decided on."""

    async def submit(self, peer: str, request: bytes) -> bytes:
        """One sealed :class:`Result` and its :class:`Receipt`."""
        node = self._nodes.admitted(peer)
        node.last_seen = trio.current_time()
        try:
            body = Envelope.decode(request, limit=limits.RESULT_BYTES, code="result.schema").open(
                run=self._terms.run, kind="result", signer=peer
            )
        except Refused as error:
            code = "result.signature" if error.code.startswith("envelope.") else "result.schema"
            raise await self._offence(node, Refused(code, error.detail), rollouts=0) from error
        try:
            result = Result.decode(body, limit=limits.RESULT_BYTES, code="result.schema")
        except Refused as error:
            raise await self._offence(node, Refused("result.schema", error.detail), rollouts=0) from error
        return await self._receive(node, result, digest=blake3(body).digest())

    async def _receive(self, node: Node, result: Result, *, digest: bytes) -> bytes:
        if result.lease_id not in self._book.leases and not node.may_stray(now=trio.current_time()):
            raise Refused("node.rate", "too many results for leases that are not known here")
        lease = await self._find(result.lease_id)
        self._nodes.admitted(node.peer)  # it may have been put into quarantine meanwhile
        if lease is None:
            raise await self._offence(node, Refused("lease.unknown"), rollouts=0)
        if lease.node != node.peer:
            raise await self._offence(node, Refused("lease.other_node"), rollouts=0)
        if lease.receipt is not None:
            if lease.result_digest == digest:
                return lease.receipt
            raise await self._offence(node, Refused("lease.reused"), rollouts=len(lease.indices))
        done = self._in_commit[lease.lease_id] = trio.Event()
        try:
            return await self._decide(node, lease, result, digest=digest)
        finally:
            del self._in_commit[lease.lease_id]
            self._decided += 1
            done.set()

    async def _find(self, lease_id: bytes) -> LeaseRecord | None:
        """The lease as it is once no other result for it is being written down; None when there never was one."""
        while True:
            while lease_id in self._in_commit:
                await self._in_commit[lease_id].wait()
            lease = self._book.leases.get(lease_id)
            decided = self._decided
            old = await recall_lease(self._ledger, lease_id) if lease is None else None
            if self._book.is_suspended:
                raise Refused("request.busy", "the learner is going back to a checkpoint")
            # The ledger may have read the lease and written a result for it in one transaction, in this order.
            if lease_id not in self._in_commit and (old is None or decided == self._decided):
                return self._book.leases.get(lease_id, old)

    async def _decide(self, node: Node, lease: LeaseRecord, result: Result, *, digest: bytes) -> bytes:
        now = trio.current_time()
        try:
            rollouts = check_result(
                result,
                self._as_message(lease),
                vocabulary=self._terms.vocabulary,
                stop_tokens=self._terms.stop_tokens,
                swaps=self._versions.since(lease.version),
            )
        except Refused as error:
            return await self._refuse(node, lease, error, digest=digest, now=now)
        wanted = [rollout for rollout in rollouts if rollout.index in self._book.wanted(lease)]
        stored = [made for rollout in wanted if (made := self._to_store(rollout, node, lease)) is not None]
        if not stored:
            code = "result.stale" if wanted or not self._book.is_young(lease.step) else "lease.expired"
            return await self._refuse(node, lease, Refused(code), digest=digest, now=now)
        node.delivered(
            samples=len(stored), tokens=sum(r.num_tokens for r in stored), issued_at=lease.issued_at, now=now
        )
        wall_time = time.time()
        record = after_absence(node.record, self._nodes.rules, now=wall_time).accept(len(stored), now=wall_time)
        self._nodes.set_record(node.peer, record)
        self._book.tally.rejected += len(wanted) - len(stored)
        why_not_all, detail = _why_not_all(lease, wanted=len(wanted), stored=len(stored))
        receipt = Receipt(
            lease_id=lease.lease_id,
            accepted=tuple(r.sample for r in stored),
            code=why_not_all,
            detail=detail,
            head=self._versions.head,
            standing=self._nodes.standing_of(node.peer),
        ).encode()
        statements = self._book.fill(lease, stored, digest=digest, receipt=receipt, wall_time=wall_time)
        await self._ledger.commit(
            *statements, rows.put_node(node.peer, name=node.name, record=record, wall_time=wall_time)
        )
        fault_point("receipt.committed")
        self._on_accepted()
        return receipt

    async def _refuse(self, node: Node, lease: LeaseRecord, error: Refused, *, digest: bytes, now: float) -> bytes:
        await self._discipline.offend(node.peer, error.code, detail=error.detail, rollouts=len(lease.indices))
        lease = self._book.leases.get(lease.lease_id, lease)  # the book may have gone back to a checkpoint meanwhile
        receipt = Receipt(
            lease_id=lease.lease_id,
            accepted=(),
            code=error.code,
            detail=error.detail,
            head=self._versions.head,
            standing=self._nodes.standing_of(node.peer),
        ).encode()
        await self._ledger.commit(*self._book.refuse(lease, digest=digest, receipt=receipt, now=now))
        return receipt

    async def _offence(self, node: Node, error: Refused, *, rollouts: int) -> Refused:
        await self._discipline.offend(node.peer, error.code, detail=error.detail, rollouts=rollouts)
        return error

    def _as_message(self, lease: LeaseRecord) -> Lease:
        group = self._book.groups.get(lease.group_id)
        return Lease(
            lease_id=lease.lease_id,
            node=lease.node,
            group=lease.group_id,
            samples=tuple(LeasedSample(index=i, seed=self._seed(lease.group_id, i)) for i in lease.indices),
            version=lease.version,
            step=lease.step,
            root=lease.root,
            prompt=group.prompt.prompt if group else bytes(4),
            max_new_tokens=self._terms.max_new_tokens,
            temperature=1.0,
            duration_s=lease.duration_s,
            swap_mode=lease.swap_mode,
        )

    def _seed(self, group: int, sample: int) -> int:
        return seed_of(self._terms.seed_key, run=self._terms.run, group=group, sample=sample)

    def _to_store(self, rollout: Rollout, node: Node, lease: LeaseRecord) -> StoredRollout | None:
        """The rollout as it is kept; None for one that is too old, or whose weights do not count any more."""
        stretches = stretches_of(rollout.segments, lease=lease, versions=self._versions)
        if not stretches or not self._book.is_young(stretches[0].step):
            return None
        oldest, *later = stretches
        return StoredRollout(
            lease_id=lease.lease_id,
            sample=rollout.index,
            group_id=lease.group_id,
            node=node.peer,
            version=oldest.version,
            step=oldest.step,
            root=oldest.root,
            seed=rollout.seed,
            tokens=rollout.tokens.tobytes(),
            logprobs=rollout.logprobs.tobytes(),
            finish=rollout.finish,
            drawn=False,
            later=tuple(later),
        )


def stretches_of(segments: Sequence[Segment], *, lease: LeaseRecord, versions: Versions) -> tuple[Stretch, ...]:
    """The weights behind each segment, as the learner knows them; none where some were undone or are forgotten.

    A node may have taken a version that was undone since: that is no offence, but its work is worth nothing.
    """
    stretches = []
    for segment in segments:
        known = versions.by_root(segment.root)
        if segment.root == lease.root:
            stretches.append(Stretch(segment.first_token, lease.version, lease.step, lease.root))
        elif known is not None:
            stretches.append(Stretch(segment.first_token, known.version, known.step, known.root))
        else:
            return ()
    return tuple(stretches)


def _why_not_all(lease: LeaseRecord, *, wanted: int, stored: int) -> tuple[str | None, str]:
    """Code and sentence for a result of which only some samples are accepted; no code for a whole one."""
    if stored < wanted:
        return "result.stale", "the weights behind some samples were too old, or were undone"
    if stored < len(lease.indices):
        return "lease.expired", "some samples had been filled by others meanwhile"
    return None, ""
