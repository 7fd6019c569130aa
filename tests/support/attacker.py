"""A node that does not keep to the rules, in the test's own process: a real mesh, real signatures, real weights.

An attacker speaks the protocol as well as any node, so it can be honest up to one point and cheat there. Leases that it
still holds at the end go back, so that the run it attacks goes on at once. The honest engine is :class:`Studio`: it
follows the head as a node does, and draws any completion under any of the weights it has seen.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import trio

from rollmesh_node.joining import open_card
from rollmesh_node.own_limits import OwnLimits
from rollmesh_node.weights import NodeWeights, open_weights
from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_peer.mesh.join import JoinLine
from rollmesh_peer.mesh.peer_cache import PeerCache
from rollmesh_peer.mesh.requests import Router, ask
from rollmesh_peer.mesh.seam import Mesh
from rollmesh_protocol import limits, streams
from rollmesh_protocol.envelope import Envelope, Kind, seal
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import (
    MAJOR,
    EngineInfo,
    Head,
    Hello,
    LeaseAnswer,
    LeaseRequest,
    Receipt,
    ReturnAnswer,
    ReturnRequest,
    RunCard,
    Welcome,
)
from rollmesh_protocol.rollout import Result, SampleResult, Segment

PATIENCE_S = 120.0
PLAIN_TOKEN = 65
"""The letter A of the tiny model: never a stop token."""

_serial = itertools.count(1)


@dataclass
class Attacker:
    """One identity and its conversation with the learner."""

    identity: Identity
    mesh: Mesh
    learner: str
    invite: bytes | None = None
    welcome: Welcome | None = None
    card: RunCard | None = None
    head: Head | None = None
    held: dict[bytes, Lease] = field(default_factory=dict)
    """Leases that were given to it and are still open, as far as it knows."""

    @property
    def peer(self) -> str:
        return self.identity.peer

    # --- requests ----------------------------------------------------------------------------------------------------
    async def ask(self, protocol: str, request: bytes, *, deadline_s: float = PATIENCE_S) -> bytes:
        """Any bytes to any protocol of the learner; the refusal is raised."""
        return await ask(
            self.mesh, self.learner, protocol, request, answer_bytes=limits.LEASES_BYTES, deadline_s=deadline_s
        )

    async def hello(self, **changes: object) -> Welcome:
        fields: dict[str, object] = {
            "majors": (MAJOR,), "software": "attacker", "name": f"attacker-{next(_serial)}", "role": "worker",
            "engine": EngineInfo(backend="transformers", dtype="bfloat16", device="cpu"), "addresses": (),
            "invite": self.invite,
        }  # fmt: skip
        raw = await self.ask(streams.HELLO, Hello(**(fields | changes)).encode())
        self.welcome = Welcome.decode(raw, limit=limits.CARD_BYTES)
        self.card = open_card(self.welcome.card, learner=self.learner)
        self.head = self.welcome.head
        return self.welcome

    async def request_work(self, groups: int = 1, *, root: bytes | None = None) -> LeaseAnswer:
        """One lease request, under the newest weights it has heard of unless ``root`` says otherwise."""
        assert self.head is not None
        request = LeaseRequest(
            groups=groups, version_held=self.head.version, root_held=root or self.head.root, tokens_per_s=1e6,
            waiting_for="",
        )  # fmt: skip
        answer = LeaseAnswer.decode(await self.ask(streams.LEASE, request.encode()), limit=limits.LEASES_BYTES)
        self.head = answer.head
        for lease in map(self.open_lease, answer.leases):
            self.held[lease.lease_id] = lease
        return answer

    async def take_leases(self, groups: int = 1, *, root: Callable[[], bytes] | None = None) -> list[Lease]:
        """Ask until the learner gives something."""
        with trio.fail_after(PATIENCE_S):
            while True:
                answer = await self.request_work(groups, root=root() if root else None)
                if answer.leases:
                    return [self.open_lease(sealed) for sealed in answer.leases]
                await trio.sleep(0.1)

    async def take_lease(self, *, root: Callable[[], bytes] | None = None) -> Lease:
        return (await self.take_leases(root=root))[0]

    def open_lease(self, sealed: bytes) -> Lease:
        assert self.card is not None
        body = Envelope.decode(sealed, limit=limits.LEASES_BYTES).open(
            run=self.card.run, kind="lease", signer=self.learner
        )
        return Lease.decode(body, limit=limits.LEASES_BYTES)

    def seal(self, body: bytes, *, run: str | None = None, kind: Kind = "result", by: Identity | None = None) -> bytes:
        assert self.card is not None
        return seal(body, run=run or self.card.run, kind=kind, identity=by or self.identity).encode()

    async def submit(self, result: Result) -> Receipt:
        """An honest envelope around any result."""
        return await self.send(self.seal(result.encode()))

    async def send(self, sealed: bytes) -> Receipt:
        """Any bytes as a result."""
        receipt = Receipt.decode(await self.ask(streams.SUBMIT, sealed), limit=limits.RECEIPT_BYTES)
        self.held.pop(receipt.lease_id, None)
        return receipt

    async def give_back(self, leases: Sequence[Lease], *, code: str = "node.stopping") -> int:
        request = ReturnRequest(lease_ids=tuple(lease.lease_id for lease in leases), code=code)
        answer = ReturnAnswer.decode(await self.ask(streams.RETURN, request.encode()), limit=limits.SMALL_BYTES)
        for lease in leases:
            self.held.pop(lease.lease_id, None)
        return answer.returned

    async def refusal(self, protocol: str, request: bytes) -> str:
        """The code with which the learner refuses ``request``; a pass is an error of the learner."""
        try:
            await self.ask(protocol, request)
        except Refused as refused:
            return refused.code
        raise AssertionError(f"{protocol} took {request[:40]!r}")

    async def leave(self) -> None:
        """Give back what is held, if the learner still listens to us."""
        with trio.move_on_after(5), contextlib.suppress(Refused, LinkLost):
            for lease in list(self.held.values()):
                await self.give_back([lease])


@asynccontextmanager
async def open_attacker(
    join: str, *, identity: Identity | None = None, hello: bool = True, gossip: bool = False
) -> AsyncIterator[Attacker]:
    """A fresh identity, linked to the learner of the join line; with ``hello`` it is a member of the run."""
    line = JoinLine.parse(join)
    identity = identity or Identity(secrets.token_bytes(32))
    async with open_mesh(HostOptions(key_seed=identity.seed, gossip=gossip)) as mesh:
        await mesh.connect(str(line.addresses[0]))
        attacker = Attacker(identity, mesh, line.learner, invite=line.invite)
        if hello:
            await attacker.hello()
        try:
            yield attacker
        finally:
            with trio.CancelScope(shield=True):
                await attacker.leave()


# --- results ---------------------------------------------------------------------------------------------------------
def sample_of(
    lease: Lease,
    index: int,
    *,
    tokens: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    finish: str = "length",
    segments: tuple[Segment, ...] | None = None,
) -> SampleResult:
    """One completion of a lease: by default as many letters as it allows, which every cheap check lets through."""
    made = np.asarray([PLAIN_TOKEN] * lease.max_new_tokens if tokens is None else tokens, "<u4")
    said = np.full(len(made), -1.0, "<f4") if logprobs is None else np.asarray(logprobs, "<f4")
    return SampleResult(
        index=index, tokens=made.tobytes(), logprobs=said.tobytes(), finish=finish,
        segments=segments or (Segment(first_token=0, root=lease.root),),
    )  # fmt: skip


def result_of(lease: Lease, samples: Sequence[SampleResult] | None = None, **changes: object) -> Result:
    """A result that passes every cheap check, but for ``samples`` and ``changes``."""
    made = [sample_of(lease, sample.index) for sample in lease.samples] if samples is None else samples
    fields = {"lease_id": lease.lease_id, "samples": tuple(made), "engine": "attacker", "generate_s": 0.1}
    return Result(**(fields | changes))


# --- real work -------------------------------------------------------------------------------------------------------
@dataclass
class Studio:
    """Weights as a node has them, and the engine's own code: honest work, and work that is honest but for one thing."""

    card: RunCard
    weights: NodeWeights
    folder: Path
    images: dict[bytes, Path] = field(default_factory=dict)
    """A copy of each image that was at the head, by root; in order of their versions."""
    _backend: object = None
    _one_at_a_time: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))

    async def watch(self) -> None:
        """Copy every version that becomes the head, until cancelled."""
        root: bytes | None = None
        while True:
            root = (await self.weights.keeper.wait_changed(root)).root
            async with self.weights.keeper.reading(deadline_s=PATIENCE_S) as view:
                copy = self.folder / f"{view.version}.image"
                shutil.copyfile(view.image, copy)
                self.images[view.root] = copy
                root = view.root

    @property
    def newest(self) -> bytes:
        """The root of the newest weights at hand."""
        return next(reversed(self.images))

    @property
    def oldest(self) -> bytes:
        """The root of the first weights that were seen: the base model, for whoever came first."""
        return next(iter(self.images))

    async def wait_for(self, versions: int) -> None:
        """Until so many versions were seen."""
        with trio.fail_after(PATIENCE_S):
            while len(self.images) < versions:
                await trio.sleep(0.05)

    async def draw(
        self,
        lease: Lease,
        *,
        root: bytes | None = None,
        prompt: np.ndarray | None = None,
        seed_shift: int = 0,
        edit: Callable[[np.ndarray], np.ndarray] = lambda tokens: tokens,
        **changes: object,
    ) -> Result:
        """The lease's work, honest but for what is changed."""
        rollouts = await trio.to_thread.run_sync(
            partial(self._generate, lease, root=root or lease.root, prompt=prompt, seed_shift=seed_shift),
            limiter=self._one_at_a_time,
        )
        stop = set(self.card.stop_tokens)
        samples = []
        for rollout in sorted(rollouts, key=lambda rollout: rollout.index):
            tokens = edit(rollout.tokens.copy())
            finish = "stop" if int(tokens[-1]) in stop else "length"
            samples.append(
                sample_of(lease, rollout.index, tokens=tokens, logprobs=rollout.logprobs[: len(tokens)], finish=finish)
            )
        return result_of(lease, samples, **changes)

    def _generate(self, lease: Lease, *, root: bytes, prompt: np.ndarray | None, seed_shift: int):
        from rollmesh_node.engine.backend import GroupRequest, SampleRequest
        from tests.unit.engine.requests import drained

        backend = self._warm_up()
        backend.swap(self.images[root])
        request = GroupRequest(
            key=0,
            prompt=lease.prompt_ids if prompt is None else prompt,
            samples=tuple(
                SampleRequest(index=sample.index, seed=(sample.seed + seed_shift) % (1 << 64))
                for sample in lease.samples
            ),
            max_new_tokens=lease.max_new_tokens,
            stop=frozenset(self.card.stop_tokens),
        )
        return drained(backend, [request])

    def _warm_up(self):
        """Import torch and build the model, which takes longer than a lease stands on a busy machine."""
        from rollmesh_node.engine.backend import Weights
        from rollmesh_node.engine.transformers_backend import TransformersBackend

        if self._backend is None:
            self._backend = TransformersBackend(threads=1)
            config = json.loads(self.card.model.config)
            self._backend.load(Weights(config=config, layout=self.card.layout, image=self.images[self.newest]))
        return self._backend


