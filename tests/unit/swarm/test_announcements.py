"""Gossip: only the learner is heard, only what is new, and old notices stay dead over a restart."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from rollmesh_peer.mesh.announcements import Announcer, Bulletin, SequenceFile
from rollmesh_peer.testing.memory_mesh import MemoryNetwork
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.errors import HostError, Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.messages import Notice, PolicyHeader
from rollmesh_protocol.streams import notice_topic, policy_topic
from tests.unit.swarm.peers import seed
from tests.unit.weights.kit import LEARNER, RUN

STRANGER = Identity(seed(77))


def header(version, **changes):
    fields = {
        "version": version,
        "step": version - 1,
        "root": bytes([version]) * 32,
        "parent": bytes([version - 1]) * 32,
        "manifest": bytes([100 + version]) * 32,
        "manifest_bytes": 1000,
        "payload_bytes": 5000,
    }
    return PolicyHeader(**{**fields, **changes})


def sealed(record, kind, *, identity=LEARNER, run=RUN):
    return seal(record.encode(), run=run, kind=kind, identity=identity).encode()


class Listener:
    def __init__(self, mesh, folder):
        self.mesh = mesh
        self.headers, self.notices = [], []
        self.bulletin = Bulletin(
            mesh,
            run=RUN,
            learner=LEARNER.peer,
            sequence=SequenceFile(folder / "notices"),
            on_header=self.headers.append,
            on_notice=self.notices.append,
        )


@asynccontextmanager
async def listening(network, number, folder, *, to):
    async with network.join(seed(number)) as mesh, trio.open_nursery() as nursery:
        listener = Listener(mesh, folder)
        nursery.start_soon(listener.bulletin.run)
        for other in to:
            await mesh.connect(other.addresses[0])
        yield listener
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def announcing(network, folder):
    async with network.join(LEARNER.seed) as mesh:
        yield Announcer(mesh, run=RUN, identity=LEARNER, sequence=SequenceFile(folder / "said")), mesh


async def settled():
    await trio.testing.wait_all_tasks_blocked()
    await trio.testing.wait_all_tasks_blocked()


async def test_headers_and_notices_reach_a_peer_that_is_not_linked_to_the_learner(tmp_path):
    network = MemoryNetwork()
    async with (
        announcing(network, tmp_path) as (announcer, learner),
        listening(network, 1, tmp_path / "a", to=[learner]) as near,
        listening(network, 2, tmp_path / "b", to=[near.mesh]) as far,
    ):
        await announcer.announce(header(1))
        said = await announcer.notify("pause", text="the disk is being changed")
        await settled()
        assert near.headers == far.headers == [header(1)]
        assert near.notices == far.notices == [said]


async def test_a_stranger_is_neither_heard_nor_passed_on(tmp_path):
    network = MemoryNetwork()
    async with (
        network.join(STRANGER.seed) as stranger,
        listening(network, 1, tmp_path / "a", to=[stranger]) as near,
        listening(network, 2, tmp_path / "b", to=[near.mesh]) as far,
    ):
        genuine = sealed(header(1), "policy")
        await stranger.publish(policy_topic(RUN), genuine)  # the learner's word, but not from its mouth
        await stranger.publish(policy_topic(RUN), sealed(header(2), "policy", identity=STRANGER))
        await stranger.publish(notice_topic(RUN), sealed(Notice(sequence=9, kind="ended", text=""), "notice"))
        await settled()
        assert near.headers == far.headers == near.notices == far.notices == []
        assert near.bulletin.accepts_policy(LEARNER.peer, genuine)


WRONG = {
    "garbage": b"\xc1garbage",
    "nothing": b"",
    "another run": sealed(header(1), "policy", run="another-run"),
    "another kind": sealed(header(1), "notice"),
    "another key": sealed(header(1), "policy", identity=STRANGER),
    "another record": sealed(Notice(sequence=1, kind="pause", text=""), "policy"),
    "too large": sealed(header(1), "policy") + bytes(limits.GOSSIP_BYTES),
}


@pytest.mark.parametrize("message", WRONG.values(), ids=WRONG.keys())
async def test_a_message_that_is_not_a_policy_header_of_this_run_is_dropped(tmp_path, message):
    async with MemoryNetwork().join(seed(1)) as mesh:
        listener = Listener(mesh, tmp_path)
        assert listener.bulletin.accepts_policy(LEARNER.peer, message) is False
        assert listener.bulletin.accepts_notice(LEARNER.peer, message) is False or message == WRONG["another kind"]


async def test_an_old_header_is_dropped_and_the_newest_may_be_repeated(tmp_path):
    network = MemoryNetwork()
    async with (
        announcing(network, tmp_path) as (announcer, learner),
        listening(network, 1, tmp_path / "a", to=[learner]) as listener,
    ):
        for version in (2, 1, 2, 3):
            await announcer.announce(header(version))
            await settled()
        assert [heard.version for heard in listener.headers] == [2, 2, 3]


async def test_old_notices_stay_dead_over_a_restart(tmp_path):
    network = MemoryNetwork()
    async with announcing(network, tmp_path) as (announcer, learner):
        async with listening(network, 1, tmp_path / "a", to=[learner]) as listener:
            for kind in ("pause", "resume"):
                await announcer.notify(kind, text="")
                await settled()
            assert [notice.sequence for notice in listener.notices] == [1, 2]
        async with listening(network, 1, tmp_path / "a", to=[learner]) as again:
            for sequence in (1, 2):
                old = sealed(Notice(sequence=sequence, kind="pause", text=""), "notice")
                assert not again.bulletin.accepts_notice(LEARNER.peer, old)
                await learner.publish(notice_topic(RUN), old)
            await settled()
            assert again.notices == []
    async with (
        announcing(network, tmp_path) as (restarted, learner),
        listening(network, 1, tmp_path / "a", to=[learner]) as listener,
    ):
        await restarted.notify("drain", text="")
        await settled()
        assert [notice.sequence for notice in listener.notices] == [3]


async def test_a_message_over_the_limit_is_not_published(tmp_path):
    async with announcing(MemoryNetwork(), tmp_path) as (_, mesh):
        with pytest.raises(Refused):
            await mesh.publish(policy_topic(RUN), bytes(limits.GOSSIP_BYTES + 1))


async def test_a_notice_is_obeyed_even_if_the_disk_fails(tmp_path):
    network = MemoryNetwork()
    async with (
        announcing(network, tmp_path) as (announcer, learner),
        listening(network, 1, tmp_path / "a", to=[learner]) as listener,
    ):
        (tmp_path / "a").write_text("a file where the folder should be")
        said = await announcer.notify("drain", text="")
        await settled()
        await settled()
        assert listener.notices == [said]
        again = sealed(Notice(sequence=1, kind="drain", text=""), "notice")
        assert not listener.bulletin.accepts_notice(LEARNER.peer, again)


def test_a_sequence_file_that_cannot_be_read_is_a_fault_and_not_zero(tmp_path):
    path = tmp_path / "sequence"
    assert SequenceFile(path).advance(5)
    assert SequenceFile(path).highest == 5
    assert not SequenceFile(path).advance(5)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(HostError):
        SequenceFile(path)
