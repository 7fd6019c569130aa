"""Wires the weights of one run: store, worker process, keeper, swarm, follower, neighbours and gossip.

    Bulletin, Uplink --heads--> Follower --edges--> Swarm --chunks--> EdgeStore --> Keeper --views--> (engine)
                                                      ^ Neighbourhood   ^ Seeder --> (other peers)

The invariant between them: what the store holds was verified against a manifest that the learner signed, and what the
keeper shows has the root that it says. This module only puts the parts together; none of them knows it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import trio

from rollmesh_node.own_limits import OwnLimits
from rollmesh_peer.folders import private_folder
from rollmesh_peer.logging_setup import event
from rollmesh_peer.mesh.announcements import Bulletin, SequenceFile
from rollmesh_peer.mesh.peer_cache import PeerCache
from rollmesh_peer.mesh.requests import Router
from rollmesh_peer.mesh.seam import Mesh
from rollmesh_peer.status.words import share, size
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.follower import Follower
from rollmesh_peer.weights.keeper import Keeper, open_keeper
from rollmesh_peer.weights.neighbourhood import Neighbourhood
from rollmesh_peer.weights.passes import PassBook
from rollmesh_peer.weights.seeding import Seeder
from rollmesh_peer.weights.sharing import Fetching, Sharing
from rollmesh_peer.weights.swarm import Progress, Swarm
from rollmesh_peer.weights.workshop import open_workshop
from rollmesh_protocol.messages import Notice, RunCard

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NodeWeights:
    """The parts that the rest of the node talks to. Run :meth:`run` in a nursery."""

    keeper: Keeper
    follower: Follower
    swarm: Swarm
    seeder: Seeder
    neighbourhood: Neighbourhood
    sharing: Sharing
    bulletin: Bulletin

    async def run(self) -> None:
        """Follow the head and serve others, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.sharing.run)
            nursery.start_soon(self.neighbourhood.run)
            nursery.start_soon(self.bulletin.run)
            nursery.start_soon(self.follower.run)


@asynccontextmanager
async def open_weights(
    mesh: Mesh,
    *,
    router: Router,
    card: RunCard,
    folder: Path,
    ram_folder: Path | None,
    own: OwnLimits,
    learner_only: bool,
    upload_bytes_per_s: float | None,
    admission: Callable[[], bytes],
    cache: PeerCache,
    on_notice: Callable[[Notice], None],
) -> AsyncIterator[NodeWeights]:
    """The weights of ``card``'s run, whose state is in ``folder``. Nothing is fetched before :meth:`NodeWeights.run`.

    Raises:
        HostError: neither memory nor disk has room, or the folder cannot be used.
    """
    random = Random()
    store = await trio.to_thread.run_sync(
        lambda: EdgeStore(
            private_folder(folder / "edges"),
            run=card.run,
            learner=card.learner,
            layout=card.layout,
            quota_bytes=own.disk_bytes,
        )
    )
    async with (
        open_workshop(card.layout) as workshop,
        open_keeper(
            private_folder(folder / "weights"),
            ram_folder=ram_folder,
            layout=card.layout,
            store=store,
            workshop=workshop,
        ) as keeper,
    ):
        passes = PassBook(run=card.run, learner=card.learner, newest_version=lambda: keeper.highest)
        sharing = Sharing(mesh, store=store, passes=passes, admission=admission, upload_bytes_per_s=upload_bytes_per_s)
        fetching = Fetching(
            sharing,
            learner=card.learner,
            random=random,
            cache=cache,
            on_head=lambda head: follower.hear_head(head),  # noqa: PLW0108 - the follower is made below
            learner_only=learner_only,
        )
        follower = Follower(
            mesh,
            learner=card.learner,
            store=store,
            keeper=keeper,
            swarm=fetching.swarm,
            max_download_bytes=own.download_bytes,
            chance=random.random,
        )
        follower.listen(_VersionLog(fetching.swarm).heard)
        bulletin = Bulletin(
            mesh,
            run=card.run,
            learner=card.learner,
            sequence=SequenceFile(folder / "notice.sequence"),
            on_header=follower.hear_header,
            on_notice=on_notice,
        )
        router.register(mesh, *sharing.routes())
        yield NodeWeights(
            keeper=keeper,
            follower=follower,
            swarm=fetching.swarm,
            seeder=sharing.seeder,
            neighbourhood=fetching.neighbourhood,
            sharing=sharing,
            bulletin=bulletin,
        )


class _VersionLog:
    """Says of each new version what it took to get there."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._before = Progress()
        self._version = 0

    def heard(self, version: int, root: bytes) -> None:
        """Verified weights are held."""
        del root
        if version == self._version:
            return
        now, before = self._swarm.progress, self._before
        self._before, self._version = now, version
        from_peers = now.bytes_from_peers - before.bytes_from_peers
        fetched = from_peers + now.bytes_from_learner - before.bytes_from_learner
        event(
            _log, "holds new weights", version=version, fetched=size(fetched), from_peers=share(from_peers, fetched),
            seconds=round(now.seconds - before.seconds, 1),
        )  # fmt: skip
