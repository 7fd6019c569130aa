"""Wires one node process: key, control socket, mesh, membership, weights, engine and worker, in this order.

    Stop <- signals, notices                     NodeReport <- everything, -> control socket, status stream
    Membership --card, pass--> NodeWeights --views--> Generator --results--> Spool --> Submitter --> (learner)
                                    \\--Verified--> Worker <--events-- Generator        Worker --> (learner)

The invariant between them: nothing is downloaded before the card has passed the volunteer's limits, nothing is
generated with weights that the keeper has not verified, and nothing that was generated is forgotten before its receipt.
Nobody imports this module but the command line.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import trio

from rollmesh_node.base_model import adopt_base_model
from rollmesh_node.capacity import AHEAD, Capacity
from rollmesh_node.config import NodeConfig
from rollmesh_node.engine_setting import choose_engine, share_engines
from rollmesh_node.engines import Engines
from rollmesh_node.generator import EngineSetting
from rollmesh_node.introduction import Introduction, own_limits
from rollmesh_node.joining import Membership
from rollmesh_node.journal import JOURNAL, Journal
from rollmesh_node.narration import narrate
from rollmesh_node.pausing import PAUSED, OwnersPause
from rollmesh_node.places import KEY
from rollmesh_node.report import NodeReport
from rollmesh_node.spool import Spool
from rollmesh_node.stopping import GRACE_S, RECEIPTS_S, Stop
from rollmesh_node.submitting import Submitter, Tally
from rollmesh_node.uplink import Uplink
from rollmesh_node.weights import NodeWeights, open_weights
from rollmesh_peer.control import serve_control
from rollmesh_peer.folders import control_socket, models_folder
from rollmesh_peer.keys import hold_key
from rollmesh_peer.logging_setup import event
from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_peer.mesh.join import JoinLine
from rollmesh_peer.mesh.keeping import LinkKeeper
from rollmesh_peer.mesh.peer_cache import PeerCache
from rollmesh_peer.mesh.requests import Route, Router
from rollmesh_peer.mesh.seam import Mesh
from rollmesh_protocol import limits, streams
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.messages import Notice, RunCard

SOFTWARE: Final = f"rollmesh {metadata.version('rollmesh')}"

_log = logging.getLogger(__name__)


async def run_node(config: NodeConfig, *, join: JoinLine, folder: Path, environ: Mapping[str, str]) -> None:
    """Take part in the run behind ``join`` until it ends or the process is asked to stop.

    Raises:
        HostError: the key is in use, a port is busy, the model does not fit into memory, the disk fails.
        Refused: the learner does not admit this node, or asks for more than it gives.
    """
    with hold_key(folder / KEY) as identity:
        stop = Stop()
        pause = OwnersPause(folder / PAUSED)
        report = NodeReport(
            peer=identity.peer, name=config.node.name, software=SOFTWARE, learner=join.learner, pause=pause
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(stop.listen)
            await nursery.start(serve_control, control_socket("node", folder), report.answer, pause.obey)
            node = _Node(
                config,
                join=join,
                folder=folder,
                environ=environ,
                identity=identity,
                stop=stop,
                report=report,
                pause=pause,
            )
            await node.take_part()
            nursery.cancel_scope.cancel()
        tally = report.submitter.tally if report.submitter is not None else Tally()
        event(_log, "stopped", reason=stop.reason, accepted=tally.accepted, rejected=tally.rejected)


@dataclass(frozen=True, kw_only=True)
class _Member:
    """What there is once the learner has admitted us."""

    mesh: Mesh
    router: Router
    uplink: Uplink
    membership: Membership
    cache: PeerCache
    folder: Path


class _Node:
    """One node, from its first dial to its last receipt."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        join: JoinLine,
        folder: Path,
        environ: Mapping[str, str],
        identity: Identity,
        stop: Stop,
        report: NodeReport,
        pause: OwnersPause,
    ) -> None:
        self._config = config
        self._join = join
        self._folder = folder
        self._environ = environ
        self._identity = identity
        self._stop = stop
        self._report = report
        self._pause = pause
        self._engine = choose_engine(config.engine, environ=environ) if config.node.role == "worker" else None
        self._own = own_limits(config)

    async def take_part(self) -> None:
        """Join and work. Returns after a polite stop, or when the run has ended."""
        network = self._config.network
        options = HostOptions(
            key_seed=self._identity.seed,
            listen=() if network.learner_only else network.listen,
            max_connections=network.max_connections,
        )
        async with open_mesh(options) as mesh, trio.open_nursery() as nursery:
            nursery.start_soon(narrate, self._report)
            with trio.CancelScope() as life:
                nursery.start_soon(self._end_life, life)
                await self._join_and_work(mesh, nursery)
            nursery.cancel_scope.cancel()

    async def _end_life(self, life: trio.CancelScope) -> None:
        """After the request to stop: end at once what has no work, and everything else after its deadline."""
        await self._stop.asked.wait()
        if self._report.worker is None:
            life.cancel()
            return
        self._report.doing = "nothing: stopping"
        life.deadline = trio.current_time() + GRACE_S + 2 * RECEIPTS_S
        self._report.worker.stop(grace_s=GRACE_S)

    async def _join_and_work(self, mesh: Mesh, nursery: trio.Nursery) -> None:
        report = self._report
        cache = PeerCache(self._folder / "peers.json")
        known = [str(address) for address in self._join.addresses]
        more = [address for address in self._config.network.bootstrap if address not in known]
        link = LinkKeeper(mesh, [*known, *(a for a in more if a.endswith(f"/{self._join.learner}"))], cache=cache)
        nursery.start_soon(link.run)
        nursery.start_soon(_dial_others, mesh, cache, [a for a in more if not a.endswith(f"/{self._join.learner}")])
        report.uplink = uplink = Uplink(mesh, link)
        router = Router()
        router.register(mesh, _status_route(report))
        introduction = Introduction(
            config=self._config,
            software=SOFTWARE,
            folder=self._folder,
            own=self._own,
            engine=self._engine,
            invite=self._join.invite,
            addresses=lambda: mesh.addresses,
        )
        report.membership = membership = Membership(
            uplink, node=self._identity.peer, hello=introduction.hello, check=introduction.check, pin=introduction.pin
        )
        report.doing = "admission to the run"
        try:
            card = await membership.join()
        except Refused as refusal:
            if refusal.code != "run.ended":
                raise
            self._ended(refusal.detail)
            return
        report.run = card.run
        introduction.show(card)
        nursery.start_soon(self._keep_membership, membership)
        folder = introduction.run_folder(card)
        await self._work(
            _Member(mesh=mesh, router=router, uplink=uplink, membership=membership, cache=cache, folder=folder)
        )

    async def _keep_membership(self, membership: Membership) -> None:
        try:
            await membership.keep()
        except Refused as refusal:
            if refusal.code != "run.ended":
                raise
            self._ended(refusal.detail)

    # --- working -----------------------------------------------------------------------------------------------------
    async def _work(self, member: _Member) -> None:
        ram_folder = self._config.weights.ram_folder
        self._report.doing = "the weights on disk"
        async with open_weights(
            member.mesh,
            router=member.router,
            card=member.membership.card,
            folder=member.folder,
            ram_folder=Path(ram_folder) if ram_folder else None,
            own=self._own,
            learner_only=self._config.network.learner_only,
            upload_bytes_per_s=self._config.network.upload_mbit_s * limits.BYTES_PER_MBIT or None,
            admission=lambda: member.membership.admission,
            cache=member.cache,
            on_notice=self._on_notice,
        ) as weights:
            self._report.weights = weights
            await self._begin_weights(weights, member)
            member.uplink.listen(weights.follower.hear_head)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(weights.run)
                if self._engine is None:
                    self._report.doing = ""
                    await self._stop.asked.wait()
                else:
                    await self._generate(weights, member, self._engine)
                nursery.cancel_scope.cancel()

    async def _begin_weights(self, weights: NodeWeights, member: _Member) -> None:
        """What is on disk from the last time, else the base model if it is at hand."""
        await weights.keeper.restore()
        if weights.keeper.root is not None:
            return
        self._report.doing = "the base model"
        await adopt_base_model(
            weights.keeper,
            card=member.membership.card,
            chosen=self._config.weights.base,
            cache=models_folder(environ=self._environ),
            folder=member.folder,
            own=self._own,
            environ=self._environ,
        )

    async def _generate(self, weights: NodeWeights, member: _Member, engine: EngineSetting) -> None:
        report, card = self._report, member.membership.card
        spool = await trio.to_thread.run_sync(Spool, member.folder / "results")
        journal = Journal(self._folder / JOURNAL, run=card.run, learner=card.learner)
        submitter = Submitter(
            uplink=member.uplink,
            membership=member.membership,
            spool=spool,
            on_receipt=lambda: engines.workforce.receipt_came(),  # noqa: PLW0108 - made below
            journal=journal,
        )
        settings = share_engines(engine, self._config.engine, card=card, environ=self._environ)
        engines = Engines(
            settings,
            self._capacity(card),
            identity=self._identity,
            own=self._own,
            uplink=member.uplink,
            membership=member.membership,
            keeper=weights.keeper,
            spool=spool,
            journal=journal,
            folder=self._folder,
            pause=self._pause,
            on_result=submitter.notify,
            on_ended=self._ended,
        )
        for setting in settings:
            event(_log, "engine chosen", backend=setting.declared.backend, gpus=setting.name or "-", why=setting.why)
        report.worker, report.submitter = engines.workforce, submitter
        report.generators = engines.generators
        report.doing = ""
        async with trio.open_nursery() as sending:
            sending.start_soon(submitter.run)
            sending.start_soon(journal.run, lambda: engines.workforce.standing or submitter.tally.standing)
            await engines.run()
            with trio.move_on_after(RECEIPTS_S):
                await submitter.wait_empty()
            if submitter.unsent:
                event(_log, "results without a receipt are kept and sent the next time", results=submitter.unsent)
            sending.cancel_scope.cancel()

    def _capacity(self, card: RunCard) -> Capacity:
        """Of the groups in hand as many are in the engine as leave room for those that wait for a place."""
        groups = self._config.limits.groups_at_once
        size_of_group = card.limits.samples_per_group
        return Capacity(
            batch_samples=min(self._config.engine.max_batch_samples, size_of_group * max(1, int(groups / AHEAD))),
            groups=groups,
            group_samples=size_of_group,
        )

    # --- the learner's word ------------------------------------------------------------------------------------------
    def _on_notice(self, notice: Notice) -> None:
        if self._report.worker is not None:
            self._report.worker.notice(notice)
        elif notice.kind == "ended":
            self._ended(notice.text)

    def _ended(self, text: str) -> None:
        if self._stop.asked.is_set():
            return
        event(_log, "the run has ended; thank you for taking part", why=text)
        self._stop.ask("the run has ended")


async def _dial_others(mesh: Mesh, cache: PeerCache, addresses: list[str]) -> None:
    """Dial the configured addresses of peers other than the learner once; those that answer are remembered."""
    for address in addresses:
        try:
            await mesh.connect(address)
        except LinkLost as error:
            event(_log, "a configured peer does not answer", address=address, why=error.detail)
        else:
            cache.remember(address)


def _status_route(report: NodeReport) -> Route:
    return Route(
        protocol=streams.STATUS,
        request_bytes=limits.SMALL_BYTES,
        answer_bytes=limits.STATUS_BYTES,
        handle=report.serve,
    )
