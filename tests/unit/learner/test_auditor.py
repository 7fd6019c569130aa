"""The audit loop around its child: what follows from figures, and that no rollout holds up the others."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import trio

from rollmesh_learner.audit.auditor import MOST_SUSPECTS, Auditor
from rollmesh_learner.work.book import Rules
from rollmesh_peer.children.failure import DIED
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.verdicts.margins import Thresholds
from tests.unit.learner.world import FakeNode, Life, World

RULES = Rules(steps=20, staleness=2, groups_per_step=2, samples_per_group=2)


class Child:
    """Finds no fault with anything, but for the samples that a test names."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        """Rollouts in each call."""
        self.poison: set[int] = set()
        """Seeds at which it fails."""
        self.code: str | None = None
        self.failures_left = 1000
        self.far: set[int] = set()
        """Seeds at which it finds tokens far off."""
        self.untrue = 0.0
        """How far it finds all claimed log-probabilities off, nats."""

    @asynccontextmanager
    async def use(self):
        yield self

    async def call(self, verb: str, body: dict, *, deadline_s: float) -> dict:
        await trio.lowlevel.checkpoint()
        rollouts = body["rollouts"]
        self.asked.append(len(rollouts))
        if self.failures_left and self.poison & {rollout["seed"] for rollout in rollouts}:
            self.failures_left -= 1
            raise ChildFailed("the auditor process failed: ValueError: no", code=self.code)
        return {
            "rollouts": [
                {
                    "margins": np.full(len(r["tokens"]) // 4, 9.0 * (r["seed"] in self.far), "<f4").tobytes(),
                    "exact_logprobs": (np.frombuffer(r["logprobs"], "<f4") - np.float32(self.untrue)).tobytes(),
                }
                for r in rollouts
            ]
        }


@asynccontextmanager
async def auditing(folder: Path, monkeypatch: pytest.MonkeyPatch, *, image: Path | None = Path("image")):
    """A learner with four rollouts of one node that wait for their audit, and the loop that will do it."""
    monkeypatch.setattr("rollmesh_learner.audit.auditor._AGAIN_S", 0.0)
    world = World(folder, Random(0), RULES)
    async with world.life() as life:
        await life.stepper.settle()
        life.put_prompts()
        for node in world.nodes:
            node.join(life)
            node.hear(life.versions.head)
        await world.nodes[0].work_off(life, groups=1)
        await world.nodes[1].work_off(life, groups=1)
        for rollout in [*life.book.pending("scoring")]:
            scored = life.book.score(rollout.key, 1.0, error=None)
            await life.ledger.commit(*scored, *life.book.draw(rollout.key, drawn=True))
        child = Child()
        auditor = Auditor(
            thresholds=Thresholds(), book=life.book, nodes=life.registry, ledger=life.ledger,
            discipline=life.discipline, child=child, image_of=lambda _root: image,
        )  # fmt: skip
        yield life, child, auditor, world.nodes


async def audit_all(life: Life, auditor: Auditor) -> None:
    """Run the loop until nothing waits."""
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(auditor.run, lambda: None)
            while [*life.book.pending("auditing")] or auditor._suspects:
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()


def of(life: Life, node: FakeNode) -> list:
    return [rollout for rollout in life.book.pending("auditing") if rollout.node == node.identity.peer]


async def test_what_passes_is_ready_and_one_call_is_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with auditing(folder, monkeypatch) as (life, child, auditor, nodes):
        await audit_all(life, auditor)
        assert child.asked == [4]
        assert len([*life.book.pending("ready")]) == 4
        assert life.registry.record_of(nodes[0].identity.peer).passed == 2


async def test_a_hard_failure_costs_the_node_everything_and_others_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with auditing(folder, monkeypatch) as (life, child, auditor, nodes):
        child.far = {of(life, nodes[0])[0].seed}
        await audit_all(life, auditor)
        bad, good = (life.registry.record_of(node.identity.peer) for node in nodes)
        assert bad.quarantined_for.startswith("result.sampling: a token lies 9.0 below")
        assert not good.is_quarantined
        assert {rollout.node for rollout in life.book.pending("ready")} == {nodes[1].identity.peer}
        assert await life.ledger.fetch("SELECT state, count(*) FROM rollouts GROUP BY state ORDER BY state") == [
            ("ready", 2), ("void", 2),
        ]  # fmt: skip


@pytest.mark.parametrize("place", [0, 1])
async def test_nothing_of_a_failed_node_is_ready_for_a_moment_and_the_verdict_is_one_transaction(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Its other rollout passes in the same round: a step that looks for its batch meanwhile must not find it."""
    async with auditing(folder, monkeypatch) as (life, child, auditor, nodes):
        node = nodes[0].identity.peer
        child.far = {of(life, nodes[0])[place].seed}
        commit = life.ledger.commit
        hard: list[tuple[bool, bool]] = []

        async def look(*statements) -> None:
            assert not [rollout for rollout in life.book.pending("ready") if rollout.node == node]
            texts = [str(statement) for statement in statements]
            if any("INTO audits" in text and "'hard'" in text for text in texts):
                hard.append((any("INTO offences" in t for t in texts), any("'void'" in t for t in texts)))
            await commit(*statements)

        monkeypatch.setattr(life.ledger, "commit", look)
        await audit_all(life, auditor)
        assert hard == [(True, True)]


