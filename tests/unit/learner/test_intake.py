"""Results at the learner's desk, with the real ledger and book: codes, receipts, replays, and what is written down."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio

from rollmesh_learner.work.book import Rules
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import Receipt
from rollmesh_protocol.rollout import Result, SampleResult, Segment
from tests.unit.learner.world import RUN, STOP, VOCABULARY, FakeNode, Life, settled_life

RULES = Rules(steps=20, staleness=2, groups_per_step=2, samples_per_group=2)


@asynccontextmanager
async def desk(folder: Path):
    """A learner, and two nodes of which the first holds one lease."""
    async with settled_life(folder, RULES) as (life, (first, second)):
        await first.ask(life, groups=1)
        yield life, first, second


def sample(lease: Lease, index: int, *, tokens=(1, 2, STOP), logprobs=None, finish="stop", root=None) -> SampleResult:
    made = np.asarray(tokens, "<u4")
    said = np.full(len(made), -1.0, "<f4") if logprobs is None else np.asarray(logprobs, "<f4")
    return SampleResult(
        index=index, tokens=made.tobytes(), logprobs=said.tobytes(), finish=finish,
        segments=(Segment(first_token=0, root=root or lease.root),),
    )  # fmt: skip


def result(lease: Lease, *, note: str = "", **changes) -> bytes:
    samples = tuple(sample(lease, leased.index, **changes) for leased in lease.samples)
    return Result(lease_id=lease.lease_id, samples=samples, engine=note, generate_s=0.1).encode()


def envelope(body: bytes, *, by: FakeNode | Identity, run: str = RUN, kind="result") -> bytes:
    return seal(body, run=run, kind=kind, identity=by.identity if isinstance(by, FakeNode) else by).encode()


async def send(life: Life, node: FakeNode, sealed: bytes) -> Receipt:
    return Receipt.decode(await life.intake.submit(node.identity.peer, sealed), limit=limits.RECEIPT_BYTES)


async def code(life: Life, node: FakeNode, sealed: bytes) -> str:
    """The code with which a result is turned away."""
    with pytest.raises(Refused) as refused:
        await life.intake.submit(node.identity.peer, sealed)
    return refused.value.code


async def count(life: Life, table: str) -> int:
    ((rows,),) = await life.ledger.fetch(f"SELECT count(*) FROM {table}")
    return int(str(rows))


async def test_good_work_is_accepted_and_in_the_ledger_before_its_receipt(folder: Path) -> None:
    async with desk(folder) as (life, node, _):
        (lease,) = node.leases
        receipt = await send(life, node, envelope(result(lease), by=node))
        assert (receipt.accepted, receipt.code, receipt.standing.accepted) == ((0, 1), None, 2)
        assert await count(life, "rollouts") == 2
        ((stored,),) = await life.ledger.fetch("SELECT receipt FROM leases WHERE lease_id = ?", lease.lease_id)
        assert stored == receipt.encode()


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        ("result.logprob", {"logprobs": [-1.0, float("nan"), -1.0]}),
        ("result.logprob", {"logprobs": [-1.0, float("inf"), -1.0]}),
        ("result.logprob", {"logprobs": [-1.0, 0.01, -1.0]}),
        ("result.tokens", {"tokens": (1, VOCABULARY, STOP)}),
        ("result.length", {"tokens": ()}),
        ("result.length", {"tokens": (1, 1, 1, 1, STOP)}),
        ("result.finish", {"tokens": (1, 2, 3), "finish": "stop"}),
        ("result.finish", {"tokens": (1, 2, 3), "finish": "length"}),
        ("result.finish", {"tokens": (1, 2, STOP), "finish": "length"}),
        ("result.finish", {"tokens": (1, STOP, STOP)}),
        ("result.root", {"root": bytes(32)}),
        ("result.schema", {"logprobs": [-1.0, -1.0]}),
    ],
)
async def test_a_broken_rule_is_a_receipt_that_says_so(folder: Path, expected: str, changes: dict) -> None:
    async with desk(folder) as (life, node, other):
        (lease,) = node.leases
        receipt = await send(life, node, envelope(result(lease, **changes), by=node))
        assert (receipt.code, receipt.accepted, receipt.standing.rejected) == (expected, (), 2)
        assert await count(life, "rollouts") == 0
        assert await life.ledger.fetch("SELECT peer, code FROM offences") == [(node.identity.peer, expected)]
        await other.ask(life, groups=1)  # its samples are open again, with the same seeds
        assert other.leases[0].samples == lease.samples


@pytest.mark.parametrize("indices", [(0,), (0, 0), (0, 5), (0, 1, 2), (0, 1, 1)])
async def test_samples_that_were_not_leased(folder: Path, indices: tuple[int, ...]) -> None:
    async with desk(folder) as (life, node, _):
        (lease,) = node.leases
        samples = tuple(sample(lease, index) for index in indices)
        body = Result(lease_id=lease.lease_id, samples=samples, engine="", generate_s=0).encode()
        receipt = await send(life, node, envelope(body, by=node))
        assert (receipt.code, receipt.accepted) == ("result.samples", ())


async def test_what_does_not_open_is_told_by_what_is_wrong_with_it(folder: Path) -> None:
    async with desk(folder) as (life, node, other):
        (lease,) = node.leases
        body = result(lease)
        assert await code(life, node, envelope(body, by=other)) == "result.signature"
        assert await code(life, node, envelope(body, by=node, run="another")) == "result.signature"
        assert await code(life, node, envelope(body, by=node, kind="lease")) == "result.signature"
        assert await code(life, node, b"\x91" * 1000) == "result.schema"
        assert await code(life, node, body) == "result.schema"
        assert await code(life, node, envelope(b"junk", by=node)) == "result.schema"
        assert await code(life, node, envelope(body + b"\0", by=node)) == "result.schema"
        receipt = await send(life, node, envelope(body, by=node))
        assert receipt.code is None, "none of it used the lease up"
        assert receipt.standing.state == "new"


async def test_the_same_bytes_get_the_same_receipt_however_often_and_at_once(folder: Path) -> None:
    async with desk(folder) as (life, node, _):
        (lease,) = node.leases
        sealed = envelope(result(lease), by=node)
        receipts: list[bytes] = []

        async def send_it() -> None:
            receipts.append(await life.intake.submit(node.identity.peer, sealed))

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(send_it)
        assert len(receipts) == 10
        assert len(set(receipts)) == 1
        assert await count(life, "rollouts") == 2
        assert life.registry.record_of(node.identity.peer).accepted == 2


async def test_other_bytes_for_a_used_lease_end_in_quarantine(folder: Path) -> None:
    async with desk(folder) as (life, node, other):
        (lease,) = node.leases
        await send(life, node, envelope(result(lease), by=node))
        await node.ask(life, groups=1)
        assert await code(life, node, envelope(result(lease, note="other"), by=node)) == "lease.reused"
        peer = node.identity.peer
        assert life.registry.record_of(peer).is_quarantined
        assert await code(life, node, envelope(result(lease), by=node)) == "node.quarantined"
        assert await life.ledger.fetch("SELECT DISTINCT state FROM rollouts WHERE node = ?", peer) == [("void",)]
        assert await life.ledger.fetch("SELECT count(*) FROM leases WHERE state = 'open'") == [(0,)]
        await other.ask(life, groups=4)
        assert lease.group in {leased.group for leased in other.leases}, "its work is given to others"


async def test_two_answers_at_the_same_moment_are_one_answer_and_one_offence(folder: Path) -> None:
    async with desk(folder) as (life, node, _):
        (lease,) = node.leases
        outcomes: list[str] = []

        async def send_one(note: str) -> None:
            try:
                receipt = await send(life, node, envelope(result(lease, note=note), by=node))
                outcomes.append("accepted" if receipt.accepted else str(receipt.code))
            except Refused as refused:
                outcomes.append(refused.code)

        async with trio.open_nursery() as nursery:
            for note in ("one", "two"):
                nursery.start_soon(send_one, note)
        assert sorted(outcomes) == ["accepted", "lease.reused"]


async def test_leases_of_others_and_of_nobody(folder: Path) -> None:
    async with desk(folder) as (life, node, other):
        (lease,) = node.leases
        assert await code(life, other, envelope(result(lease), by=other)) == "lease.other_node"
        invented = lease.model_copy(update={"lease_id": bytes(16)})
        assert await code(life, other, envelope(result(invented), by=other)) == "lease.unknown"
        assert (await send(life, node, envelope(result(lease), by=node))).code is None


async def test_a_flood_of_leases_that_nobody_gave_costs_no_disk(folder: Path) -> None:
    """And a look into the ledger only so often: an honest node's come after the learner went back to a checkpoint."""
    async with desk(folder) as (life, node, other):
        (lease,) = node.leases
        codes: list[str] = []
        for number in range(100):
            invented = lease.model_copy(update={"lease_id": number.to_bytes(16, "little")})
            codes.append(await code(life, node, envelope(result(invented), by=node)))
        assert codes[:50] == ["lease.unknown"] * 50 and codes[-1] == "node.rate"
        assert await code(life, other, envelope(result(invented), by=other)) == "lease.unknown"
        assert await count(life, "offences") == 0
        assert (await send(life, node, envelope(result(lease), by=node))).code is None


