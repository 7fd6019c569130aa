"""How a peer's parts of the chunk swarm fit together: one half serves, and both node and learner have it; the other
fetches, and only nodes have it. The invariant between them: one pass book, one exchange and one store for both halves,
so that what is fetched is served at once. The daemon registers the routes and runs both.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from rollmesh_peer.mesh.peer_cache import PeerCache
from rollmesh_peer.mesh.requests import Route, StreamRoute
from rollmesh_peer.mesh.seam import Mesh
from rollmesh_peer.weights.conduct import ConductBook
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.fetch import Around
from rollmesh_peer.weights.have import HaveExchange
from rollmesh_peer.weights.neighbourhood import Neighbourhood
from rollmesh_peer.weights.passes import PassBook
from rollmesh_peer.weights.seeding import Seeder
from rollmesh_peer.weights.swarm import Swarm
from rollmesh_protocol import limits
from rollmesh_protocol.messages import Head


class Sharing:
    """The serving half. ``await run()`` for as long as the peer lives.

    Args:
        admission: our own sealed pass, or None before we have one; a learner never has one.
        origin: chance, on the learner: offer different chunks to different peers.
        upload_bytes_per_s: the owner's cap on chunks sent; None for none.
        slots: chunks being sent at one time. By default ``limits.UPLOAD_SLOTS`` on the learner, whose uplink is the
            widest, and half as many on a node: of chunks that share a slow uplink none is whole, and passed on, soon.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        store: EdgeStore,
        passes: PassBook,
        admission: Callable[[], bytes | None] = lambda: None,
        origin: Random | None = None,
        upload_bytes_per_s: float | None = None,
        slots: int | None = None,
    ) -> None:
        self.mesh = mesh
        self.store = store
        self.passes = passes
        self.exchange = HaveExchange(mesh, store=store, passes=passes, admission=admission, origin=origin)
        if slots is None:
            slots = limits.UPLOAD_SLOTS if origin is not None else limits.UPLOAD_SLOTS // 2
        self.seeder = Seeder(
            store=store,
            passes=passes,
            upload_bytes_per_s=upload_bytes_per_s,
            slots=slots,
            num_held=self.exchange.num_held,
        )

    def routes(self) -> tuple[Route | StreamRoute, ...]:
        """What the router serves: manifests, have streams, chunks."""
        return (*self.seeder.routes(), self.exchange.route())

    async def run(self) -> None:
        """Keep the have streams, until cancelled."""
        await self.exchange.run()


class Fetching:
    """The fetching half of a node. ``await run()`` for as long as the node takes part.

    Args:
        on_head: called with heads that come with introductions.
        learner_only: dial no other node (and let the daemon advertise no address).
    """

    def __init__(
        self,
        sharing: Sharing,
        *,
        learner: str,
        random: Random,
        cache: PeerCache | None = None,
        on_head: Callable[[Head], None] | None = None,
        learner_only: bool = False,
    ) -> None:
        self.conduct = ConductBook()
        self.neighbourhood = Neighbourhood(
            sharing.mesh,
            learner=learner,
            conduct=self.conduct,
            random=random,
            cache=cache,
            on_head=on_head,
            learner_only=learner_only,
        )
        around = Around(
            mesh=sharing.mesh,
            learner=learner,
            store=sharing.store,
            exchange=sharing.exchange,
            conduct=self.conduct,
            neighbours=self.neighbourhood.peers,
        )
        self.swarm = Swarm(around, random=random, fetch_ended=self._fetch_ended)
        self._sharing = sharing

    async def run(self) -> None:
        """Tend the neighbourhood, until cancelled."""
        await self.neighbourhood.run()

    def _fetch_ended(self, givers: frozenset[str]) -> None:
        takers = self._sharing.seeder.take_takers()
        self.neighbourhood.fetch_ended(givers | takers)
