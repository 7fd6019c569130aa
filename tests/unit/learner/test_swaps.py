"""Leases that allow swaps, with the real ledger and book: what is taken in, how old it is, and what survives."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import trio
from pydantic import ValidationError

from rollmesh_learner.config import Environment, LearnerConfig, Leases, Model, Rollouts, Run
from rollmesh_learner.publishing.versions import KEPT_LINE, Versions
from rollmesh_learner.records import rollbacks, rows
from rollmesh_learner.records.ledger import open_ledger
from rollmesh_learner.terms import swap_mode
from rollmesh_learner.training.tripwires import Trip
from rollmesh_learner.work.book import Rules
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.lease import Lease, SwapMode
from rollmesh_protocol.messages import Head, Receipt
from rollmesh_protocol.rollout import Result
from tests.unit.learner.test_steps import Misfortune
from tests.unit.learner.world import RUN, FakeNode, Life, World, header_of, hurry, made_sample

RULES = Rules(steps=20, staleness=2, groups_per_step=2, samples_per_group=2)
Parts = Sequence[tuple[int, bytes]]


@asynccontextmanager
async def desk(folder: Path):
    """A learner whose leases allow swaps, and its two nodes, of which the first holds one lease."""
    world = World(folder, Random(0), RULES, swap_mode="recompute", new_tokens=400)
    async with world.life() as life:
        await life.stepper.settle()
        life.put_prompts()
        for node in world.nodes:
            node.join(life)
            node.hear(life.versions.head)
        await world.nodes[0].ask(life, groups=1)
        yield world, life, world.nodes[0], world.nodes[0].leases[0]


async def publish(life: Life, *, version: int, step: int) -> bytes:
    """A version with a root of its own."""
    head = Head(version=version, step=step, root=bytes([version]) * 32)
    header = header_of(head, parent=life.versions.head.root)
    await life.ledger.commit(rows.reserve_version(version, step=step, wall_time=0.0), rows.version_published(header))
    life.versions.publish(head)
    return head.root


async def send(life: Life, node: FakeNode, lease: Lease, *samples: Parts) -> Receipt:
    made = tuple(made_sample(leased.index, parts) for leased, parts in zip(lease.samples, samples, strict=True))
    body = Result(lease_id=lease.lease_id, samples=made, engine="", generate_s=0.1).encode()
    sealed = seal(body, run=RUN, kind="result", identity=node.identity).encode()
    return Receipt.decode(await life.intake.submit(node.identity.peer, sealed), limit=limits.RECEIPT_BYTES)


def rollouts(life: Life) -> list:
    return [s.rollout for group in life.book.groups.values() for s in group.samples if s.rollout is not None]


# --- taking in -------------------------------------------------------------------------------------------------------
async def test_a_lease_says_so_and_its_segments_come_back_after_a_restart(folder: Path) -> None:
    async with desk(folder) as (world, life, node, lease):
        assert lease.swap_mode == "recompute"
        first, second = lease.root, await publish(life, version=2, step=0)
        third = await publish(life, version=3, step=0)
        receipt = await send(life, node, lease, [(0, first), (128, second), (384, third)], [(0, second)])
        assert (receipt.code, receipt.accepted) == (None, (0, 1))
        long, begun_anew = rollouts(life)
        assert [(s.first_token, s.version, s.root) for s in long.stretches] == [
            (0, 1, first), (128, 2, second), (384, 3, third),
        ]  # fmt: skip
        assert (begun_anew.version, begun_anew.root, begun_anew.later) == (2, second, ())
    async with world.life() as life:
        await life.stepper.settle()
        assert rollouts(life) == [long, begun_anew]


async def test_a_lease_keeps_its_mode_when_the_run_is_started_again_with_another(folder: Path) -> None:
    async with desk(folder) as (world, life, node, lease):
        await publish(life, version=2, step=0)
    world.swap_mode = "drain"
    async with world.life() as life:
        await life.stepper.settle()
        node.join(life)
        receipt = await send(life, node, lease, [(0, lease.root), (128, bytes([2]) * 32)], [(0, lease.root)])
        assert receipt.accepted == (0, 1)
        life.put_prompts()
        await node.ask(life, groups=1)
        assert node.leases[-1].swap_mode == "drain"


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("result.schema", [(0, 1), (64, 2)]),
        ("result.schema", [(128, 1)]),
        ("result.root", [(0, 1), (128, 2), (256, 2)]),
        ("result.root", [(0, 2), (128, 1)]),
        ("result.root", [(0, 1), (128, 3), (256, 2)]),
        ("result.root", [(0, 1), (128, 9)]),
    ],
)
async def test_a_swap_that_cannot_have_been_is_refused(folder: Path, code: str, parts: list[tuple[int, int]]) -> None:
    async with desk(folder) as (_, life, node, lease):
        roots = {1: lease.root, 9: bytes([9]) * 32}
        roots |= {version: await publish(life, version=version, step=0) for version in (2, 3)}
        named = [(first, roots[version]) for first, version in parts]
        receipt = await send(life, node, lease, [(0, lease.root)], named)
        assert (receipt.code, receipt.accepted) == (code, ())
        assert await life.ledger.fetch("SELECT code FROM offences") == [(code,)]
        assert await life.ledger.fetch("SELECT count(*) FROM stretches") == [(0,)]


@pytest.mark.parametrize(
    ("modes", "new_tokens", "says"),
    [
        (("drain",), 4096, "drain"),
        (("drain", "recompute"), 511, "drain"),
        (("recompute", "drain"), 512, "recompute"),
        (("recompute",), 16, "recompute"),
    ],
)
def test_long_work_may_be_swapped_where_the_operator_allows_it(
    modes: tuple[SwapMode, ...], new_tokens: int, says: SwapMode
) -> None:
    config = LearnerConfig(
        run=Run(name="r"), model=Model(source="hub:o/m"), environments=(Environment(name="addition"),),
        leases=Leases(swap_modes=modes), rollouts=Rollouts(max_new_tokens=new_tokens),
    )  # fmt: skip
    assert swap_mode(config) == says
    assert swap_mode(config.model_copy(update={"leases": Leases()})) == "drain", "unless somebody says otherwise"


@pytest.mark.parametrize("modes", [(), ("drain", "drain"), ("keep",)])
def test_swap_modes_that_mean_nothing_are_refused(modes: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError):
        Leases(swap_modes=modes)  # type: ignore[arg-type]


# --- age -------------------------------------------------------------------------------------------------------------
async def test_the_oldest_token_is_what_counts_and_one_that_was_begun_anew_is_young(folder: Path) -> None:
    async with desk(folder) as (_, life, node, lease):
        second = await publish(life, version=2, step=2)
        life.book.next_step = 3  # the lease's own weights, of step 0, are too old by now
        receipt = await send(life, node, lease, [(0, lease.root), (128, second)], [(0, second)])
        assert (receipt.code, receipt.accepted) == ("result.stale", (1,))
        assert [rollout.step for rollout in rollouts(life)] == [2]
        group = life.book.groups[lease.group]
        assert [sample.state for sample in group.samples] == ["open", "filled"]
        assert group.oldest_step == 2
        assert await life.ledger.fetch("SELECT count(*) FROM offences") == [(0,)], "lateness is no offence"


async def test_weights_that_were_undone_are_nobodys_fault_and_worth_nothing(folder: Path) -> None:
    async with desk(folder) as (_, life, node, lease):
        base = life.versions.head
        undone = Head(version=2, step=1, root=bytes([2]) * 32)
        life.versions.reset([base, Head(version=3, step=0, root=bytes([3]) * 32)], undone=[undone])
        receipt = await send(
            life, node, lease, [(0, lease.root), (128, undone.root), (256, bytes([3]) * 32)], [(0, lease.root)]
        )
        assert (receipt.code, receipt.accepted) == ("result.stale", (1,))
        assert await life.ledger.fetch("SELECT count(*) FROM offences") == [(0,)]


async def test_going_back_orphans_what_any_lost_weights_have_drawn(folder: Path) -> None:
    async with desk(folder) as (world, life, node, lease):
        second = await publish(life, version=2, step=1)
        await send(life, node, lease, [(0, lease.root), (128, second)], [(0, lease.root)])
    async with world.life() as life:
        await life.stepper.settle()  # at step 0: nothing was saved
        states = await life.ledger.fetch("SELECT sample, state FROM rollouts ORDER BY sample")
        assert states == [(0, "orphaned"), (1, "scoring")]
        assert [rollout.sample for rollout in rollouts(life)] == [1]


async def test_a_rollback_voids_what_any_undone_weights_have_drawn(folder: Path) -> None:
    async with desk(folder) as (_, life, node, lease):
        second = await publish(life, version=2, step=1)
        await send(life, node, lease, [(0, lease.root), (128, second)], [(0, lease.root)])
        life.book.suspend()
        trip = Trip(step=1, wire="gradient", value=1.0, bound=0.5, sentence="", last_good=0)
        assert (await rollbacks.begin(life.ledger, trip, to_step=0, wall_time=0.0)).voided == 1
        states = await life.ledger.fetch("SELECT sample, state FROM rollouts ORDER BY sample")
        assert states == [(0, "void"), (1, "scoring")]


@pytest.mark.parametrize("block", range(3))
async def test_whole_runs_with_swaps_lose_nothing_and_accuse_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """With kills and failures of everything; the trainer knows which weights exist (``FakeTrainer``)."""
    hurry(monkeypatch)
    trained = 0
    for seed in range(4 * block, 4 * block + 4):
        random = Random(seed)
        fortune = Misfortune(random, kills=random.choice((0.0, 0.03)), faults=random.choice((0.0, 0.1)))
        for module in ("steps", "work.leasing", "work.intake"):
            monkeypatch.setattr(f"rollmesh_learner.{module}.fault_point", fortune)
        home = folder / f"{seed}"
        home.mkdir()
        world = World(
            home, random, replace(RULES, steps=10, staleness=4), hook=fortune, checkpoint_every=random.choice((1, 3)),
            swap_mode="recompute", new_tokens=600,
        )  # fmt: skip
        with trio.fail_after(60):
            await world.run_to_the_end()
        await world.conclude()
        async with open_ledger(home / "ledger.sqlite") as ledger:
            found = await ledger.fetch(
                "SELECT r.state, count(*) FROM stretches s JOIN rollouts r"
                " ON r.lease_id = s.lease_id AND r.sample = s.sample GROUP BY r.state"
            )
        counts = {str(state): int(str(count)) for state, count in found}
        trained += counts.get("consumed", 0)
    assert trained > 0, "in no run anything with a swap in it was trained on"


# --- the record of versions, and older ledgers -----------------------------------------------------------------------
def test_versions_keep_their_order_and_no_more_than_so_many() -> None:
    versions = Versions()
    for version in range(1, KEPT_LINE + 10):
        versions.publish(Head(version=version, step=version, root=version.to_bytes(32, "big")))
    versions.publish(Head(version=KEPT_LINE + 9, step=KEPT_LINE + 50, root=(KEPT_LINE + 9).to_bytes(32, "big")))
    assert [version for version, _ in versions.since(KEPT_LINE + 5)] == [KEPT_LINE + n for n in (6, 7, 8, 9)]
    assert len(versions.since(0)) == KEPT_LINE
    assert versions.since(KEPT_LINE + 9) == ()


async def test_a_ledger_from_before_is_opened_and_its_leases_drain(folder: Path) -> None:
    path = folder / "ledger.sqlite"
    async with desk(folder) as (world, _, node, lease):
        pass
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE leases DROP COLUMN swap_mode")
        connection.execute("DROP TABLE stretches")
    async with open_ledger(path) as ledger:
        assert await ledger.fetch("SELECT swap_mode FROM leases") == [("drain",)]
    async with world.life() as life:
        await life.stepper.settle()
        node.join(life)
        assert (await send(life, node, lease, [(0, lease.root)], [(0, lease.root)])).accepted == (0, 1)