@asynccontextmanager
async def open_studio(scout: Attacker, folder: Path, *, base: Path | None = None) -> AsyncIterator[Studio]:
    """Follow the head over the connection of ``scout``: an attacker with gossip that was admitted and does no harm.

    ``base`` is an image of the run's base model; without it the weights are fetched.
    """
    assert scout.card is not None
    assert scout.welcome is not None
    welcome, head = scout.welcome, scout.head
    for name in ("run", "images"):
        (folder / name).mkdir(parents=True)
    router = Router()
    own = OwnLimits(prompt_tokens=4096, new_tokens=4096, disk_bytes=limits.GIB, download_bytes=limits.GIB)
    async with (
        open_weights(
            scout.mesh, router=router, card=scout.card, folder=folder / "run", ram_folder=None, own=own,
            learner_only=True, admission=lambda: welcome.admission, cache=PeerCache(folder / "peers.json"),
            upload_bytes_per_s=None,
            on_notice=lambda _notice: None,
        ) as weights,
        trio.open_nursery() as nursery,
    ):  # fmt: skip
        studio = Studio(scout.card, weights, folder / "images")
        if base is not None:
            await weights.keeper.adopt_base(base, expected_root=scout.card.model.base_root)
        nursery.start_soon(weights.run)
        nursery.start_soon(studio.watch)
        if head is not None:
            weights.follower.hear_head(head)
        nursery.start_soon(_tell_heads, scout, weights)
        await studio.wait_for(1)
        await trio.to_thread.run_sync(studio._warm_up)
        yield studio
        nursery.cancel_scope.cancel()


async def _tell_heads(scout: Attacker, weights: NodeWeights) -> None:
    """Signs of life, whose answers name the head as well."""
    while True:
        answer = await scout.request_work(0)
        weights.follower.hear_head(answer.head)
        await trio.sleep(0.2)


# --- memory ----------------------------------------------------------------------------------------------------------
class Weight:
    """The memory that a process took at its worst since the block began, in MiB."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts again from here
        self._before = _kib(pid, "VmRSS")

    @property
    def growth_mib(self) -> float:
        return (_kib(self.pid, "VmHWM") - self._before) / 1024

    @property
    def peak_mib(self) -> float:
        return _kib(self.pid, "VmHWM") / 1024


def _kib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise AssertionError(f"no {name} of process {pid}: {os.strerror(3)}")
