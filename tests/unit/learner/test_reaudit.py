"""What was consumed of a node that cheated is looked at again, newest first; nothing but the account changes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import trio

from rollmesh_learner.audit.auditor import Auditor
from rollmesh_learner.audit.reaudit import Reaudits
from rollmesh_learner.members.discipline import Discipline
from rollmesh_learner.members.standing import Record
from rollmesh_learner.records import rows
from rollmesh_learner.records.audits import consumed_bad, unaudited_consumed
from rollmesh_learner.records.summary import summarise
from rollmesh_learner.work.book import Rules
from rollmesh_protocol.verdicts.margins import Thresholds
from tests.unit.learner.test_auditor import Child, audit_all
from tests.unit.learner.world import FakeNode, Life, World

RULES = Rules(steps=20, staleness=3, groups_per_step=1, samples_per_group=2)
KEPT = Path("image")


@asynccontextmanager
async def consumed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A learner whose first three steps were one steady node's work."""
    monkeypatch.setattr("rollmesh_learner.audit.auditor._AGAIN_S", 0.0)
    world = World(folder, Random(0), RULES)
    async with world.life() as life:
        await life.stepper.settle()
        (node, _) = world.nodes
        node.join(life)
        node.hear(life.versions.head)
        life.registry.set_record(node.identity.peer, Record(passed=1000))
        for step in range(3):
            life.put_prompts()
            await node.work_off(life, groups=1)
            await life.score_all()
            assert life.book.batch_is_ready()
            _, statements = life.book.assemble(wall_time=0.0)
            await life.ledger.commit(*statements, *rows.steps_final(step + 1))
        yield life, node, Child(), world


def make_auditor(life: Life, child: Child, *, bad: dict[int, int] | None = None, image: Path | None = KEPT) -> Auditor:
    def image_of(_root: bytes) -> Path | None:
        return image

    auditor = Auditor(
        thresholds=Thresholds(), book=life.book, nodes=life.registry, ledger=life.ledger,
        discipline=life.discipline, child=child, image_of=image_of,
        reaudits=Reaudits(life.ledger, image_of=image_of, bad=bad or {}),
    )  # fmt: skip
    life.discipline = auditor._discipline = Discipline(
        book=life.book, nodes=life.registry, ledger=life.ledger, on_quarantine=auditor.look_back
    )
    return auditor


async def look_back(auditor: Auditor, life: Life) -> None:
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(auditor.run, lambda: None)
            while auditor.reaudits._wanted or auditor.reaudits.cases:
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()


async def unaudited(life: Life, node: FakeNode) -> list:
    return await unaudited_consumed(life.ledger, node.identity.peer, most=100)


async def test_what_fails_is_counted_by_its_step_and_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with consumed(folder, monkeypatch) as (life, node, child, _):
        waiting = await unaudited(life, node)
        assert len(waiting) >= 4
        steps = [step for _, _, step in waiting]
        assert steps == sorted(steps, reverse=True), "the newest first"
        bad = [(rollout, step) for rollout, _, step in waiting if step >= 1]
        child.far = {rollout.seed for rollout, _ in bad}
        auditor = make_auditor(life, child)
        before = life.registry.record_of(node.identity.peer)
        with caplog.at_level("INFO", logger="rollmesh.learner.audit"):
            await life.discipline.offend(node.identity.peer, "result.sampling", detail="", rollouts=1)
            await look_back(auditor, life)
        assert auditor.reaudits.bad.total() == len(bad) == sum((await consumed_bad(life.ledger)).values())
        assert dict(auditor.reaudits.bad) == await consumed_bad(life.ledger)
        assert f"of {len(waiting)} consumed rollouts of " in caplog.text and f"{len(bad)} failed: " in caplog.text
        assert life.registry.record_of(node.identity.peer).audited == before.audited, "its standing is what it was"
        assert await unaudited(life, node) == []
        trust = (await summarise(life.ledger, run="r", full_bytes=1, bubble_fraction=0.0, checkpoint=None)).trust
        assert trust.consumed_bad == {str(step): count for step, count in auditor.reaudits.bad.items()}
        assert trust.lengths == {"2": {"consumed": len(waiting), "dropped": 0}}, "three tokens each"
        assert trust.audited_tokens == 4 * len(waiting), "and a prompt of one"
        assert trust.work_tokens == 4 * 6 == life.drawer.work_tokens
        states = await life.ledger.fetch("SELECT DISTINCT state FROM rollouts WHERE trained_step IS NOT NULL")
        assert states == [("consumed",)], "nothing is undone here"


