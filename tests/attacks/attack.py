"""What an attack is: a class with a name, what must become of it, and one method that does the harm.

Every attack is a node of its own on the real wire: an identity, a libp2p host and a conversation with a real learner.
:class:`SamplingAttack` turns an honest order into the attacker's completions; :class:`WireAttack` sends what an honest
node does not. What became of an attack is read from the learner's own ledger and answers, never from its code.
"""

from __future__ import annotations

import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import trio

from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_peer.mesh.join import JoinLine
from rollmesh_protocol import streams
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import Receipt, Standing
from rollmesh_protocol.rollout import Result
from tests.attacks.engine import Drawn, Order, order_of
from tests.support.attacker import Attacker, result_of, sample_of

if TYPE_CHECKING:
    from tests.attacks.place import Lab

Kind = Literal["sampling", "protocol", "flood", "weights", "learner-against-node"]

HEARTBEAT_S = 3.0
ASK_S = 60.0
DIALS = 4
ASK_AGAIN_S = 0.5
SETTLE_S = 120.0
"""Time for the audits of what was sent last."""
OUT = ("node.quarantined", "node.not_admitted")

REGISTRY: dict[str, type[Attack]] = {}
"""Every attack by its name, in the order of their definition."""


@dataclass(kw_only=True)
class Outcome:
    """What the attacker itself saw."""

    codes: list[str] = field(default_factory=list)
    """Codes of receipts and refusals, in order; the reason of its quarantine last."""
    tokens: int = 0
    """Generated and handed in before it was caught or gave up."""
    note: str = ""
    skipped: str = ""
    """Why it cannot be played on this machine."""
    no_effect: bool | None = None
    """For an attack that ends without a code: True when it was measured to have gained nothing."""
    failure: str = ""
    """What must not have happened and did, whether it was caught or not."""


