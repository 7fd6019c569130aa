"""A learner without processes: the real ledger, book, desks and stepper around a trainer and publisher made of lists.

What the weights are made of is known here: the trainer's "weights" are the batches that it has seen, and a root is
their digest. So the world itself tells whether a rollout was trained on twice, too late, or although the weights that
made it no longer exist. A kill is :class:`Killed`, raised where a fault point or a child's call is passed; what
survives it is the ledger file, the saved checkpoints and what nodes have in hand.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import cast

import numpy as np
import pytest
import trio
from blake3 import blake3

from rollmesh_learner.audit.auditor import Auditor
from rollmesh_learner.audit.drawing import Drawer
from rollmesh_learner.members.discipline import Discipline
from rollmesh_learner.members.nodes import Nodes
from rollmesh_learner.members.shares import Shares
from rollmesh_learner.members.standing import StandingRules
from rollmesh_learner.members.withheld import WithheldBook
from rollmesh_learner.publishing.published import Entry
from rollmesh_learner.publishing.publisher import Prepared, Publisher
from rollmesh_learner.publishing.versions import Versions
from rollmesh_learner.records import restore, rollbacks, rows
from rollmesh_learner.records.ledger import Ledger, open_ledger
from rollmesh_learner.steps import Stepper, StepPlan
from rollmesh_learner.training.client import StepOutcome, TrainerClient
from rollmesh_learner.training.tripwires import Bounds
from rollmesh_learner.watch import Watch, WatchRules
from rollmesh_learner.work.book import Book, Rules
from rollmesh_learner.work.groups import Group, Prompt, StoredRollout
from rollmesh_learner.work.intake import Intake, IntakeTerms
from rollmesh_learner.work.leasing import LeaseDesk, LeaseTerms
from rollmesh_peer.children.failure import DIED
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import Envelope, seal
from rollmesh_protocol.errors import ChildFailed, Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.lease import Lease, SwapMode
from rollmesh_protocol.messages import (
    Head,
    Hello,
    LeaseAnswer,
    LeaseRequest,
    PolicyHeader,
    Receipt,
    ReturnRequest,
)
from rollmesh_protocol.rollout import Result, SampleResult, Segment, kept_tokens

RUN = "world-0"
VOCABULARY = 100
STOP = 7
Sample = tuple[int, int]
"""(group, sample)."""
Batch = tuple[frozenset[Sample], bool]
"""What one step was trained on, and whether it changed the weights."""
Hook = Callable[[str], None]


class Killed(BaseException):
    """kill -9, at the place where it is raised."""


def root_of(weights: tuple[Batch, ...]) -> bytes:
    """The root of weights: a digest of the batches that changed them."""
    text = repr([sorted(batch) for batch, changed in weights if changed])
    return blake3(text.encode()).digest()


class FakeTrainer:
    """A trainer child and its supervisor in one: a death is followed at once by a new life from the last checkpoint."""

    def __init__(
        self,
        saved: dict[int, tuple[Batch, ...]],
        *,
        hook: Hook,
        changes: Callable[[int], bool],
        staleness: int,
        poisoned: Collection[int],
    ) -> None:
        self.saved = saved
        self.weights: tuple[Batch, ...] = ()
        self.life = 0
        self.is_alive = True
        self.opened_at_step = 0
        self.opened_from: Path | None = None
        self._hook = hook
        self._changes = changes
        self._staleness = staleness
        self._poisoned = poisoned
        self.open()

    def open(self) -> None:
        step = max(self.saved, default=0)
        self.weights = self.saved.get(step, ())
        self.opened_at_step = step
        self.opened_from = Path(f"step-{step:08d}") if step else None
        self.life += 1

    async def wait_ready(self) -> int:
        await trio.lowlevel.checkpoint()
        return self.life

    async def restart(self) -> None:
        self.open()

    async def stop(self) -> None:
        await trio.lowlevel.checkpoint()

    @property
    def newest(self) -> Path | None:
        step = max(self.saved, default=0)
        return Path(f"step-{step:08d}") if step else None

    def saved_steps(self) -> list[int]:
        return sorted(self.saved)

    async def discard_beyond(self, step: int) -> None:
        await trio.lowlevel.checkpoint()
        for saved in [saved for saved in self.saved if saved > step]:
            del self.saved[saved]
            self._hook("rollback.discarding")

    async def train(self, step: int, groups: list[Group], *, life: int) -> StepOutcome:
        await self._work("train", life)
        if step != len(self.weights):
            raise ChildFailed(f"the trainer is at step {len(self.weights)} and was asked for step {step}")
        for rollout in (sample.rollout for group in groups for sample in group.samples):
            assert rollout is not None
            assert 0 <= step - rollout.step <= self._staleness, "a rollout was too old, or from the future"
            for part in rollout.stretches:
                assert root_of(self.weights[: part.step]) == part.root, "a rollout of weights that no longer exist"
        batch = frozenset((group.group_id, sample.index) for group in groups for sample in group.samples)
        assert not any(batch & before for before, _ in self.weights), "a sample was trained on twice"
        updated = self._changes(step)
        self.weights = (*self.weights, (batch, updated))
        await self._work("trained", life)
        norm = 1e6 if any(group in self._poisoned for group, _ in batch) else 1.0
        return StepOutcome(updated=updated, metrics={"loss": 0.0, "gradient_norm": norm}, suspects=())

    async def export(self, path: Path, *, life: int) -> None:
        await self._work("export", life)
        path.write_bytes(root_of(self.weights))

    async def checkpoint(self, step: int, *, carry: object, life: int) -> Path:
        await self._work("checkpoint", life)
        assert step == len(self.weights), "a checkpoint under the name of another step"
        self.saved[step] = self.weights
        await self._work("checkpointed", life)
        return Path(f"step-{step:08d}")

    async def _work(self, name: str, life: int) -> None:
        await trio.lowlevel.checkpoint()
        if life != self.life:
            raise ChildFailed("the trainer was replaced, and its weights with it")
        try:
            self._hook(f"trainer.{name}")
        except ChildFailed as error:
            if error.code == DIED:  # else it lives on, and has only refused
                self.open()
            raise


class FakePublisher:
    """Versions without files. ``out`` is what is on its disk: it survives a kill."""

    def __init__(self, out: list[Head], *, hook: Hook) -> None:
        self.out = out
        self._hook = hook
        self._pending: Head | None = None

    @property
    def head(self) -> Head:
        return self.out[-1] if self.out else Head(version=0, step=0, root=bytes(32))

    async def prepare(self, image: Path, *, version: int, step: int) -> Prepared | None:
        await trio.lowlevel.checkpoint()
        self._hook("publisher.prepare")
        root = image.read_bytes()
        assert version > self.head.version
        if root == self.head.root:
            image.unlink()
            return None
        self._hook("publisher.manifest_durable")
        image.unlink()
        self._pending = head = Head(version=version, step=step, root=root)
        return Prepared(header=header_of(head, parent=self.head.root), entry=Entry(head, None, None), image=image)

    def announced(self, prepared: Prepared) -> None:
        assert prepared.entry.head == self._pending
        self.out.append(prepared.entry.head)

    async def maintain(self) -> None:
        await trio.lowlevel.checkpoint()


def header_of(head: Head, *, parent: bytes | None) -> PolicyHeader:
    """A header of ``head`` with a manifest's name of its own."""
    name = blake3(repr(head).encode()).digest()
    return PolicyHeader(
        version=head.version, step=head.step, root=head.root, parent=parent, manifest=name, manifest_bytes=1,
        payload_bytes=1,
    )  # fmt: skip


