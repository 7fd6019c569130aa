"""Wires one learner process: opens what is durable, starts the children, answers the mesh, and runs the steps.

The parts, in the order in which a rollout and then a version meet them:

    PromptSource -> LeaseDesk -> (a node) -> Intake -> Scorer -> Auditor -> Book -> Stepper -> TrainerClient
    Stepper -> Publisher -> Announcer and Seeder -> (nodes)
    Publisher -> Archive -> Auditor, for consumed work of versions that are no longer in memory

Invariant between them: the ledger has it before anybody outside hears of it. Nobody imports this module but the
command line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import trio

from rollmesh_learner import terms
from rollmesh_learner.audit.account import trust_status
from rollmesh_learner.audit.auditor import Auditor
from rollmesh_learner.audit.calibration import adopt
from rollmesh_learner.audit.claims import Claims
from rollmesh_learner.audit.drawing import MEANS, Drawer
from rollmesh_learner.audit.margin_book import MarginBook, load_remembered
from rollmesh_learner.audit.reaudit import Reaudits
from rollmesh_learner.base import base_of_run
from rollmesh_learner.beginning import begin, make_card, name_run
from rollmesh_learner.config import LearnerConfig
from rollmesh_learner.crew import CHECKPOINTS, Crew, answer_limits, open_crew
from rollmesh_learner.members.admission import Registrations
from rollmesh_learner.members.discipline import Discipline
from rollmesh_learner.members.nodes import Nodes
from rollmesh_learner.members.shares import Shares
from rollmesh_learner.members.standing import Record
from rollmesh_learner.members.welcome import WelcomeDesk
from rollmesh_learner.publishing.archive import Archive
from rollmesh_learner.publishing.opening import open_publisher
from rollmesh_learner.publishing.publisher import Publisher
from rollmesh_learner.publishing.spread import SpreadBook
from rollmesh_learner.publishing.versions import Versions
from rollmesh_learner.records import restore, rollbacks
from rollmesh_learner.records.audits import TrustMemory, load_trust
from rollmesh_learner.records.ledger import Ledger, open_ledger
from rollmesh_learner.records.summary import RunSummary, summarise, write_summary
from rollmesh_learner.run_keys import load_run_keys
from rollmesh_learner.status import RunReporter
from rollmesh_learner.steps import Stepper
from rollmesh_learner.training.client import discard_beyond
from rollmesh_learner.watch import Watch
from rollmesh_learner.work.book import Book
from rollmesh_learner.work.intake import Intake
from rollmesh_learner.work.leasing import LeaseDesk
from rollmesh_learner.work.prompting import PromptSource
from rollmesh_learner.work.scoring import Scorer
from rollmesh_peer.control import serve_control
from rollmesh_peer.folders import control_socket, private_folder, run_folder
from rollmesh_peer.keys import hold_key
from rollmesh_peer.mesh.announcements import Announcer, SequenceFile
from rollmesh_peer.mesh.host import HostOptions, check_listen, open_mesh
from rollmesh_peer.mesh.requests import Handle, Route, Router
from rollmesh_peer.mesh.seam import Mesh
from rollmesh_peer.weights.passes import PassBook
from rollmesh_peer.weights.sharing import Sharing
from rollmesh_protocol import limits, streams
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.messages import RunCard

_log = logging.getLogger("rollmesh.learner")

FAREWELL_S: Final = 3.0
"""After the last step nodes are told, and have this long to hear it and to hand in what they hold."""
PROMPTS_AHEAD_STEPS: Final = 3
"""Steps' worth of prompts made in advance."""
LEARNER_PLACES: Final = 256
"""Requests worked on at one time; a place is held for milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What an operator wants to know once nodes can join."""

    run: str
    addresses: tuple[str, ...]
    folder: Path
    step: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run, or this process's share of it, ended."""

    is_complete: bool
    given_up: str
    """Why the run must not go on by itself, in a sentence; empty when it may."""
    folder: Path
    summary: RunSummary