async def test_a_node_whose_log_probabilities_are_never_true_loses_its_standing_but_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with auditing(folder, monkeypatch) as (life, child, auditor, nodes):
        child.untrue = 0.5
        await nodes[0].work_off(life, groups=1)
        for rollout in [*life.book.pending("scoring")]:
            scored = life.book.score(rollout.key, 1.0, error=None)
            await life.ledger.commit(*scored, *life.book.draw(rollout.key, drawn=True))
        await audit_all(life, auditor)
        first, second = (node.identity.peer for node in nodes[:2])
        assert await life.ledger.fetch("SELECT peer, code FROM offences") == [(first, "result.logprob")]
        assert life.registry.record_of(first).passed < 4, "it is audited more than a node with as much good work"
        assert not life.registry.record_of(first).is_quarantined
        assert life.registry.record_of(second).passed == 2
        assert len([*life.book.pending("ready")]) == 6, "the work itself is good"


async def test_suspects_of_one_node_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with auditing(folder, monkeypatch) as (life, _, auditor, nodes):
        liar, other = (of(life, node)[0] for node in nodes[:2])
        for sample in range(3 * MOST_SUSPECTS):
            auditor.suspect(replace(liar, sample=sample), prompt=bytes(8))
        auditor.suspect(other, prompt=bytes(8))
        assert len(auditor._suspects) == MOST_SUSPECTS + 1


@pytest.mark.parametrize(("code", "tries"), [(None, 3), (DIED, 10)])
async def test_a_rollout_that_cannot_be_audited_is_not_used_and_holds_nobody_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str | None, tries: int
) -> None:
    async with auditing(folder, monkeypatch) as (life, child, auditor, nodes):
        poison = of(life, nodes[0])[0]
        child.poison, child.code = {poison.seed}, code
        await audit_all(life, auditor)
        assert child.asked[0] == 4
        assert set(child.asked[1:]) == {1}
        assert len(child.asked) == 1 + 3 + tries - 1
        assert len([*life.book.pending("ready")]) == 3
        assert poison.state == "orphaned"
        assert life.book.groups[poison.group_id].samples[poison.sample].state == "open"
        assert not life.registry.record_of(poison.node).is_quarantined, "it may be our own fault"
        assert auditor._failures == {}


async def test_an_auditor_that_dies_now_and_then_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with auditing(folder, monkeypatch) as (life, child, auditor, nodes):
        child.poison, child.code, child.failures_left = {of(life, nodes[0])[0].seed}, DIED, 8
        await audit_all(life, auditor)
        assert child.failures_left == 0
        assert len([*life.book.pending("ready")]) == 4
        assert auditor.waiting_for == ""


async def test_without_the_weights_nobody_can_tell(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with auditing(folder, monkeypatch, image=None) as (life, child, auditor, _):
        await audit_all(life, auditor)
        assert child.asked == []
        assert await life.ledger.fetch("SELECT DISTINCT state FROM rollouts") == [("orphaned",)]


async def test_a_suspect_is_audited_after_the_fact_also_when_the_child_fails_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with auditing(folder, monkeypatch) as (life, child, auditor, nodes):
        suspect = of(life, nodes[0])[0]
        await audit_all(life, auditor)
        suspect.state = "consumed"
        child.poison, child.code, child.failures_left = {suspect.seed}, DIED, 2
        child.far = {suspect.seed}
        auditor.suspect(suspect, prompt=bytes(4))
        await audit_all(life, auditor)
        assert life.registry.record_of(suspect.node).is_quarantined