@dataclass
class World:
    """What survives a kill, and what was ever seen."""

    folder: Path
    random: Random
    rules: Rules
    checkpoint_every: int = 2
    publish_every: int = 1
    cap: float = 1.0
    queue: int = 1_000_000
    swap_mode: SwapMode = "drain"
    new_tokens: int = 4
    hook: Hook = lambda _: None
    changes: Callable[[int], bool] = lambda _: True
    """Whether training a step changes the weights."""
    poisoned: Collection[int] = ()
    """Groups whose batch has a gradient that no honest batch has."""
    most_rollbacks: int = 100
    is_watched: bool = True
    bounds: Bounds = field(default_factory=Bounds)
    reward: Callable[[StoredRollout], float] | None = None
    """By chance where this is not given."""
    saved: dict[int, tuple[Batch, ...]] = field(default_factory=dict)
    receipts: dict[bytes, Receipt] = field(default_factory=dict)
    """Every receipt that a node has got, by lease."""
    versions: dict[int, bytes] = field(default_factory=dict)
    """Every version that anybody ever heard of: number -> root."""
    learner: Identity = field(default_factory=lambda: Identity(bytes(32)))
    nodes: list[FakeNode] = field(default_factory=list)
    rewinds: int = 0

    def __post_init__(self) -> None:
        self.nodes = [FakeNode(self, Identity(bytes([number]) * 32)) for number in (1, 2)]

    def reward_of(self, rollout: StoredRollout) -> float:
        """What an answer is worth."""
        return self.random.random() if self.reward is None else self.reward(rollout)

    @asynccontextmanager
    async def life(self) -> AsyncIterator[Life]:
        """A learner, from its start to its kill or its end."""
        async with open_ledger(self.folder / "ledger.sqlite") as ledger:
            out = await self._out(ledger)
            await rollbacks.finish(ledger, self._discard_beyond)
            yield Life(self, ledger, out)

    async def run_to_the_end(self, *, most_lives: int = 200) -> int:
        """Live again and again until the run is complete; returns how many lives it took."""
        for lives in range(1, most_lives + 1):
            try:
                async with self.life() as life:
                    await life.run()
                return lives
            except BaseExceptionGroup as group:
                if not _only_kills(group):
                    raise
            await self.check()
        raise AssertionError(f"the run is not complete after {most_lives} lives")

    async def check(self) -> dict[str, int]:
        """The promises, from the ledger as it lies there."""
        async with open_ledger(self.folder / "ledger.sqlite") as ledger:
            found = await ledger.fetch("SELECT lease_id, sample FROM rollouts")
            acknowledged = {(lease, index) for lease, told in self.receipts.items() for index in told.accepted}
            assert acknowledged <= set(found), "an acknowledged rollout is gone"
            for lease_id, told in self.receipts.items():
                ((receipt,),) = await ledger.fetch("SELECT receipt FROM leases WHERE lease_id = ?", lease_id)
                assert receipt == told.encode(), "a node has another receipt than the ledger"
            numbers = [row[0] for row in await ledger.fetch("SELECT version FROM versions ORDER BY reserved_at")]
            assert numbers == sorted(set(numbers)), "a version number was used again"
            named = await ledger.fetch("SELECT version, root FROM versions WHERE root NOT NULL")
            for version, root in named:
                assert self.versions.setdefault(cast(int, version), cast(bytes, root)) == root
            return await restore.accounts(ledger)

    async def conclude(self) -> None:
        """What must hold when the run is complete."""
        counts = await self.check()
        size = self.rules.groups_per_step * self.rules.samples_per_group
        weights = self.saved[max(self.saved)]
        assert len(weights) == self.rules.steps == max(self.saved)
        samples = [sample for batch, _ in weights for sample in batch]
        assert len(samples) == len(set(samples)) == self.rules.steps * size
        assert counts["consumed"] == len(samples)
        assert "assigned" not in counts
        async with open_ledger(self.folder / "ledger.sqlite") as ledger:
            steps = await ledger.fetch("SELECT step, state FROM steps ORDER BY step")
            assert steps == [(step, "final") for step in range(self.rules.steps)]
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
            assert [json.loads(line)["step"] for line in lines] == list(range(self.rules.steps))
            consumed = await ledger.fetch(
                "SELECT group_id, sample, trained_step FROM rollouts WHERE state = 'consumed'"
            )
            assert {(group, sample) for group, sample, _ in consumed} == set(samples)
            for group, sample, step in consumed:
                assert (group, sample) in weights[cast(int, step)][0], "the ledger and the weights disagree"
            hard = await ledger.fetch("SELECT code FROM offences WHERE code NOT IN ('lease.expired', 'result.stale')")
            assert not hard, "an honest node was accused"

    async def _discard_beyond(self, step: int) -> None:
        for saved in [saved for saved in self.saved if saved > step]:
            del self.saved[saved]
            self.hook("rollback.discarding")

    async def _out(self, ledger: Ledger) -> list[Head]:
        """What a publisher finds on its disk; the base is published in a first life, as ``beginning`` does."""
        published = await restore.published_versions(ledger)
        if not published:
            head = Head(version=1, step=0, root=root_of(()))
            await ledger.commit(
                rows.reserve_version(1, step=0, wall_time=0.0), rows.version_published(header_of(head, parent=None))
            )
            return [head]
        return [version.head for version in published]


