"""A small learner for tests: speaks every stream over a real mesh, trains nothing, and misbehaves when it is told to.

It keeps what a test wants to look at (leases given, results received, leases returned) in plain lists. Weights are
published as anchors, so that no patch has to be made. An honest one refuses what a real learner would refuse at intake
(signature, form, sample set); rewards, audits and standing are not its business.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
import trio
from blake3 import blake3

from rollmesh_peer.mesh.announcements import Announcer, SequenceFile
from rollmesh_peer.mesh.requests import Handle, Route, Router
from rollmesh_peer.mesh.seam import Mesh
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.have import HaveExchange
from rollmesh_peer.weights.passes import PassBook
from rollmesh_peer.weights.seeding import Seeder
from rollmesh_protocol import limits, streams
from rollmesh_protocol.envelope import Envelope, seal
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.layout import ITEM_BYTES, Layout
from rollmesh_protocol.lease import LEASE_ID_BYTES, Lease, LeasedSample, seed_of
from rollmesh_protocol.manifest import RAW_CODEC, Edge, Manifest, manifest_name
from rollmesh_protocol.messages import (
    EdgesAnswer,
    EdgesRequest,
    Head,
    Hello,
    LeaseAnswer,
    LeaseRequest,
    Pass,
    PeersAnswer,
    PeersRequest,
    PolicyHeader,
    Receipt,
    ReturnAnswer,
    ReturnRequest,
    RunCard,
    Standing,
    Wait,
    Welcome,
)
from rollmesh_protocol.rollout import Result, check_result
from rollmesh_protocol.status import RunStatus, StatusAnswer, StatusRequest, TrustStatus

QUOTA_BYTES: Final = 64 * limits.MIB
SEED_KEY: Final = b"fake learner's 32-byte seed key."
NO_ROOT: Final = bytes(32)

NEW: Final = Standing(state="new", accepted=0, rejected=0, audited=0, reason="")


@dataclass(kw_only=True)
class Script:
    """How the learner behaves; a test changes it while it runs."""

    wait: Wait | None = None
    """Answer requests for work with this instead of leases."""
    refusal: Refused | None = None
    """Refuse requests for work with this."""
    hello_refusal: Refused | None = None
    """Refuse to admit anybody with this."""
    samples: int = 4
    max_new_tokens: int = 16
    prompt: bytes = np.arange(3, 8, dtype="<u4").tobytes()
    duration_s: float = 600.0
    most_open: int = 1_000_000
    """Leases that one node may hold at a time."""
    alter_lease: Callable[[Lease], Lease] = lambda lease: lease
    lease_signer: Identity | None = None
    """Another key to sign leases with."""
    card_bytes: bytes | None = None
    """Another sealed card to show."""
    lose_receipts: int = 0
    """So many receipts are recorded and then not sent."""
    standing: Standing = NEW


@dataclass(kw_only=True)
class Heard:
    """What nodes have said so far."""

    hellos: list[Hello] = field(default_factory=list)
    requests: list[LeaseRequest] = field(default_factory=list)
    returned: list[tuple[bytes, str]] = field(default_factory=list)
    """Lease id and code of every lease that came back."""
    submitted: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Lease id and sealed bytes of every result, repeats included."""
    accepted: list[bytes] = field(default_factory=list)
    """Lease ids whose results were accepted, once each."""


