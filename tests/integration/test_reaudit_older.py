"""Consumed work of versions that are no longer in memory is looked at again: real ledger, publisher, archive, worker.

Only the auditor's child is played: it finds what a test names far off, and looks at which weights it was given.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import trio
from trio.lowlevel import checkpoint

from rollmesh_learner.audit.auditor import Auditor
from rollmesh_learner.audit.reaudit import Reaudits
from rollmesh_learner.members.standing import Record
from rollmesh_learner.publishing.archive import Archive
from rollmesh_learner.publishing.publisher import Publisher
from rollmesh_learner.records import rollbacks, rows
from rollmesh_learner.records.audits import consumed_bad
from rollmesh_learner.records.ledger import Statement
from rollmesh_learner.training.tripwires import Trip
from rollmesh_learner.work.book import Rules
from rollmesh_protocol.verdicts.margins import Thresholds
from tests.integration.test_weights_publisher import Run
from tests.unit.learner.test_auditor import Child
from tests.unit.learner.test_reaudit import look_back
from tests.unit.learner.world import FakeNode, Life, World
from tests.unit.weights.kit import MIXED, root_of

STEPS = 7
"""Steps 0 to 6, each of two rollouts of the version whose number is the step's plus one."""
IN_MEMORY = 4
OLDER = STEPS - IN_MEMORY
RULES = Rules(steps=20, staleness=STEPS, groups_per_step=1, samples_per_group=2)


class Looking(Child):
    """A child that reads the weights it is given."""

    def __init__(self, ram: Path) -> None:
        super().__init__()
        self._ram = ram
        self.seen: list[bytes] = []
        """The root of each image it was given."""
        self.before: Callable[[bytes], object] = lambda _root: None
        """Called with the root while a batch is in its hands."""

    async def call(self, verb: str, body: dict, *, deadline_s: float) -> dict:
        image = Path(body["image"])
        self.seen.append(root_of(MIXED, image.read_bytes()))
        assert image.name.startswith(self.seen[-1].hex())
        assert len([*self._ram.glob("*.older")]) <= 1
        self.before(self.seen[-1])
        return await super().call(verb, body, deadline_s=deadline_s)


@dataclass
class Scene:
    """A learner after some steps, of which one node's work is all."""

    life: Life
    node: FakeNode
    other: FakeNode
    auditor: Auditor
    archive: Archive
    publisher: Publisher
    child: Looking
    roots: list[bytes]
    """By step, of the weights behind what it consumed."""
    seeds: dict[int, set[int]]
    """By step."""
    free: list[int]
    """Bytes, by the archive's account."""

    def watch(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[], Awaitable[object]] = checkpoint) -> list[int]:
        """Do something whenever an image is about to be made; of which steps' weights they were."""
        made: list[int] = []
        restore = self.publisher._workshop.restore

        async def late(image: Path, **options: object):
            made.append(self.roots.index(bytes.fromhex(image.stem)))
            await before()
            return await restore(image, **options)

        monkeypatch.setattr(self.publisher._workshop, "restore", late)
        return made

    @property
    def seen(self) -> list[int]:
        """Of which steps' weights the images were that the auditor's child was given."""
        return [self.roots.index(root) for root in self.child.seen]

    async def look_back(self) -> None:
        self.auditor.look_back(self.node.identity.peer)
        await look_back(self.auditor, self.life)

    @property
    def reaudits(self) -> Reaudits:
        return self.auditor.reaudits


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    async with staged(tmp_path, monkeypatch) as found:
        yield found


@asynccontextmanager
async def staged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr("rollmesh_learner.audit.auditor._AGAIN_S", 0.0)
    world, run = World(folder, Random(0), RULES), Run(folder)
    async with world.life() as life, run.opened() as publisher:
        await life.stepper.settle()
        node, other = world.nodes
        for each in world.nodes:
            each.join(life)
            each.hear(life.versions.head)
        life.registry.set_record(node.identity.peer, Record(passed=1000))
        await run.base(publisher)
        seeds = {}
        for step in range(STEPS):
            seeds[step] = await consume(life, node, step, root=publisher.head.root)
            if step < STEPS - 1:
                await run.publish_some(publisher, 1)
        free = [1 << 40]
        archive = Archive(
            publisher, workshop=publisher._workshop, folder=folder / "ram", room=lambda: free[0], publisher_bytes=0
        )
        child = Looking(folder / "ram")
        auditor = Auditor(
            thresholds=Thresholds(), book=life.book, nodes=life.registry, ledger=life.ledger,
            discipline=life.discipline, child=child, image_of=archive.image_of,
            reaudits=Reaudits(life.ledger, image_of=archive.image_of, archive=archive, bad={}),
        )  # fmt: skip
        roots = [head.root for head in run.ledger]
        yield Scene(life, node, other, auditor, archive, publisher, child, roots, seeds, free)
        assert [*(folder / "ram").glob("*.older")] == [], "nothing is left"


async def consume(life: Life, node: FakeNode, step: int, *, root: bytes) -> set[int]:
    """A step of the node's work, made by the weights ``root`` as far as the ledger knows."""
    life.put_prompts()
    await node.work_off(life, groups=1)
    await life.score_all()
    groups, statements = life.book.assemble(wall_time=0.0)
    claimed = Statement(
        "UPDATE rollouts SET root = ?, version = ?, step = ? WHERE trained_step = ?", (root, step + 1, step, step)
    )
    await life.ledger.commit(*statements, claimed, *rows.steps_final(step + 1))
    return {sample.rollout.seed for group in groups for sample in group.samples if sample.rollout is not None}


