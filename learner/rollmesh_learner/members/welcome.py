"""The desk where nodes introduce themselves and ask about others: the ``hello``, ``peers`` and ``edges`` streams.

Invariant: whoever is in the run has said hello over the connection that it has now, and at that moment its block of
addresses had a place left, whether it came for the first time or again. Who comes back without a hello is no member
(:meth:`WelcomeDesk.member`) as soon as :meth:`WelcomeDesk.watch` has looked, which it does every few seconds. A peer
without a connection has no address to be counted under, and is not admitted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

import trio

from rollmesh_learner.members.admission import (
    Mode,
    Registrations,
    block_at,
    check_allowlist,
    check_block,
    open_hello,
    open_invite,
)
from rollmesh_learner.members.nodes import Node, Nodes
from rollmesh_learner.members.standing import after_absence
from rollmesh_learner.publishing.versions import Versions
from rollmesh_learner.records import rows
from rollmesh_learner.records.ledger import Ledger
from rollmesh_peer.mesh.seam import Mesh, PeerLink
from rollmesh_peer.weights.introductions import introduce
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import Identity, short
from rollmesh_protocol.manifest import Edge
from rollmesh_protocol.messages import (
    EdgesAnswer,
    EdgesRequest,
    Hello,
    Pass,
    PeersAnswer,
    PeersRequest,
    RunCard,
    Welcome,
)

_log = logging.getLogger("rollmesh.learner.welcome")

STRANGER_S: Final = 60.0
"""Time for a hello after connecting, or for looking at the status."""
_WATCH_S: Final = 5.0
"""Time between two looks at who is connected."""


@dataclass(frozen=True, kw_only=True)
class AdmissionTerms:
    """Who may join."""

    mode: Mode
    allow: tuple[str, ...]
    per_block: int


class WelcomeDesk:
    """Admits nodes, and tells them of each other and of the ways to the head."""

    def __init__(
        self,
        terms: AdmissionTerms,
        *,
        card: RunCard,
        identity: Identity,
        mesh: Mesh,
        nodes: Nodes,
        versions: Versions,
        ledger: Ledger,
        edges_towards_head: Callable[[bytes | None], tuple[Edge, ...]],
        random: Random,
        registrations: Registrations | None = None,
    ) -> None:
        self._terms = terms
        self._run = card.run
        self._card = seal(card.encode(), run=card.run, kind="card", identity=identity).encode()
        self._identity = identity
        self._mesh = mesh
        self._nodes = nodes
        self._versions = versions
        self._ledger = ledger
        self._edges_towards_head = edges_towards_head
        self._random = random
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._here: dict[str, str] = {}
        """The address of the connection over which each member said hello."""
        self._registrations = registrations or Registrations(per_block=terms.per_block)

    async def hello(self, peer: str, request: bytes) -> bytes:
        """One :class:`Hello` and its :class:`Welcome`, or the reason why the peer may not join."""
        hello = open_hello(request)
        is_new = self._nodes.get(peer) is None
        await self._check(peer, hello)
        node, observed = self._seat(peer, hello)
        if is_new:
            engine = f"{hello.engine.backend} {hello.engine.dtype} on {hello.engine.device}" if hello.engine else "none"
            _log.info("%s (%s) joined as %s; engine: %s", short(peer), node.name, hello.role, engine)
            block = block_at(observed) or ""
            wall_time = time.time()
            await self._ledger.commit(
                rows.put_node(peer, name=node.name, record=node.record, wall_time=wall_time, block=block)
            )
        admission = Pass(peer=peer, issued_version=self._versions.head.version)
        sealed = seal(admission.encode(), run=self._run, kind="pass", identity=self._identity).encode()
        return Welcome(card=self._card, admission=sealed, head=self._versions.head).encode()

    def member(self, peer: str) -> Node:
        """The node that ``peer`` is, for requests that only members may make.

        Raises:
            Refused: ``node.quarantined``, or ``node.not_admitted`` for a peer that has not said hello over the
                connection that it has now.
        """
        node = self._nodes.admitted(peer)
        if peer not in self._here:
            raise Refused("node.not_admitted", "this connection is new; say hello over it first")
        return node

    async def peers(self, peer: str, request: bytes) -> bytes:
        """One :class:`PeersRequest` and its :class:`PeersAnswer`."""
        asked = PeersRequest.decode(request, limit=limits.SMALL_BYTES)
        self._nodes.admitted(peer).last_seen = trio.current_time()
        connected = self._mesh.links()
        members = {
            other: addresses
            for other, addresses in self._addresses.items()
            if other in connected and self._nodes.is_admitted(other)
        }
        chosen = introduce(members, to=peer, count=asked.count, random=self._random)
        return PeersAnswer(peers=chosen, head=self._versions.head).encode()

    async def edges(self, peer: str, request: bytes) -> bytes:
        """One :class:`EdgesRequest` and its :class:`EdgesAnswer`."""
        asked = EdgesRequest.decode(request, limit=limits.SMALL_BYTES)
        self._nodes.admitted(peer).last_seen = trio.current_time()
        return EdgesAnswer(head=self._versions.head, edges=self._edges_towards_head(asked.root)).encode()

    async def watch(self) -> None:
        """Let go of peers that connected and never said hello: they hold places that nodes need. Never returns."""
        since: dict[str, float] = {}
        while True:
            await trio.sleep(_WATCH_S)
            now = trio.current_time()
            links = self._mesh.links()
            self._here = {peer: link.address for peer, link in links.items() if self._here.get(peer) == link.address}
            strangers = [peer for peer in links if peer not in self._here or not self._nodes.is_admitted(peer)]
            since = {peer: since.get(peer, now) for peer in strangers}
            for peer, first_seen in since.items():
                if now - first_seen > STRANGER_S:
                    _log.debug("%s was connected for %g s without joining; it is let go", short(peer), STRANGER_S)
                    await self._mesh.disconnect(peer)

    async def _check(self, peer: str, hello: Hello) -> None:
        """Whether the run takes this peer at all, wherever it comes from."""
        self._nodes.check_place(peer, now=trio.current_time())
        if self._nodes.get(peer) is not None:
            return
        if self._terms.mode == "allowlist":
            check_allowlist(peer, allowed=self._terms.allow)
        elif self._terms.mode == "invite":
            await self._take_invite(peer, hello)

    def _seat(self, peer: str, hello: Hello) -> tuple[Node, str]:
        """Give ``peer`` its place in the run: the node, and the address that it comes from.

        Not a coroutine: between the look at the connections and the admission nobody else says hello or goes away.
        """
        now = trio.current_time()
        links = self._mesh.links()
        link = links.get(peer)
        if link is None or not link.address:
            raise Refused("request.timeout", "the connection was gone before its hello was looked at")
        self._nodes.check_place(peer, now=now)
        check_block(link.address, others=self._others(peer, links), most=self._terms.per_block)
        if not self._nodes.is_known(peer):
            self._registrations.register(link.address, now=now)
        node = self._nodes.admit(peer, hello, now=now)
        self._nodes.set_record(peer, after_absence(node.record, self._nodes.rules, now=time.time()))
        node.block = block_at(link.address) or ""
        self._here[peer] = link.address
        self._addresses = {other: known for other, known in self._addresses.items() if self._nodes.get(other)}
        self._addresses[peer] = _dialable(hello.addresses, peer=peer, observed=link.address)
        return node, link.address

    def _others(self, peer: str, links: Mapping[str, PeerLink]) -> list[str]:
        """Where the other members that are connected come from."""
        return [
            link.address
            for other, link in links.items()
            if other != peer and other in self._here and self._nodes.is_admitted(other)
        ]

    async def _take_invite(self, peer: str, hello: Hello) -> None:
        token = open_invite(hello, run=self._run, learner=self._identity.peer)
        await self._ledger.commit(rows.use_invite(token, peer=peer, wall_time=time.time()))  # the first one has it
        ((owner,),) = await self._ledger.fetch("SELECT used_by FROM invites WHERE token = ?", token)
        if owner != peer:
            raise Refused("node.invite", "the invitation was used by another node already")


def _dialable(declared: tuple[str, ...], *, peer: str, observed: str) -> tuple[str, ...]:
    """The addresses of ``declared`` under which others may dial ``peer``.

    A node that listens everywhere does not know its own address: where it says 0.0.0.0 or ::, the address that its
    connection comes from is put in.
    """
    host = observed.split("/")[:3]
    dialable = []
    for address in declared:
        parts = address.split("/")
        if len(parts) != 7 or parts[5] != "p2p" or parts[6] != peer:
            continue
        if parts[2] in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            if len(host) < 3 or host[1] != parts[1]:
                continue
            parts[2] = host[2]
        dialable.append("/".join(parts))
    return tuple(dialable[: limits.MAX_NEIGHBOURS])