async def run_learner(
    config: LearnerConfig, *, software: str, on_ready: Callable[[Ready], None], stop: trio.Event
) -> Outcome:
    """Run the learner until the last step is durable, or until ``stop`` is set and the step under way is.

    Raises:
        HostError, UsageError, ChildFailed: with one sentence, when the run cannot be started.
    """
    folder = private_folder(config.run.folder) if config.run.folder else run_folder(config.run.name)
    with hold_key(folder / "learner.key") as identity:
        await check_listen(config.network.listen)  # before minutes are spent on a model
        async with open_ledger(folder / "ledger.sqlite") as ledger:
            run = await name_run(ledger, config, folder=folder)
            model = await base_of_run(ledger, config.model)
            await rollbacks.finish(ledger, partial(discard_beyond, folder / CHECKPOINTS))
            config, drift = await adopt(config, folder=folder, model=model)
            async with (
                open_crew(config, model=model, folder=folder) as hands,
                open_publisher(config, run=run, identity=identity, folder=folder, layout=hands.layout) as (
                    publisher,
                    archive,
                    exports,
                ),
            ):
                base_root = await begin(ledger, publisher, hands, exports=exports)
                card = make_card(
                    config, run=run, learner=identity.peer, model=model, base_root=base_root, hands=hands,
                    judging=terms.judging(config, drift=drift),
                )  # fmt: skip
                learner = _Learner(
                    config, folder=folder, identity=identity, ledger=ledger, hands=hands, publisher=publisher,
                    archive=archive, exports=exports, card=card, software=software,
                    records=await restore.load_records(ledger),
                    memory=await load_trust(ledger, terms.thresholds(config), means_name=MEANS),
                    margin_book=terms.margin_book(config, drift=drift, known=await load_remembered(ledger)),
                    registrations=await restore.load_registrations(
                        ledger, per_block=config.admission.per_block, now=trio.current_time(), wall_time=time.time()
                    ),
                )  # fmt: skip
                return await learner.run(on_ready=on_ready, stop=stop)


