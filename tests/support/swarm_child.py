"""A node in a process of its own: joins a learner, finds neighbours, fetches one payload, and serves until stdin ends.

``python -m tests.support.swarm_child NUMBER FOLDER LEARNER_ADDRESS MANIFEST_HEX NEIGHBOURS``; one JSON line when it
listens, one when it has that many neighbours, and one when the payload is complete. A byte on stdin starts the fetch.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from random import Random

import trio

from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_peer.mesh.keeping import LinkKeeper
from rollmesh_peer.mesh.requests import Router
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.passes import PassBook
from rollmesh_peer.weights.sharing import Fetching, Sharing
from rollmesh_protocol import limits
from tests.unit.swarm.peers import pass_for, seed
from tests.unit.weights.kit import LEARNER, MIXED, RUN


def say(**fields):
    print(json.dumps(fields), flush=True)


async def main(number, folder, learner_address, name, neighbours):
    store = EdgeStore(folder, run=RUN, learner=LEARNER.peer, layout=MIXED, quota_bytes=limits.GIB)
    async with (
        open_mesh(HostOptions(key_seed=seed(number), listen=("/ip4/127.0.0.1/tcp/0",), gossip=False)) as mesh,
        trio.open_nursery() as nursery,
    ):
        sealed = pass_for(mesh.peer_id)
        passes = PassBook(run=RUN, learner=LEARNER.peer, newest_version=lambda: 0)
        sharing = Sharing(mesh, store=store, passes=passes, admission=lambda: sealed)
        fetching = Fetching(sharing, learner=LEARNER.peer, random=Random(number))
        Router().register(mesh, *sharing.routes())
        keeper = LinkKeeper(mesh, [learner_address])
        for run in (keeper.run, sharing.run, fetching.run):
            nursery.start_soon(run)
        stdin = trio.lowlevel.FdStream(sys.stdin.fileno())
        await keeper.wait_linked()
        say(peer=mesh.peer_id, address=mesh.addresses[0])
        while len(fetching.neighbourhood.peers()) < neighbours:
            await trio.sleep(0.05)
        say(neighbours=neighbours)
        await stdin.receive_some(1)
        started = time.monotonic()
        await fetching.swarm.manifest(name, max_bytes=limits.MANIFEST_BYTES)
        await fetching.swarm.fetch(name)
        progress = fetching.swarm.progress
        say(
            seconds=time.monotonic() - started,
            cpu_s=time.process_time(),
            learner=progress.bytes_from_learner,
            peers=progress.bytes_from_peers,
            chunks_from_peers=progress.chunks_from_peers,
            neighbours=len(fetching.neighbourhood.peers()),
        )
        while await stdin.receive_some(1):
            pass
        say(served=sharing.seeder.bytes_served)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    trio.run(main, int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], bytes.fromhex(sys.argv[4]), int(sys.argv[5]))