class Life:
    """The parts of a learner, and the loops that its children would be."""

    def __init__(self, world: World, ledger: Ledger, out: list[Head]) -> None:
        self.world = world
        self.ledger = ledger
        self.book = Book(world.rules, share_of=lambda node: self.shares.share_of(node, now=trio.current_time()))
        self.book.suspend()
        self.versions = Versions()
        self.registry = Nodes(
            {},
            max_nodes=10,
            rules=StandingRules(
                new_rollouts=5, probation_rollouts=10, rate_new=0.5, rate_probation=0.5, rate_steady=0.2
            ),
        )
        self.shares = Shares(self.registry, self.book, cap=world.cap, queue=world.queue)
        self.discipline = Discipline(book=self.book, nodes=self.registry, ledger=ledger, on_quarantine=lambda _: None)
        self.trainer = FakeTrainer(
            world.saved,
            hook=world.hook,
            changes=world.changes,
            staleness=world.rules.staleness,
            poisoned=world.poisoned,
        )
        self.publisher = FakePublisher(out, hook=world.hook)
        self.drawer = Drawer(audit_key=bytes(32), book=self.book, nodes=self.registry, withheld=WithheldBook())
        self.desk = LeaseDesk(
            LeaseTerms(
                run=RUN,
                seed_key=bytes(32),
                max_new_tokens=world.new_tokens,
                most_groups=4,
                least_duration_s=1.0,
                most_duration_s=60.0,
                swap_mode=world.swap_mode,
            ),
            identity=world.learner,
            book=self.book,
            nodes=self.registry,
            versions=self.versions,
            ledger=ledger,
            is_over=lambda: False,
            shares=self.shares,
        )
        self.intake = Intake(
            IntakeTerms(
                run=RUN, seed_key=bytes(32), vocabulary=VOCABULARY, stop_tokens=frozenset({STOP}),
                max_new_tokens=world.new_tokens,
            ),
            book=self.book,
            nodes=self.registry,
            versions=self.versions,
            ledger=ledger,
            discipline=self.discipline,
            on_accepted=lambda: None,
        )  # fmt: skip
        self.stepper = Stepper(
            StepPlan(
                steps=world.rules.steps, publish_every=world.publish_every, checkpoint_every=world.checkpoint_every
            ),
            book=self.book,
            ledger=ledger,
            trainer=cast(TrainerClient, self.trainer),
            publisher=cast(Publisher, self.publisher),
            versions=self.versions,
            auditor=cast(Auditor, None),
            watch=Watch(
                WatchRules(
                    enabled=world.is_watched,
                    bounds=world.bounds,
                    most_rollbacks=world.most_rollbacks,
                    rollback_steps=1000,
                    checkpoint_every=world.checkpoint_every,
                ),
                ledger=ledger,
            ),
            exports=world.folder,
            metrics_file=world.folder / "metrics.jsonl",
            rewind=self.rewind,
        )

    def put_prompts(self) -> None:
        """Prompts for some steps. Prompt number i has the one token i; some are passed over."""
        while len(self.book.prompts) < 20:
            index = self.book.next_group + len(self.book.prompts)
            passed_over = index % 7 == 3
            self.book.prompts.append(None if passed_over else Prompt(0, "{}", index.to_bytes(4, "little")))

    async def score_all(self) -> None:
        """Everything that waits for a reward, or for an audit, has got it."""
        await self.score_all_but_audits()
        for rollout in [*self.book.pending("auditing")]:
            await self.ledger.commit(*self.book.pass_audit(rollout.key, rollout.logprobs))
        self.stepper.wake()

    async def score_all_but_audits(self) -> None:
        """Everything that waits for a reward has got it."""
        for rollout in [*self.book.unscored()]:
            await self.score_one(rollout)

    async def score_one(self, rollout: StoredRollout, *, reward: float | None = None) -> None:
        """What the scorer does with one of them: a reward, and the draw."""
        if reward is None:
            reward = self.world.reward_of(rollout)
        statements = self.book.score(rollout.key, reward, error=None)
        group = self.book.groups.get(rollout.group_id)
        if group is not None:
            statements += self.drawer.decide(group)
        await self.ledger.commit(*statements)

    async def run(self) -> bool:
        """What ``coordinator`` does, with everybody at work from the first moment on."""
        async with trio.open_nursery() as nursery:
            for node in self.world.nodes:
                nursery.start_soon(node.work, self)
            for loop in (self.make_prompts, self.score, self.audit, self.lose_leases):
                nursery.start_soon(loop)
            await self.stepper.settle()
            is_complete = await self.stepper.run()
            nursery.cancel_scope.cancel()
        return is_complete

    async def rewind(self, step: int) -> None:
        self.world.rewinds += 1
        found = await restore.rewind(self.ledger, self.book, self.versions, step=step, now=trio.current_time())
        newest = found.published[-1]
        if newest.is_orphaned or newest.head.step != step:
            await self.stepper.publish_now(step)

    async def make_prompts(self) -> None:
        while True:
            self.put_prompts()
            await _a_moment()

    async def score(self) -> None:
        while True:
            waiting = list(self.book.unscored())
            await _a_moment()
            for rollout in waiting[: self.world.random.randrange(1, 5)]:
                await self.score_one(rollout)
                self.stepper.wake()

    async def audit(self) -> None:
        while True:
            waiting = list(self.book.pending("auditing"))
            await _a_moment()
            for rollout in waiting[: self.world.random.randrange(1, 5)]:
                statements = self.book.pass_audit(rollout.key, rollout.logprobs)
                await self.ledger.commit(*statements)
                self.stepper.wake()

    async def lose_leases(self) -> None:
        """Now and then a lease runs out although its node is at work; what comes then is late."""
        while True:
            for _ in range(10):
                await _a_moment()
            leases = [lease for lease in self.book.leases.values() if lease.state == "open"]
            if leases:
                lease = self.world.random.choice(leases)
                await self.ledger.commit(*self.book.end_lease(lease, "expired", now=trio.current_time()))


