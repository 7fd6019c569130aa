"""Headers and notices over real sockets: through a peer in the middle, and never from a stranger."""

from __future__ import annotations

from contextlib import asynccontextmanager

import trio

from rollmesh_peer.mesh.announcements import Announcer, Bulletin, SequenceFile
from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.messages import PolicyHeader
from rollmesh_protocol.streams import policy_topic
from tests.unit.swarm.peers import seed
from tests.unit.weights.kit import LEARNER, RUN


def header(version):
    return PolicyHeader(
        version=version,
        step=version,
        root=bytes([version]) * 32,
        parent=bytes(32),
        manifest=bytes(32),
        manifest_bytes=100,
        payload_bytes=100,
    )


@asynccontextmanager
async def peer(key_seed):
    async with open_mesh(HostOptions(key_seed=key_seed, listen=("/ip4/127.0.0.1/tcp/0",))) as mesh:
        yield mesh


async def repeat_until(action, done):
    """Gossip meshes form within heartbeats, and a message sent before that is lost: it is only a hint."""
    with trio.fail_after(30):
        while not done():
            await action()
            await trio.sleep(0.3)


async def test_the_learners_words_travel_and_a_strangers_do_not(tmp_path):
    heard = {name: ([], []) for name in ("near", "far")}
    async with (
        peer(LEARNER.seed) as learner,
        peer(seed(1)) as near,
        peer(seed(2)) as far,
        peer(seed(3)) as stranger,
        trio.open_nursery() as nursery,
    ):
        for name, mesh in (("near", near), ("far", far)):
            headers, notices = heard[name]
            bulletin = Bulletin(
                mesh,
                run=RUN,
                learner=LEARNER.peer,
                sequence=SequenceFile(tmp_path / name),
                on_header=headers.append,
                on_notice=notices.append,
            )
            nursery.start_soon(bulletin.run)
        await near.connect(learner.addresses[0])
        await far.connect(near.addresses[0])
        await stranger.connect(near.addresses[0])
        announcer = Announcer(learner, run=RUN, identity=LEARNER, sequence=SequenceFile(tmp_path / "learner"))
        versions = iter(range(1, 200))

        async def announce():
            await announcer.announce(header(next(versions)))

        async def forge():
            genuine = seal(header(201).encode(), run=RUN, kind="policy", identity=LEARNER).encode()
            await stranger.publish(policy_topic(RUN), genuine)

        await repeat_until(announce, lambda: heard["far"][0] and heard["near"][0])
        for _ in range(5):
            await forge()
            await trio.sleep(0.2)
        await repeat_until(lambda: announcer.notify("drain", text="that is all"), lambda: heard["far"][1])
        assert all(found.version < 201 for headers, _ in heard.values() for found in headers)
        for headers, notices in heard.values():
            assert [found.version for found in headers] == sorted({found.version for found in headers})
            assert [notice.sequence for notice in notices] == sorted({notice.sequence for notice in notices})
        nursery.cancel_scope.cancel()