class FakeLearner:
    """Serves ``card`` on ``mesh``. Run :meth:`run` in a nursery; publish at least once before nodes can work."""

    def __init__(self, mesh: Mesh, *, identity: Identity, card: RunCard, folder: Path) -> None:
        self.mesh = mesh
        self.card = card
        self.script = Script()
        self.heard = Heard()
        self.head = Head(version=0, step=0, root=card.model.base_root)
        self.leases: dict[bytes, Lease] = {}
        self.open: set[bytes] = set()
        """Leases without a result, not returned."""
        self.changed = trio.Event()
        self._identity = identity
        self._edges: list[Edge] = []
        self._receipts: dict[bytes, tuple[bytes, bytes]] = {}
        self._groups = 0
        self._admitted: set[str] = set()
        self._store = EdgeStore(
            folder / "edges", run=card.run, learner=card.learner, layout=card.layout, quota_bytes=QUOTA_BYTES
        )
        passes = PassBook(
            run=card.run,
            learner=card.learner,
            newest_version=lambda: self.head.version,
            admits=lambda peer: peer in self._admitted,
        )
        self._exchange = HaveExchange(mesh, store=self._store, passes=passes, admission=lambda: None)
        self._seeder = Seeder(store=self._store, passes=passes)
        self._announcer = Announcer(
            mesh, run=card.run, identity=identity, sequence=SequenceFile(folder / "notice.sequence")
        )
        self._folder = folder

    async def run(self) -> None:
        """Answer until cancelled."""
        router = Router()
        router.register(self.mesh, *self._seeder.routes(), self._exchange.route(), *self._routes())
        await self._exchange.run()

    async def until(self, condition: Callable[[FakeLearner], bool]) -> None:
        """Return once ``condition`` holds; looked at after every message."""
        while not condition(self):
            await self.changed.wait()

    # --- what a test does --------------------------------------------------------------------------------------------
    async def publish(self, image: bytes, *, version: int | None = None) -> bytes:
        """Publish ``image`` (``layout.image_bytes`` long) as an anchor under the next version; its root."""
        version = self.head.version + 1 if version is None else version
        manifest = make_anchor(image, run=self.card.run, layout=self.card.layout, version=version)
        envelope = seal(manifest.encode(), run=self.card.run, kind="manifest", identity=self._identity).encode()
        name = manifest_name(envelope)
        payload = self._folder / f"anchor-{version}"
        payload.write_bytes(image)
        self._store.add_manifest(name, envelope, payload=payload)
        self._edges.append(
            Edge(
                kind="anchor", version=version, step=version, parent=None, root=manifest.root, manifest=name,
                manifest_bytes=len(envelope), payload_bytes=manifest.payload_bytes,
            )
        )  # fmt: skip
        self.head = Head(version=version, step=version, root=manifest.root)
        await self._announcer.announce(
            PolicyHeader(
                version=version, step=version, root=manifest.root, parent=None, manifest=name,
                manifest_bytes=len(envelope), payload_bytes=manifest.payload_bytes,
            )
        )  # fmt: skip
        return manifest.root

    def forget(self, peer: str) -> None:
        """Know nothing of ``peer`` any more, as after a restart."""
        self._admitted.discard(peer)

    async def notify(self, kind: Literal["pause", "resume", "drain", "ended"], *, text: str = "") -> None:
        """Send a notice; after ``ended`` requests for work are refused too, as gossip may be lost."""
        if kind == "ended":
            self.script.refusal = Refused("run.ended", text)
        await self._announcer.notify(kind, text=text)

    # --- streams -----------------------------------------------------------------------------------------------------
    def _routes(self) -> tuple[Route, ...]:
        table = (
            (streams.HELLO, limits.HELLO_BYTES, limits.CARD_BYTES, self._hello),
            (streams.LEASE, limits.LEASE_REQUEST_BYTES, limits.LEASES_BYTES, self._lease),
            (streams.SUBMIT, limits.RESULT_BYTES, limits.RECEIPT_BYTES, self._submit),
            (streams.RETURN, limits.SMALL_BYTES, limits.SMALL_BYTES, self._take_back),
            (streams.EDGES, limits.SMALL_BYTES, limits.EDGES_BYTES, self._tell_edges),
            (streams.PEERS, limits.SMALL_BYTES, limits.PEERS_BYTES, self._peers),
            (streams.STATUS, limits.SMALL_BYTES, limits.STATUS_BYTES, self._status),
        )
        return tuple(
            Route(protocol=protocol, request_bytes=request, answer_bytes=answer, handle=self._noting(handle))
            for protocol, request, answer, handle in table
        )

    def _noting(self, handle: Callable[[str, bytes], bytes]) -> Handle:
        async def noted(peer: str, request: bytes) -> bytes:
            await trio.lowlevel.checkpoint()
            try:
                return handle(peer, request)
            finally:
                self.changed.set()
                self.changed = trio.Event()

        return noted

    def _hello(self, peer: str, request: bytes) -> bytes:
        self.heard.hellos.append(Hello.decode(request, limit=limits.HELLO_BYTES))
        if self.script.hello_refusal is not None:
            raise self.script.hello_refusal
        self._admitted.add(peer)
        card = seal(self.card.encode(), run=self.card.run, kind="card", identity=self._identity).encode()
        issued = Pass(peer=peer, issued_version=self.head.version)
        admission = seal(issued.encode(), run=self.card.run, kind="pass", identity=self._identity).encode()
        return Welcome(card=self.script.card_bytes or card, admission=admission, head=self.head).encode()

    def _lease(self, peer: str, request: bytes) -> bytes:
        self._require(peer)
        asked = LeaseRequest.decode(request, limit=limits.LEASE_REQUEST_BYTES)
        self.heard.requests.append(asked)
        if self.script.refusal is not None:
            raise self.script.refusal
        wait = self.script.wait
        sealed: list[bytes] = []
        if asked.groups and wait is None:
            if asked.root_held != self.head.root:
                wait = Wait(seconds=0.2, why=f"work needs version {self.head.version}")
            else:
                room = max(0, self.script.most_open - len(self.open))
                sealed = [self._make_lease(peer) for _ in range(min(asked.groups, room))]
                wait = None if sealed else Wait(seconds=0.2, why="enough is on its way")
        return LeaseAnswer(head=self.head, leases=tuple(sealed), wait=wait, standing=self.script.standing).encode()

    def _make_lease(self, peer: str) -> bytes:
        self._groups += 1
        script = self.script
        lease = script.alter_lease(
            Lease(
                lease_id=secrets.token_bytes(LEASE_ID_BYTES),
                node=peer,
                group=self._groups,
                samples=tuple(
                    LeasedSample(
                        index=index, seed=seed_of(SEED_KEY, run=self.card.run, group=self._groups, sample=index)
                    )
                    for index in range(script.samples)
                ),
                version=self.head.version,
                step=self.head.step,
                root=self.head.root,
                prompt=script.prompt,
                max_new_tokens=script.max_new_tokens,
                temperature=1.0,
                duration_s=script.duration_s,
                swap_mode="drain",
            )
        )
        self.leases[lease.lease_id] = lease
        self.open.add(lease.lease_id)
        signer = script.lease_signer or self._identity
        return seal(lease.encode(), run=self.card.run, kind="lease", identity=signer).encode()

    def _submit(self, peer: str, request: bytes) -> bytes:
        self._require(peer)
        body = Envelope.decode(request, limit=limits.RESULT_BYTES).open(run=self.card.run, kind="result", signer=peer)
        result = Result.decode(body, limit=limits.RESULT_BYTES, code="result.schema")
        self.heard.submitted.append((result.lease_id, request))
        digest = blake3(body).digest()
        lease = self.leases.get(result.lease_id)
        if lease is None:
            raise Refused("lease.unknown")
        known = self._receipts.get(lease.lease_id)
        if known is not None and known[0] != digest:
            raise Refused("lease.reused")
        if known is None:
            self._receipts[lease.lease_id] = digest, self._decide(lease, result)
        if self.script.lose_receipts:
            self.script.lose_receipts -= 1
            raise Refused("request.internal", "the receipt got lost on purpose")
        return self._receipts[lease.lease_id][1]

    def _decide(self, lease: Lease, result: Result) -> bytes:
        code, detail, accepted = None, "", tuple(sample.index for sample in lease.samples)
        try:
            stop_tokens = frozenset(self.card.stop_tokens)
            swaps = [(edge.version, edge.root) for edge in self._edges]
            check_result(result, lease, vocabulary=self.card.vocabulary, stop_tokens=stop_tokens, swaps=swaps)
            self.heard.accepted.append(lease.lease_id)
        except Refused as refusal:
            code, detail, accepted = refusal.code, refusal.detail, ()
        self.open.discard(lease.lease_id)
        return Receipt(
            lease_id=lease.lease_id, accepted=accepted, code=code, detail=detail, head=self.head,
            standing=self.script.standing,
        ).encode()  # fmt: skip

    def _take_back(self, peer: str, request: bytes) -> bytes:
        self._require(peer)
        asked = ReturnRequest.decode(request, limit=limits.SMALL_BYTES)
        self.heard.returned += [(lease_id, asked.code) for lease_id in asked.lease_ids]
        returned = self.open & set(asked.lease_ids)
        self.open -= returned
        return ReturnAnswer(returned=len(returned), head=self.head).encode()

    def _tell_edges(self, peer: str, request: bytes) -> bytes:
        self._require(peer)
        EdgesRequest.decode(request, limit=limits.SMALL_BYTES)
        return EdgesAnswer(head=self.head, edges=tuple(self._edges[-8:])).encode()

    def _peers(self, peer: str, request: bytes) -> bytes:
        self._require(peer)
        PeersRequest.decode(request, limit=limits.SMALL_BYTES)
        return PeersAnswer(peers=(), head=self.head).encode()

    def _status(self, peer: str, request: bytes) -> bytes:
        del peer
        StatusRequest.decode(request, limit=limits.SMALL_BYTES)
        run = RunStatus(
            run=self.card.run, name=self.card.name, learner=self.card.learner, software="fake", state="scripted",
            head=self.head, head_bytes=0, model_bytes=0, spread=(), step=self.head.step, steps=0, mean_reward=None,
            groups_leased=len(self.open), groups_ready=0, rollouts_accepted=len(self.heard.accepted),
            rollouts_rejected=0, audits_done=0, audits_failed=0, trust=_NO_TRUST, bubble_fraction=0.0, uptime_s=0.0,
            children=(), peers=(), page=0, pages=1,
        )  # fmt: skip
        return StatusAnswer(run=run, node=None).encode()

    def _require(self, peer: str) -> None:
        if peer not in self._admitted:
            raise Refused("node.not_admitted")


_NO_TRUST = TrustStatus(
    audits_waiting=0, audits_most=0, audited_tokens=0, work_tokens=0, steady_audited_tokens=0, steady_work_tokens=0,
    consumed_bad=0, consumed_bad_steps=(), reaudits_waiting=0, over_cap=0, lengths=(),
)  # fmt: skip


def make_anchor(image: bytes, *, run: str, layout: Layout, version: int) -> Manifest:
    """The manifest of ``image`` as an anchor."""
    tensors = tuple(
        blake3(image[offset : offset + tensor.elements * ITEM_BYTES[tensor.dtype]]).digest()
        for offset, tensor in zip(layout.offsets, layout.tensors, strict=True)
    )
    chunk_bytes = limits.MIN_CHUNK_BYTES
    chunks = [blake3(image[start : start + chunk_bytes]).digest() for start in range(0, len(image), chunk_bytes)]
    return Manifest(
        run=run, version=version, step=version, kind="anchor", parent=None, root=layout.root(tensors),
        codec=RAW_CODEC, layout=layout.digest, chunk_bytes=chunk_bytes, payload_bytes=len(image),
        chunks=b"".join(chunks), tensors=b"".join(tensors),
    )  # fmt: skip
