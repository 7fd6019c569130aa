"""Gossip over real sockets, against peers that publish what they should not."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise

import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.validators import PUBSUB_SIGNING_PREFIX

from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_peer.mesh.keeping import LinkKeeper
from rollmesh_protocol import limits
from tests.support.mesh_hostile import attack, begin, prefixed, stock_host
from tests.support.mesh_worlds import eventually, gossip_is_up, seed

TOPIC = "/rollmesh/1/run/policy"
MESHSUB = "/meshsub/1.1.0"
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def listening(number):
    return open_mesh(HostOptions(key_seed=seed(number), listen=LOOPBACK))


@asynccontextmanager
async def line(count):
    """``count`` meshes in a line: only neighbours are linked; the first is the learner."""
    async with AsyncExitStack() as stack:
        meshes = [await stack.enter_async_context(listening(number + 1)) for number in range(count)]
        for left, right in pairwise(meshes):
            await right.connect(left.addresses[0])
        yield meshes


def listen_to(learner, *meshes):
    """Each accepts the learner's messages only, as the node's validator does."""
    return [mesh.subscribe(TOPIC, accept=lambda author, _message: author == learner) for mesh in meshes]


async def drain(channel, *, quiet_s=0.4, is_awaited=True):
    """Everything that arrives until nothing does for a while; the first message, if one ``is_awaited``, in its time."""
    messages = []
    if is_awaited:
        with trio.fail_after(20):
            messages.append(await channel.receive())
    while True:
        with trio.move_on_after(quiet_s) as scope:
            messages.append(await channel.receive())
        if scope.cancelled_caught:
            return messages


def signed(host, data, *, topic=TOPIC, seqno=b"12345678"):
    """A pubsub message of a stock host, properly signed by it."""
    message = rpc_pb2.Message(data=data, topicIDs=[topic], from_id=host.get_id().to_bytes(), seqno=seqno)
    message.signature = host.get_private_key().sign(PUBSUB_SIGNING_PREFIX.encode() + message.SerializeToString())
    message.key = host.get_public_key().serialize()
    return message


def subscribers(mesh):
    """The peers that a mesh knows to be subscribed."""
    return {str(peer) for peer in mesh._gossip.peer_topics.get(TOPIC, ())}


async def publish_raw(stream, *messages):
    await stream.write(prefixed(rpc_pb2.RPC(publish=list(messages)).SerializeToString()))


async def test_a_stranger_is_neither_heard_nor_passed_on():
    async with line(3) as (learner, middle, far), stock_host() as stranger:
        at_middle, at_far = listen_to(learner.peer_id, middle, far)
        judged = []
        third = far.subscribe(TOPIC, accept=lambda author, message: judged.append((author, message)) or True)
        at_far.close()
        await gossip_is_up(learner, middle, far, topic=TOPIC)
        stream = await begin(await attack(stranger, middle.addresses[0]), MESHSUB)
        await publish_raw(stream, signed(stranger, b"I am the learner"))
        await learner.publish(TOPIC, b"policy 1")
        assert await drain(at_middle) == [b"policy 1"]
        assert await drain(third) == [b"policy 1"]
        assert judged == [(learner.peer_id, b"policy 1")]


async def test_a_genuine_message_that_a_stranger_repeats_is_dropped_and_does_not_shadow_the_original():
    """The stranger is first with the learner's words, which must not make the learner's own a repetition."""
    async with line(3) as (learner, middle, far), stock_host() as stranger:
        at_middle, at_far = listen_to(learner.peer_id, middle, far)
        await gossip_is_up(learner, middle, far, topic=TOPIC)
        streams = [await begin(await attack(stranger, mesh.addresses[0]), MESHSUB) for mesh in (middle, far)]
        for stream in streams:
            await publish_raw(stream, signed(stranger, b"policy 1"))
        await trio.sleep(0.2)
        await learner.publish(TOPIC, b"policy 1")
        assert await drain(at_middle) == [b"policy 1"]
        assert await drain(at_far) == [b"policy 1"]
        for number in range(5):
            for stream in streams:
                await publish_raw(stream, signed(stranger, b"policy 1", seqno=b"1234567%d" % number))
        assert await drain(at_middle, is_awaited=False) == []
        assert await drain(at_far, quiet_s=0.1, is_awaited=False) == []


async def test_a_message_under_the_learners_name_needs_the_learners_signature():
    async with line(2) as (learner, middle), stock_host() as stranger:
        (heard,) = listen_to(learner.peer_id, middle)
        await gossip_is_up(learner, middle, topic=TOPIC)
        stream = await begin(await attack(stranger, middle.addresses[0]), MESHSUB)
        forged = signed(stranger, b"policy 9")
        forged.from_id = ID.from_base58(learner.peer_id).to_bytes()
        await publish_raw(stream, forged)
        await learner.publish(TOPIC, b"policy 1")
        assert await drain(heard) == [b"policy 1"]


async def test_a_flood_is_cut_to_the_pace_and_starves_nobody():
    async with line(2) as (learner, middle), stock_host() as flooder:
        judged = []

        def judge(author, message):
            judged.append(author)
            return author == learner.peer_id or message.startswith(b"flood")

        heard = middle.subscribe(TOPIC, accept=judge)
        await gossip_is_up(learner, middle, topic=TOPIC)
        stream = await begin(await attack(flooder, middle.addresses[0]), MESHSUB)
        started = trio.current_time()
        for number in range(50):
            await publish_raw(stream, signed(flooder, b"flood %d" % number, seqno=number.to_bytes(8, "big")))
        await learner.publish(TOPIC, b"policy 1")
        messages = await drain(heard)
        more = limits.GOSSIP_PER_TOPIC_S * (trio.current_time() - started)
        assert b"policy 1" in messages
        assert limits.GOSSIP_PER_TOPIC_S <= len(messages) - 1 <= limits.GOSSIP_PER_TOPIC_S + more
        assert str(flooder.get_id()) in middle.links()  # a burst is no crime


async def test_a_flood_that_goes_on_ends_the_connection():
    async with line(2) as (learner, middle), stock_host() as flooder:
        (heard,) = listen_to(learner.peer_id, middle)
        await gossip_is_up(learner, middle, topic=TOPIC)
        connection = await attack(flooder, middle.addresses[0])
        stream = await begin(connection, MESHSUB)
        with trio.move_on_after(10):
            for number in range(2000):
                if connection.is_closed:
                    break
                with suppress(BaseLibp2pError):
                    await publish_raw(stream, signed(flooder, b"%d" % number, seqno=number.to_bytes(8, "big")))
        await eventually(lambda: str(flooder.get_id()) not in middle.links())
        await learner.publish(TOPIC, b"policy 1")
        assert await drain(heard) == [b"policy 1"]


async def test_an_oversized_rpc_is_not_read_and_gossip_goes_on():
    async with line(2) as (learner, middle), stock_host() as stranger:
        (heard,) = listen_to(learner.peer_id, middle)
        await gossip_is_up(learner, middle, topic=TOPIC)
        stream = await begin(await attack(stranger, middle.addresses[0]), MESHSUB)
        for _ in range(3):
            with suppress(BaseLibp2pError):
                await publish_raw(stream, signed(stranger, bytes(limits.GOSSIP_RPC_BYTES)))
            await trio.sleep(0.05)
        with pytest.raises(BaseLibp2pError):
            await stream.read(1)
        stream = await begin(await attack(stranger, middle.addresses[0]), MESHSUB)  # the connection itself lives
        await learner.publish(TOPIC, b"policy 1")
        assert await drain(heard) == [b"policy 1"]


async def test_an_oversized_message_is_dropped_by_whoever_gets_it():
    async with listening(1) as mesh, stock_host() as stranger:
        heard = mesh.subscribe(TOPIC, accept=lambda _author, _message: True)
        await trio.sleep(0.2)
        stream = await begin(await attack(stranger, mesh.addresses[0]), MESHSUB)
        for size in (limits.GOSSIP_BYTES + 1, limits.GOSSIP_BYTES):
            await publish_raw(stream, signed(stranger, bytes(size)))
        assert [len(message) for message in await drain(heard)] == [limits.GOSSIP_BYTES]


async def test_an_iwant_that_repeats_an_id_is_answered_once():
    """The library answers with one copy for each repetition: a gigabyte for a megabyte."""
    async with line(2) as (learner, middle), stock_host() as stranger:
        (heard,) = listen_to(learner.peer_id, middle)
        await gossip_is_up(learner, middle, topic=TOPIC)
        await learner.publish(TOPIC, bytes(60_000))
        await heard.receive()
        (mid,) = learner._gossip.overlay.mcache.msgs
        sizes = []

        async def count(stream):
            while True:
                sizes.append(len(await stream.read(1 << 20)))

        stranger.set_stream_handler(MESHSUB, count)
        stream = await begin(await attack(stranger, learner.addresses[0]), MESHSUB)
        await trio.sleep(1)  # the learner opens its own stream to us
        before = sum(sizes)
        await stream.write(prefixed(rpc_pb2.RPC(control={"iwant": [{"messageIDs": [mid] * 500}]}).SerializeToString()))
        await trio.sleep(0.5)
        assert 60_000 < sum(sizes) - before < 130_000


async def test_a_publisher_that_restarts_is_heard_again_through_others():
    """Its sequence numbers repeat, as when its clock was set back: by them the library would drop its messages."""
    async with listening(2) as middle, listening(3) as far, trio.open_nursery() as nursery:
        await far.connect(middle.addresses[0])
        learner_id = ""
        heard = None
        listen = LOOPBACK
        for life in range(3):
            async with open_mesh(HostOptions(key_seed=seed(1), listen=listen)) as learner:
                if heard is None:
                    learner_id = learner.peer_id
                    listen = (learner.addresses[0].partition("/p2p/")[0],)
                    heard = listen_to(learner_id, middle, far)
                    keeper = LinkKeeper(middle, learner.addresses)
                    nursery.start_soon(keeper.run)
                learner._gossip.counter = 1000
                with trio.fail_after(30):
                    await keeper.wait_linked()
                    await eventually(lambda: subscribers(learner) >= {middle.peer_id})
                for number in range(3):
                    await learner.publish(TOPIC, b"life %d, message %d" % (life, number))
                wanted = [b"life %d, message %d" % (life, number) for number in range(3)]
                for channel in heard:
                    with trio.fail_after(20):
                        assert sorted([await channel.receive() for _ in range(3)]) == wanted
            with trio.fail_after(20):
                await middle.wait_link_lost(learner_id)
        nursery.cancel_scope.cancel()


async def test_a_late_subscriber_hears_what_comes_next():
    async with line(2) as (learner, middle):
        await learner.publish(TOPIC, b"policy 1")
        (heard,) = listen_to(learner.peer_id, middle)
        await gossip_is_up(learner, middle, topic=TOPIC)
        await learner.publish(TOPIC, b"policy 2")
        assert (await drain(heard))[-1] == b"policy 2"


async def test_many_peers_around_one_learner_all_hear():
    async with AsyncExitStack() as stack:
        learner = await stack.enter_async_context(listening(1))
        nodes = [
            await stack.enter_async_context(open_mesh(HostOptions(key_seed=seed(number)))) for number in range(2, 22)
        ]
        heard = listen_to(learner.peer_id, *nodes)
        for node in nodes:
            await node.connect(learner.addresses[0])
        await eventually(lambda: len(subscribers(learner)) == len(nodes))
        started = trio.current_time()
        await learner.publish(TOPIC, b"policy 1")
        with trio.fail_after(20):
            for channel in heard:
                assert await channel.receive() == b"policy 1"
        assert trio.current_time() - started < 5
