"""Audits of rollouts that several versions drew: each piece under its own weights, one verdict over all tokens."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import numpy as np
import pytest

from rollmesh_learner.audit.auditor import Auditor
from rollmesh_learner.audit.cases import Case
from rollmesh_learner.audit.pieces import by_root, together
from rollmesh_learner.audit.reaudit import Reaudits
from rollmesh_learner.records import rows
from rollmesh_learner.records.audits import audit_tokens
from rollmesh_learner.work.book import Rules
from rollmesh_learner.work.groups import StoredRollout, Stretch
from rollmesh_protocol.verdicts.margins import Thresholds
from tests.unit.learner.test_auditor import audit_all
from tests.unit.learner.test_reaudit import look_back
from tests.unit.learner.test_swaps import Parts, publish, send
from tests.unit.learner.world import FakeNode, Life, World

RULES = Rules(steps=20, staleness=3, groups_per_step=1, samples_per_group=2)
A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


def case(*roots: bytes, seed: int = 0, tokens: int = 300) -> Case:
    """A rollout whose weights changed every 128 tokens."""
    stretches = [Stretch(128 * place, root[0], root[0], root) for place, root in enumerate(roots)]
    rollout = StoredRollout(
        seed.to_bytes(16, "little"), 0, 0, "node", stretches[0].version, stretches[0].step, roots[0], seed,
        np.arange(tokens, dtype="<u4").tobytes(), np.linspace(-1, 0, tokens, dtype="<f4").tobytes(), "stop", True,
        later=tuple(stretches[1:]),
    )  # fmt: skip
    return Case(rollout, np.array([7, 8], "<u4").tobytes())


# --- cutting ---------------------------------------------------------------------------------------------------------
def test_the_pieces_of_a_rollout_are_all_of_its_tokens_behind_what_came_before() -> None:
    one = case(A, B, C, seed=5)
    bodies = [piece.body(0) for pieces in by_root([one]).values() for piece in pieces]
    tokens = np.arange(300, dtype="<u4")
    assert [body["first"] for body in bodies] == [0, 128, 256]
    for body, end in zip(bodies, (128, 256, 300), strict=True):
        first = body["first"]
        assert body["prompt"] == np.concatenate([[7, 8], tokens[:first]]).astype("<u4").tobytes()
        assert body["tokens"] == tokens[first:end].tobytes()
        assert body["seed"] == 5
    assert b"".join(body["logprobs"] for body in bodies) == one.rollout.logprobs
    assert one.num_tokens == (2 + 128) + (2 + 256) + (2 + 300), "each prefill counts"
    assert case(A).num_tokens == 302


def test_weights_are_loaded_once_and_in_their_order() -> None:
    found = by_root([case(B, C, seed=1), case(A, C, seed=2), case(A, seed=3)])
    assert list(found) == [A, B, C]
    assert [[piece.case.rollout.seed for piece in pieces] for pieces in found.values()] == [[2, 3], [1], [1, 2]]


def test_what_goes_together_needs_no_other_weights() -> None:
    cases = [case(A, seed=1), case(B, seed=2), case(A, B, seed=3), case(B, C, seed=4), case(C, seed=5)]
    assert [one.rollout.seed for one in together(cases, most=64)] == [1, 2, 3]
    assert [one.rollout.seed for one in together(cases[3:], most=64)] == [4, 5]
    assert [one.rollout.seed for one in together(cases, most=2)] == [1, 2]
    assert [one.rollout.seed for one in together([case(A), case(B), case(A)], most=64)] == [0, 0]


# --- the loop --------------------------------------------------------------------------------------------------------
class Child:
    """Finds no fault but at ``far``: (image, first token of a piece). Its log-probabilities tell the image."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        """Image, and the first token of each rollout that was asked about."""
        self.far: set[tuple[str, int]] = set()

    @asynccontextmanager
    async def use(self):
        yield self

    async def call(self, verb: str, body: dict, *, deadline_s: float) -> dict:
        image, pieces = body["image"], body["rollouts"]
        self.calls.append((image, [piece["first"] for piece in pieces]))
        return {
            "rollouts": [
                {
                    "margins": np.full(len(p["tokens"]) // 4, 9.0 * ((image, p["first"]) in self.far), "<f4").tobytes(),
                    "exact_logprobs": np.full(len(p["tokens"]) // 4, -float(image), "<f4").tobytes(),
                }
                for p in pieces
            ]
        }


@asynccontextmanager
async def auditing(folder: Path, *, gone: frozenset[int] = frozenset()):
    """Two rollouts that came in; the first has segments under versions 1 and 2. An image's name is its version."""
    world = World(folder, Random(0), RULES, swap_mode="recompute", new_tokens=400)
    async with world.life() as life:
        await life.stepper.settle()
        life.put_prompts()
        node = world.nodes[0]
        node.join(life)
        node.hear(life.versions.head)
        await node.ask(life, groups=1)
        (lease,) = node.leases
        second = await publish(life, version=2, step=0)
        versions = {lease.root: 1, second: 2}

        def image_of(root: bytes) -> Path | None:
            return None if versions[root] in gone else Path(str(versions[root]))

        child = Child()
        auditor = Auditor(
            thresholds=Thresholds(), book=life.book, nodes=life.registry, ledger=life.ledger,
            discipline=life.discipline, child=child, image_of=image_of,
            reaudits=Reaudits(life.ledger, image_of=image_of, bad={}),
        )  # fmt: skip
        parts: tuple[Parts, Parts] = [(0, lease.root), (128, second)], [(0, lease.root)]
        assert (await send(life, node, lease, *parts)).accepted == (0, 1)
        yield life, node, child, auditor