async def test_a_result_that_comes_late_counts_while_nobody_else_has_it(folder: Path) -> None:
    async with desk(folder) as (life, node, other):
        (lease,) = node.leases
        record = life.book.leases[lease.lease_id]
        await life.ledger.commit(*life.book.end_lease(record, "expired", now=trio.current_time()))
        await other.ask(life, groups=1)
        (again,) = other.leases
        assert again.samples == lease.samples
        assert (await send(life, node, envelope(result(lease), by=node))).accepted == (0, 1)
        late = await send(life, other, envelope(result(again), by=other))
        assert (late.code, late.accepted) == ("lease.expired", ())
        assert late.standing.state == "new"
        assert not life.registry.record_of(other.identity.peer).soft_in_a_row, "lateness is no offence"


async def test_an_uninvited_peer_is_told_to_say_hello(folder: Path) -> None:
    async with desk(folder) as (life, node, _):
        (lease,) = node.leases
        stranger = Identity(b"x" * 32)
        with pytest.raises(Refused) as refused:
            await life.intake.submit(stranger.peer, envelope(result(lease), by=stranger))
        assert refused.value.code == "node.not_admitted"


async def test_while_the_book_is_suspended_nothing_is_weighed(folder: Path) -> None:
    async with desk(folder) as (life, node, _):
        (lease,) = node.leases
        life.book.suspend()
        assert await code(life, node, envelope(result(lease), by=node)) == "request.busy"
        assert await count(life, "rollouts") == 0