class FakeNode:
    """An honest node: holds the head or a version before it, and sends the same bytes until they are answered."""

    def __init__(self, world: World, identity: Identity) -> None:
        self.world = world
        self.identity = identity
        self.held = Head(version=0, step=0, root=bytes(32))
        self.taken: list[Head] = []
        """Every version that it has had."""
        self.spool: dict[bytes, bytes] = {}
        self.leases: list[Lease] = []

    def join(self, life: Life) -> None:
        """Say hello, as after every new connection."""
        hello = Hello(majors=(1,), software="", name="", role="worker", engine=None, addresses=(), invite=None)
        life.registry.admit(self.identity.peer, hello, now=trio.current_time())

    async def work(self, life: Life) -> None:
        """Do by chance what nodes do, for ever."""
        self.join(life)
        random = self.world.random
        while True:
            await _a_moment()
            chance = random.random()
            if chance < 0.3:
                if random.random() < 0.7:
                    self.hear(life.versions.head)
                await self.ask(life, groups=random.randrange(1, 4))
            elif chance < 0.6 and self.leases:
                self.generate(self.leases.pop(random.randrange(len(self.leases))))
            elif chance < 0.65 and self.leases:
                lease = self.leases.pop()
                await life.desk.take_back(
                    self.identity.peer, ReturnRequest(lease_ids=(lease.lease_id,), code="node.weights").encode()
                )
            elif self.spool:
                await self._submit_one(life, random.choice(list(self.spool)))

    async def ask(self, life: Life, *, groups: int) -> LeaseAnswer:
        """Ask for work under the weights held, and keep the leases."""
        request = LeaseRequest(
            groups=groups, version_held=self.held.version, root_held=self.held.root, tokens_per_s=0, waiting_for=""
        )
        answer = LeaseAnswer.decode(
            await life.desk.lease(self.identity.peer, request.encode()), limit=limits.LEASES_BYTES
        )
        for sealed in answer.leases:
            body = Envelope.decode(sealed, limit=limits.LEASES_BYTES).open(
                run=RUN, kind="lease", signer=self.world.learner.peer
            )
            self.leases.append(Lease.decode(body, limit=limits.LEASES_BYTES))
        return answer

    def hear(self, head: Head) -> None:
        """Take a newer version."""
        if head.version <= self.held.version:
            return
        known = self.world.versions.setdefault(head.version, head.root)
        assert known == head.root, "two versions have one number"
        self.held = head
        self.taken.append(head)

    def generate(self, lease: Lease) -> None:
        """Put a result for ``lease`` into the spool: three tokens a sample, or what :meth:`_swap` makes of it."""
        result = Result(
            lease_id=lease.lease_id,
            samples=tuple(
                made_sample(sample.index, [(0, lease.root)] if lease.swap_mode == "drain" else self._swap(lease))
                for sample in lease.samples
            ),
            engine="", generate_s=0.1,
        )  # fmt: skip
        self.spool[lease.lease_id] = seal(result.encode(), run=RUN, kind="result", identity=self.identity).encode()

    def _swap(self, lease: Lease) -> list[tuple[int, bytes]]:
        """Go through some of the versions that came after the lease, each somewhere in the completion."""
        random, parts, drawn = self.world.random, [(0, lease.root)], 0
        for head in self.taken:
            if head.version > lease.version and random.random() < 0.7:
                drawn = kept_tokens(random.randrange(drawn, self.world.new_tokens - 2))
                parts = [part for part in parts if part[0] < drawn] + [(drawn, head.root)]
        return parts

    async def submit(self, life: Life, lease_id: bytes) -> Receipt:
        """Send a result and get its receipt; the result stays in the spool."""
        raw = await life.intake.submit(self.identity.peer, self.spool[lease_id])
        receipt = Receipt.decode(raw, limit=limits.RECEIPT_BYTES)
        assert self.world.receipts.setdefault(lease_id, receipt) == receipt, "the same bytes got another receipt"
        return receipt

    async def work_off(self, life: Life, *, groups: int) -> list[Receipt]:
        """Ask for work, do all of it and hand it in."""
        await self.ask(life, groups=groups)
        leases, self.leases = self.leases, []
        for lease in leases:
            self.generate(lease)
        receipts = [await self.submit(life, lease.lease_id) for lease in leases]
        self.spool.clear()
        return receipts

    async def _submit_one(self, life: Life, lease_id: bytes) -> None:
        try:
            await self.submit(life, lease_id)
        except Refused as refusal:
            if refusal.code != "request.busy":
                raise
            return
        if self.world.random.random() < 0.9:  # else the answer is lost on its way, and it is sent again
            self.spool.pop(lease_id, None)