async def test_a_kill_in_between_does_not_lose_the_account(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with consumed(folder, monkeypatch) as (life, node, child, _):
        child.far = {rollout.seed for rollout, _, _ in await unaudited(life, node)}
        total = len(child.far)
        auditor = make_auditor(life, child)
        monkeypatch.setattr("rollmesh_learner.audit.auditor._MOST_AT_ONCE", 1)
        auditor.look_back(node.identity.peer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(auditor.run, nursery.cancel_scope.cancel)  # killed after the first
        assert len(child.asked) == 1
        auditor = make_auditor(life, child, bad=await consumed_bad(life.ledger))
        auditor.look_back(node.identity.peer)  # as the coordinator does for everybody in quarantine
        await look_back(auditor, life)
        assert len(child.asked) == total
        assert auditor.reaudits.bad.total() == total


async def test_what_cannot_be_recomputed_any_more_is_counted_and_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with consumed(folder, monkeypatch) as (life, node, child, _):
        waiting = len(await unaudited(life, node))
        auditor = make_auditor(life, child, image=None)
        auditor.look_back(node.identity.peer)
        await look_back(auditor, life)
        assert child.asked == []
        assert auditor.reaudits.bad.total() == 0
        assert auditor.reaudits.left_out == waiting
        assert f"{waiting} could not be: {waiting} as their weights are no longer kept" in caplog.text


async def test_a_suspect_that_is_looked_at_again_is_recomputed_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with consumed(folder, monkeypatch) as (life, node, child, _):
        waiting = await unaudited(life, node)
        auditor = make_auditor(life, child)
        for rollout, prompt, _ in waiting[:2]:
            auditor.suspect(rollout, prompt=prompt)
        child.far = {rollout.seed for rollout, _, _ in waiting}
        auditor.look_back(node.identity.peer)
        await look_back(auditor, life)
        assert child.asked == [len(waiting)]
        assert auditor.reaudits.bad.total() == len(waiting)
        assert auditor._suspects == {}


async def test_a_node_without_consumed_work_is_not_worth_a_word(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with consumed(folder, monkeypatch) as (life, _, child, world):
        auditor = make_auditor(life, child)
        auditor.look_back(world.nodes[1].identity.peer)
        await look_back(auditor, life)
        assert "audited again" not in caplog.text


async def test_one_that_is_asked_for_twice_is_looked_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with consumed(folder, monkeypatch) as (life, node, child, _):
        waiting = len(await unaudited(life, node))
        auditor = make_auditor(life, child)
        for _ in range(2):
            auditor.look_back(node.identity.peer)
        await look_back(auditor, life)
        assert sum(child.asked) == waiting
        assert auditor.reaudits.left_out == 0


async def test_no_more_than_so_many_are_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with consumed(folder, monkeypatch) as (life, node, child, _):
        monkeypatch.setattr("rollmesh_learner.audit.reaudit.MOST", 1)
        auditor = make_auditor(life, child)
        auditor.look_back(node.identity.peer)
        await look_back(auditor, life)
        assert child.asked == [1]


async def test_a_suspect_that_fails_after_it_was_consumed_is_counted_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with consumed(folder, monkeypatch) as (life, node, child, _):
        (rollout, prompt, step), *others = await unaudited(life, node)
        child.far = {rollout.seed}
        auditor = make_auditor(life, child)
        auditor.suspect(rollout, prompt=prompt)
        await audit_all(life, auditor)
        await look_back(auditor, life)
        assert life.registry.record_of(node.identity.peer).is_quarantined
        assert dict(auditor.reaudits.bad) == {step: 1} == await consumed_bad(life.ledger)
        assert sum(child.asked) == 1 + len(others)


async def test_what_waits_now_comes_before_the_past(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with consumed(folder, monkeypatch) as (life, node, child, world):
        other = world.nodes[1]
        other.join(life)
        other.hear(life.versions.head)
        life.registry.rules = type(life.registry.rules)(
            new_rollouts=5, probation_rollouts=10, rate_new=1.0, rate_probation=1.0, rate_steady=0.0
        )
        life.put_prompts()
        await other.work_off(life, groups=1)
        await life.score_all_but_audits()
        auditor = make_auditor(life, child)
        auditor.look_back(node.identity.peer)
        await auditor.reaudits.load()
        assert {case.rollout.node for case in auditor._next_batch()[:2]} == {other.identity.peer}