async def draw_some(scene: Scene) -> None:
    """Another node's work, made by the newest weights, now waits for its audit."""
    life = scene.life
    life.put_prompts()
    await scene.other.work_off(life, groups=1)
    for rollout in [*life.book.pending("scoring")]:
        rollout.root = scene.roots[-1]
        scored = life.book.score(rollout.key, 1.0, error=None)
        await life.ledger.commit(*scored, *life.book.draw(rollout.key, drawn=True))


async def test_bad_work_of_versions_that_left_memory_is_found(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = scene.watch(monkeypatch)
    scene.child.far = scene.seeds[0] | scene.seeds[2] | scene.seeds[5]
    with caplog.at_level("INFO", logger="rollmesh.learner.audit"):
        await scene.look_back()
    assert scene.seen == [6, 5, 4, 3, 0, 1, 2], "in memory the newest first, then the oldest first"
    assert made == [0, 1, 2], "once each"
    assert scene.child.asked == [2] * STEPS
    assert dict(scene.reaudits.bad) == {0: 2, 2: 2, 5: 2} == await consumed_bad(scene.life.ledger)
    assert "of 14 consumed rollouts of " in caplog.text
    assert "6 failed: 2 in step 0, 2 in step 2, 2 in step 5\n" in caplog.text, "nothing was left out"
    assert scene.reaudits.left_out == 0


async def test_what_is_drawn_while_weights_are_made_goes_first(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def draw_at_the_second() -> None:
        if len(made) == 2:
            await draw_some(scene)

    made = scene.watch(monkeypatch, draw_at_the_second)
    await scene.look_back()
    assert scene.seen == [6, 5, 4, 3, 0, 6, 1, 2]
    assert made == [0, 1, 2]
    assert len([*scene.life.book.pending("ready")]) == 2


async def test_without_room_it_is_counted_and_told(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.free[0] = 0
    scene.child.far = scene.seeds[0] | scene.seeds[4]
    await scene.look_back()
    assert scene.seen == [6, 5, 4, 3]
    assert dict(scene.reaudits.bad) == {4: 2}
    assert scene.reaudits.left_out == 2 * OLDER
    assert "2 failed: 2 in step 4; 6 could not be: 6 as there is no room for their weights" in caplog.text
    assert caplog.text.count("older weights are not made again") == 1, "not once for each version"


async def test_damage_costs_what_lies_behind_it(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    patch = scene.publisher.history.entries[1].patch
    assert patch is not None
    with scene.publisher.store.payload_path(patch.name).open("r+b") as file:
        file.write(bytes(8))
    scene.child.far = scene.seeds[0] | scene.seeds[1]
    await scene.look_back()
    assert scene.seen == [6, 5, 4, 3, 0]
    assert dict(scene.reaudits.bad) == {0: 2}
    assert scene.reaudits.left_out == 4
    assert "; 4 could not be: 4 as their weights cannot be made again" in caplog.text
    scene.child.far = set()
    await draw_some(scene)
    await look_back_at_nothing(scene)
    assert scene.seen[-1] == 6, "audits go on"


async def look_back_at_nothing(scene: Scene) -> None:
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.auditor.run, nursery.cancel_scope.cancel)


async def test_a_rollback_meanwhile_takes_what_it_undid(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    trip = Trip(step=6, wire="kl", value=1.0, bound=0.5, sentence="too far", last_good=1)

    async def roll_back() -> None:
        if scene.reaudits.bad:
            assert dict(scene.reaudits.bad) == {5: 2}
            await rollbacks.begin(scene.life.ledger, trip, to_step=1, wall_time=0.0)
            scene.reaudits.undo(1)

    made = scene.watch(monkeypatch, roll_back)
    scene.child.far = {seed for step in (0, 1, 5) for seed in scene.seeds[step]}
    await scene.look_back()
    assert made == [0]
    assert scene.seen == [6, 5, 4, 3, 0]
    assert dict(scene.reaudits.bad) == {0: 2} == await consumed_bad(scene.life.ledger)
    assert scene.reaudits.left_out == 0, "it is void"


async def test_a_rollback_in_the_middle_of_an_audit_is_no_trouble(scene: Scene) -> None:
    scene.child.far = scene.seeds[1] | scene.seeds[2]
    scene.child.before = lambda root: scene.reaudits.undo(2) if root == scene.roots[2] else None
    await scene.look_back()
    assert scene.seen == [6, 5, 4, 3, 0, 1, 2]
    assert dict(scene.reaudits.bad) == {1: 2}
    record = scene.life.registry.record_of(scene.node.identity.peer)
    assert (record.audited, record.is_quarantined) == (0, False), "no standing changes"


async def test_one_at_which_the_auditor_fails_is_counted_and_its_weights_go(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.child.poison = {min(scene.seeds[1])}
    await scene.look_back()
    assert {*scene.seen} == {*range(STEPS)}
    assert scene.reaudits.left_out == 1
    assert "; 1 could not be: 1 as the auditor fails at them" in caplog.text


async def test_what_is_beyond_the_newest_is_counted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollmesh_learner.audit.reaudit.MOST", 4)
    await scene.look_back()
    assert scene.seen == [6, 5]
    assert scene.reaudits.left_out == 10
    assert "of 4 consumed rollouts of " in caplog.text and "; 10 could not be: 10 as only the newest" in caplog.text


async def test_weights_that_leave_memory_while_work_waits_are_made_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scene.watch(monkeypatch)
    scene.reaudits.look_back(scene.node.identity.peer)
    await scene.reaudits.load()
    scene.publisher._ring.keep({scene.roots[6]})
    await look_back(scene.auditor, scene.life)
    assert made == [0, 1, 2, 3, 4, 5]
    assert scene.child.asked == [2] * STEPS