def made_sample(index: int, parts: Sequence[tuple[int, bytes]]) -> SampleResult:
    """A completion that ends two tokens behind its last segment; ``parts`` are (first token, root)."""
    tokens = np.array([*[1] * parts[-1][0], 1, 2, STOP], dtype="<u4")
    return SampleResult(
        index=index, tokens=tokens.tobytes(), logprobs=np.full(len(tokens), -1.0, "<f4").tobytes(), finish="stop",
        segments=tuple(Segment(first_token=first, root=root) for first, root in parts),
    )  # fmt: skip


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the waits of the real parts short."""
    monkeypatch.setattr("rollmesh_learner.steps._AGAIN_S", 0.001)
    monkeypatch.setattr("rollmesh_learner.steps._LOOK_S", 0.002)
    monkeypatch.setattr("rollmesh_learner.work.book.RELEASE_DELAY_S", 0.01)


async def _a_moment() -> None:
    await trio.sleep(0.0002)


@asynccontextmanager
async def settled_life(folder: Path, rules: Rules) -> AsyncIterator[tuple[Life, list[FakeNode]]]:
    """A learner that has begun and has prompts, and the world's nodes, which have joined and hold its first version."""
    world = World(folder, Random(0), rules)
    async with world.life() as life:
        await life.stepper.settle()
        life.put_prompts()
        for node in world.nodes:
            node.join(life)
            node.hear(life.versions.head)
        yield life, world.nodes


def _only_kills(group: BaseExceptionGroup) -> bool:
    return all(
        _only_kills(error) if isinstance(error, BaseExceptionGroup) else isinstance(error, Killed | trio.Cancelled)
        for error in group.exceptions
    )