class Attack(ABC):
    """One attack. A subclass with a ``name`` is in the registry."""

    name: ClassVar[str] = ""
    kind: ClassVar[Kind]
    expects: ClassVar[frozenset[str]] = frozenset()
    """Codes of which one must be seen. Empty: the attack must be shown to have no effect."""
    bound_tokens: ClassVar[int] = 0
    """Audited tokens within which it must be caught; 0: before anything of it is audited."""
    alone: ClassVar[bool] = False
    """It needs most of a run's work, and is played only when it is asked for by name."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.name:
            assert cls.name not in REGISTRY, cls.name
            REGISTRY[cls.name] = cls

    def __init__(self) -> None:
        self.peers: list[str] = []
        """The identities that it used: the ledger tells what became of their work."""
        self.leases: set[bytes] | None = None
        """Where only a part of that work is the attack: the leases of that part."""
        self.outcome = Outcome()

    @abstractmethod
    async def play(self, lab: Lab) -> None:
        """Attack, and put what was seen into :attr:`outcome`."""

    async def conclude(self, lab: Lab) -> None:
        """Read from the ledger what came of it, once all attacks are over."""
        del lab

    @asynccontextmanager
    async def identity(self, lab: Lab, *, alive: bool = True):
        """One more identity of this attack, in the run, which as long as it is ``alive`` gives signs of life."""
        async with open_stubborn(lab.join) as one, trio.open_nursery() as nursery:
            self.peers.append(one.peer)
            if alive:
                nursery.start_soon(live, one)
            yield one
            nursery.cancel_scope.cancel()


class SamplingAttack(Attack):
    """Hands in completions that were not drawn as ordered, as long as the learner takes them."""

    kind = "sampling"
    expects = frozenset({"result.sampling", "result.drift"})
    """Either is why it is out; a drift that leaves it in the run is no code that it hears."""

    @abstractmethod
    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        """The completions to report for ``order``, which an honest node would give to ``lab.forge.draw``."""

    async def prepare(self, lab: Lab) -> None:
        """Wait for what the attack needs."""

    def most_tokens(self, lab: Lab) -> int:
        """When it gives up, in tokens handed in."""
        return min(lab.most_tokens, 2 * self.bound_tokens) if self.expects else lab.most_tokens

    def heard(self, standing: Standing) -> None:
        """The learner has told how it regards this node."""

    def handed_in(self, lease: Lease, drawn: list[Drawn]) -> None:
        """The work of a lease was submitted."""
        del lease
        self.outcome.tokens += sum(len(sample.tokens) for sample in drawn)

    async def play(self, lab: Lab) -> None:
        await self.prepare(lab)
        most = self.most_tokens(lab)
        async with lab.places, self.identity(lab) as one:
            try:
                with trio.move_on_at(lab.until):
                    while self.outcome.tokens < most:
                        await self._one_lease(one, lab)
            except Refused as refused:
                if refused.code not in OUT:
                    self.outcome.codes.append(refused.code)
            await self._settle(one, lab)

    async def _one_lease(self, one: Attacker, lab: Lab) -> None:
        answer = await one.request_work(1, root=lab.studio.newest)
        self.heard(answer.standing)
        if not answer.leases:
            await trio.sleep(ASK_AGAIN_S)
            return
        lease = one.open_lease(answer.leases[0])
        drawn = await self.work(order_of(lease, stop=lab.stop), lab)
        receipt = await hand_in(one, lease, drawn, lab)
        self.handed_in(lease, drawn)
        if receipt.code:
            self.outcome.codes.append(receipt.code)

    async def _settle(self, one: Attacker, lab: Lab) -> None:
        """Until nothing of it waits for its audit, or it is out."""
        with trio.move_on_after(SETTLE_S):
            while True:
                try:
                    await one.request_work(0)
                except Refused as refused:
                    if refused.code in OUT:
                        self.outcome.codes.append(reason_of(refused))
                        return
                if not lab.waiting_for_audit(one.peer):
                    return
                await trio.sleep(1)


class WireAttack(Attack):
    """Says what no honest node says. :meth:`strike` gives the code that the learner answered with."""

    kind = "protocol"
    alive = True

    @abstractmethod
    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        """Do it once; the code of the refusal, or None for an attack that goes by :attr:`Outcome.no_effect`."""

    async def play(self, lab: Lab) -> None:
        async with self.identity(lab, alive=self.alive) as one:
            code = await self.strike(one, lab)
            if code:
                self.outcome.codes.append(code)


@dataclass
class Stubborn(Attacker):
    """An attacker that dials again when its link is gone, as nodes do: on busy cores links are given up too soon."""

    address: str = ""

    async def ask(self, protocol: str, request: bytes, *, deadline_s: float = ASK_S) -> bytes:
        for _ in range(DIALS):
            try:
                return await super().ask(protocol, request, deadline_s=deadline_s)
            except LinkLost:
                await trio.sleep(ASK_AGAIN_S)
                with suppress(LinkLost):
                    await self.mesh.connect(self.address)
                    if protocol != streams.HELLO:  # as nodes do over every new connection
                        await self.hello()
        return await super().ask(protocol, request, deadline_s=deadline_s)


@asynccontextmanager
async def open_stubborn(join: str, *, gossip: bool = False) -> AsyncIterator[Stubborn]:
    """A fresh identity in the run."""
    line = JoinLine.parse(join)
    identity = Identity(secrets.token_bytes(32))
    async with open_mesh(HostOptions(key_seed=identity.seed, gossip=gossip)) as mesh:
        one = Stubborn(identity, mesh, line.learner, address=str(line.addresses[0]))
        await one.hello()
        try:
            yield one
        finally:
            with trio.CancelScope(shield=True):
                await one.leave()


async def lease_for(one: Attacker, lab: Lab) -> Lease:
    """A lease under weights that the lab holds."""
    while True:
        answer = await one.request_work(1, root=lab.studio.newest)
        if answer.leases:
            return one.open_lease(answer.leases[0])
        await trio.sleep(ASK_AGAIN_S)


def result_from(lease: Lease, drawn: list[Drawn], lab: Lab) -> Result:
    """Completions as a result, with the finish reasons that fit their last tokens."""
    samples = [
        sample_of(
            lease, sample.index, tokens=sample.tokens, logprobs=sample.logprobs,
            finish="stop" if int(sample.tokens[-1]) in lab.stop else "length",
        )
        for sample in drawn
    ]  # fmt: skip
    return result_of(lease, samples)


async def hand_in(one: Attacker, lease: Lease, drawn: list[Drawn], lab: Lab) -> Receipt:
    """Submit completions under an honest envelope."""
    return await one.submit(result_from(lease, drawn, lab))


async def refusal(one: Attacker, sealed: bytes) -> str:
    """The code for a submission; the offence behind a quarantine."""
    try:
        receipt = await one.send(sealed)
    except Refused as refused:
        return reason_of(refused) if refused.code == "node.quarantined" else refused.code
    return receipt.code or "accepted"


async def any_refusal(one: Attacker, protocol: str, request: bytes) -> str:
    """The code for any request; what is answered is said to be."""
    try:
        await one.ask(protocol, request)
    except Refused as refused:
        return refused.code
    return "answered"


def reason_of(refused: Refused) -> str:
    """The offence for which a quarantined node is told that it is out."""
    head, _, reason = refused.detail.partition("out of the run: ")
    return reason.partition(":")[0] or refused.code if head != refused.detail else refused.code


def say(words: str) -> None:
    """For whoever watches."""
    print(words, file=sys.stderr, flush=True)


async def live(one: Attacker) -> None:
    """Signs of life: whoever is silent for long loses its leases."""
    while True:
        await trio.sleep(HEARTBEAT_S)
        with suppress(Refused, LinkLost):
            await one.request_work(0)