async def wait_for_audit(life: Life) -> None:
    for rollout in [*life.book.pending("scoring")]:
        scored = life.book.score(rollout.key, 1.0, error=None)
        await life.ledger.commit(*scored, *life.book.draw(rollout.key, drawn=True))


async def test_each_segment_under_its_own_weights_and_exact_ones_for_all_tokens(folder: Path) -> None:
    async with auditing(folder) as (life, node, child, auditor):
        await wait_for_audit(life)
        await audit_all(life, auditor)
        assert child.calls == [("1", [0, 0]), ("2", [128])]
        long, short = life.book.pending("ready")
        exact = np.frombuffer(long.exact_logprobs, "<f4")
        assert exact.tolist() == [-1.0] * 128 + [-2.0] * 3
        assert np.frombuffer(short.exact_logprobs, "<f4").tolist() == [-1.0] * 3
        assert await life.ledger.fetch("SELECT sample, verdict, tokens FROM audits ORDER BY sample") == [
            (0, "pass", 131), (1, "pass", 3),
        ]  # fmt: skip
        spent = (1 + 128) + (1 + 131) + (1 + 3)
        assert auditor.audited_tokens == (await audit_tokens(life.ledger)).audited == spent
        assert life.registry.record_of(node.identity.peer).passed == 2


@pytest.mark.parametrize("far", [("1", 0), ("2", 128)])
async def test_a_fault_in_any_segment_fails_the_rollout(folder: Path, far: tuple[str, int]) -> None:
    async with auditing(folder) as (life, node, child, auditor):
        await wait_for_audit(life)
        child.far = {far}
        await audit_all(life, auditor)
        record = life.registry.record_of(node.identity.peer)
        assert record.quarantined_for.startswith("result.sampling: ")
        assert await life.ledger.fetch("SELECT DISTINCT state FROM rollouts") == [("void",)]


async def test_one_whose_newer_weights_are_gone_is_not_used_and_holds_nobody_up(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with auditing(folder, gone=frozenset({2})) as (life, node, child, auditor):
        await wait_for_audit(life)
        await audit_all(life, auditor)
        assert child.calls == [("1", [0])]
        states = await life.ledger.fetch("SELECT sample, state FROM rollouts ORDER BY sample")
        assert states == [(0, "orphaned"), (1, "ready")]
        assert "1 rollouts cannot be audited: weights that drew them are no longer kept" in caplog.text
        assert not life.registry.record_of(node.identity.peer).is_quarantined


async def consume(life: Life, node: FakeNode) -> None:
    for rollout in [*life.book.pending("scoring")]:
        scored = life.book.score(rollout.key, 1.0, error=None)
        await life.ledger.commit(*scored, *life.book.draw(rollout.key, drawn=False))
    assert life.book.batch_is_ready()
    _, statements = life.book.assemble(wall_time=0.0)
    await life.ledger.commit(*statements, *rows.steps_final(1))


async def test_consumed_work_is_looked_at_again_by_its_segments(folder: Path) -> None:
    async with auditing(folder) as (life, node, child, auditor):
        await consume(life, node)
        child.far = {("2", 128)}
        auditor.look_back(node.identity.peer)
        await look_back(auditor, life)
        assert child.calls == [("1", [0, 0]), ("2", [128])]
        assert dict(auditor.reaudits.bad) == {0: 1}


async def test_what_lacks_one_of_its_weights_is_not_looked_at_again(folder: Path) -> None:
    async with auditing(folder, gone=frozenset({2})) as (life, node, child, auditor):
        await consume(life, node)
        auditor.look_back(node.identity.peer)
        await look_back(auditor, life)
        assert child.calls == [("1", [0])]
        assert auditor.reaudits.left_out == 1


async def test_what_lacks_several_of_its_weights_is_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with auditing(folder, gone=frozenset({1, 2})) as (life, node, child, auditor):
        await consume(life, node)
        auditor.look_back(node.identity.peer)
        await look_back(auditor, life)
        assert child.calls == []
        assert "; 2 could not be: 1 as several versions drew them, " in caplog.text
        assert ", 1 as their weights are no longer kept" in caplog.text