class _Learner:
    """All parts of a learner that has begun."""

    def __init__(
        self,
        config: LearnerConfig,
        *,
        folder: Path,
        identity: Identity,
        ledger: Ledger,
        hands: Crew,
        publisher: Publisher,
        archive: Archive,
        exports: Path,
        card: RunCard,
        records: dict[str, Record],
        software: str,
        memory: TrustMemory,
        margin_book: MarginBook | None,
        registrations: Registrations,
    ) -> None:
        self._config = config
        self._folder = folder
        self._identity = identity
        self._ledger = ledger
        self._hands = hands
        self._publisher = publisher
        self._card = card
        self._software = software
        self._registrations = registrations
        self._is_over = False
        keys = load_run_keys(folder)
        self._versions = Versions()
        self._book = Book(
            terms.book_rules(config), share_of=lambda node: self._shares.share_of(node, now=trio.current_time())
        )
        self._book.suspend()  # until the ledger has been read
        self._nodes = Nodes(
            records,
            max_nodes=config.network.max_nodes,
            rules=terms.standing_rules(config),
            margins=memory.margins,
        )
        self._shares = Shares(self._nodes, self._book, cap=config.leases.cap, queue=terms.audit_queue(config))
        self._withheld = memory.withheld
        self._drawer = Drawer(
            audit_key=keys.audit_key,
            book=self._book,
            nodes=self._nodes,
            withheld=self._withheld,
            means=memory.means,
            work_tokens=memory.tokens.work,
        )
        self._passes = PassBook(
            run=card.run,
            learner=identity.peer,
            newest_version=lambda: self._versions.head.version,
            admits=self._nodes.is_admitted,
        )
        self._sharing: Sharing | None = None
        self._spread = SpreadBook(
            online=lambda: self._nodes.online(trio.current_time()),
            served_bytes=lambda: self._sharing.seeder.bytes_served if self._sharing is not None else 0,
        )
        self._discipline = Discipline(book=self._book, nodes=self._nodes, ledger=ledger, on_quarantine=self._put_out)
        self._prompts = PromptSource(
            book=self._book,
            prompter=hands.prompter,
            ahead=PROMPTS_AHEAD_STEPS * config.rollouts.groups_per_step,
            most_tokens=config.rollouts.max_prompt_tokens,
        )
        self._scorer = Scorer(
            book=self._book, ledger=ledger, prompter=hands.prompter, sandbox=hands.scorer, limits=answer_limits(config),
            drawer=self._drawer, is_known=lambda peer: self._nodes.record_of(peer).passed > 0,
        )  # fmt: skip
        self._auditor = Auditor(
            thresholds=terms.thresholds(config),
            book=self._book,
            nodes=self._nodes,
            ledger=ledger,
            discipline=self._discipline,
            child=hands.auditor,
            image_of=archive.image_of,
            reaudits=Reaudits(ledger, image_of=archive.image_of, archive=archive, bad=memory.bad),
            audited_tokens=memory.tokens.audited,
            margin_book=margin_book,
            claims=Claims(terms.logprob_limits(config)),
        )
        for peer in self._nodes.quarantined():  # what a kill has interrupted
            self._auditor.look_back(peer)
        self._desk = LeaseDesk(
            terms.lease_terms(config, card=card, keys=keys),
            identity=identity,
            book=self._book,
            nodes=self._nodes,
            versions=self._versions,
            ledger=ledger,
            is_over=lambda: self._is_over,
            shares=self._shares,
            on_heard=lambda node: self._spread.heard(node.peer, version=node.version_held, now=trio.current_time()),
        )
        self._intake = Intake(
            terms.intake_terms(config, card=card, keys=keys),
            book=self._book,
            nodes=self._nodes,
            versions=self._versions,
            ledger=ledger,
            discipline=self._discipline,
            on_accepted=self._scorer.wake,
        )
        self._stepper = Stepper(
            terms.step_plan(config),
            book=self._book,
            ledger=ledger,
            trainer=hands.trainer,
            publisher=publisher,
            versions=self._versions,
            auditor=self._auditor,
            watch=Watch(terms.watch_rules(config), ledger=ledger),
            exports=exports,
            metrics_file=folder / "metrics.jsonl",
            rewind=self._rewind,
        )

    async def run(self, *, on_ready: Callable[[Ready], None], stop: trio.Event) -> Outcome:
        """Open the mesh and work until the run is complete or ``stop`` is set."""
        network = self._config.network
        options = HostOptions(
            key_seed=self._identity.seed,
            listen=network.listen,
            announce=network.announce,
            max_connections=limits.MAX_LEARNER_CONNECTIONS,
            per_block=max(self._config.admission.per_block, limits.MAX_CONNECTIONS_PER_BLOCK),
            rank=self._nodes.rank,
        )
        async with open_mesh(options) as mesh:
            reporter = self._make_reporter(mesh)
            self._sharing = sharing = Sharing(
                mesh,
                store=self._publisher.store,
                passes=self._passes,
                origin=Random(),
                upload_bytes_per_s=network.upload_mbit_s * limits.BYTES_PER_MBIT or None,
            )
            welcome = self._register(mesh, reporter, sharing)
            announcer = Announcer(
                mesh,
                run=self._card.run,
                identity=self._identity,
                sequence=SequenceFile(self._folder / "notice.sequence"),
            )
            await self._stepper.settle()
            async with trio.open_nursery() as nursery:
                await nursery.start(serve_control, control_socket("learner", self._folder), reporter.answer)
                for loop in (self._prompts.run, self._desk.watch, welcome.watch, sharing.run):
                    nursery.start_soon(loop)
                nursery.start_soon(self._scorer.run, self._on_scored)
                nursery.start_soon(self._auditor.run, self._stepper.wake)
                nursery.start_soon(self._announce, announcer)
                nursery.start_soon(self._stop_when, stop)
                on_ready(
                    Ready(run=self._card.run, addresses=mesh.addresses, folder=self._folder, step=self._book.next_step)
                )
                is_complete = await self._stepper.run()
                summary = await self._write_summary()
                if is_complete:
                    self._is_over = True
                    await announcer.notify("ended", text="every step is done")
                    await trio.sleep(FAREWELL_S)
                nursery.cancel_scope.cancel()
        given_up = self._stepper.given_up
        return Outcome(is_complete=is_complete, given_up=given_up, folder=self._folder, summary=summary)

    def _register(self, mesh: Mesh, reporter: RunReporter, sharing: Sharing) -> WelcomeDesk:
        config = self._config
        welcome = WelcomeDesk(
            terms.admission_terms(config),
            card=self._card,
            identity=self._identity,
            mesh=mesh,
            nodes=self._nodes,
            versions=self._versions,
            ledger=self._ledger,
            edges_towards_head=self._publisher.edges_towards_head,
            random=Random(),
            registrations=self._registrations,
        )
        small, large = limits.SMALL_BYTES, limits.TRANSFER_S
        members = welcome.member
        Router(places=LEARNER_PLACES).register(
            mesh,
            _route(streams.HELLO, welcome.hello, limits.HELLO_BYTES, limits.CARD_BYTES, large),
            _route(streams.LEASE, self._desk.lease, limits.LEASE_REQUEST_BYTES, limits.LEASES_BYTES, admit=members),
            _route(streams.RETURN, self._desk.take_back, small, limits.RECEIPT_BYTES, admit=members),
            _route(
                streams.SUBMIT, self._intake.submit, limits.RESULT_BYTES, limits.RECEIPT_BYTES, large, admit=members
            ),
            _route(streams.PEERS, welcome.peers, small, limits.PEERS_BYTES, admit=members),
            _route(streams.EDGES, welcome.edges, small, limits.EDGES_BYTES, admit=members),
            _route(streams.STATUS, reporter.status, small, limits.STATUS_BYTES),
        )
        Router().register(mesh, *sharing.routes())  # of its own: weights must not take the places of work
        return welcome

    def _make_reporter(self, mesh: Mesh) -> RunReporter:
        return RunReporter(
            card=self._card,
            software=self._software,
            steps=self._config.run.steps,
            is_public=self._config.status.public,
            mesh=mesh,
            book=self._book,
            nodes=self._nodes,
            versions=self._versions,
            stepper=self._stepper,
            auditor=self._auditor,
            head_bytes=self._head_bytes,
            spread=lambda now: self._spread.status(now=now),
            trust=lambda: trust_status(
                book=self._book, auditor=self._auditor, drawer=self._drawer, queue=terms.audit_queue(self._config)
            ),
            withheld=lambda peer: self._withheld.judge(peer).words,
            troubles=lambda: (
                self._ledger.trouble, self._stepper.trouble, self._prompts.waiting_for, self._scorer.waiting_for,
                self._auditor.waiting_for,
            ),
            children=self._hands.states,
        )  # fmt: skip

    def _head_bytes(self) -> int:
        header = self._publisher.header
        return 0 if header is None else header.manifest_bytes + header.payload_bytes

    async def _rewind(self, step: int) -> None:
        """Bring book, versions and head to the checkpoint of ``step``, which the trainer has opened."""
        now = trio.current_time()
        found = await restore.rewind(self._ledger, self._book, self._versions, step=step, now=now)
        # Nodes whose quarantine began while the book knew nothing:
        void = [self._book.void_node(peer, now=now) for peer in self._nodes.quarantined()]
        await self._ledger.commit(*(statement for statements in void for statement in statements))
        self._auditor.reaudits.undo(step)
        self._scorer.wake()
        self._auditor.wake()
        newest = found.published[-1]
        if newest.is_orphaned or newest.head.step != step:
            await self._stepper.publish_now(step)

    def _put_out(self, peer: str) -> None:
        """A node's quarantine begins."""
        self._passes.revoke(peer)
        self._auditor.look_back(peer)

    def _on_scored(self) -> None:
        self._auditor.wake()
        self._stepper.wake()

    async def _announce(self, announcer: Announcer) -> None:
        """Gossip every new head; nodes that miss it learn of it from the next answer."""
        known = 0
        while True:
            head = await self._versions.wait_published(known + 1)
            known = head.version
            header = self._publisher.header
            if header is not None:
                # Who has the base model at home fetches nothing of an anchor: what it takes is known of patches only.
                num_bytes = self._head_bytes() if header.parent is not None else 0
                self._spread.published(head.version, num_bytes=num_bytes, now=trio.current_time())
                await announcer.announce(header)

    async def _stop_when(self, stop: trio.Event) -> None:
        await stop.wait()
        self._stepper.stop()

    async def _write_summary(self) -> RunSummary:
        summary = await summarise(
            self._ledger,
            run=self._card.run,
            full_bytes=self._card.layout.image_bytes,
            bubble_fraction=self._stepper.clock.bubble_fraction,
            checkpoint=self._stepper.checkpoint,
        )
        await trio.to_thread.run_sync(write_summary, summary, self._folder / "summary.json")
        return summary


def _route(
    protocol: str,
    handle: Handle,
    request_bytes: int,
    answer_bytes: int,
    deadline_s: float = limits.REQUEST_S,
    *,
    admit: Callable[[str], object] | None = None,
) -> Route:
    return Route(
        protocol=protocol,
        request_bytes=request_bytes,
        answer_bytes=answer_bytes,
        handle=handle,
        deadline_s=deadline_s,
        admit=admit,
    )
