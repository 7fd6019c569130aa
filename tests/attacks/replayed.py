"""A peer that replays old announcements of the learner, word for word, to nodes that follow its run.

What it sends was once true and bears the learner's signature, twice: as author of the gossip message and in the
envelope. The victims are the honest node, which has heard it before, and one that came later, which never has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.pubsub.pb import rpc_pb2

from rollmesh_protocol import limits, streams
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.errors import LinkLost
from rollmesh_protocol.messages import PeersAnswer, PeersRequest, PolicyHeader
from rollmesh_protocol.streams import policy_topic
from tests.attacks.attack import Attack, live, open_stubborn
from tests.attacks.place import HONEST
from tests.integration.test_mesh_gossip import MESHSUB, publish_raw, signed
from tests.support.attacker import Attacker
from tests.support.mesh_hostile import attack, begin, is_closed, stock_host

if TYPE_CHECKING:
    from tests.attacks.place import Lab

LATECOMER: Final = "latecomer"
OLD: Final = 2
"""Announcements that are waited for before one more makes them old."""
ROUNDS: Final = 10
ROUND_S: Final = 0.5
WAIT_S: Final = 280.0


class OldNotices(Attack):
    name = "old notices replayed"
    kind = "protocol"

    async def play(self, lab: Lab) -> None:
        async with (
            open_stubborn(lab.join, gossip=True) as one,
            stock_host() as stranger,
            trio.open_nursery() as nursery,
        ):
            self.peers.append(one.peer)
            nursery.start_soon(live, one)
            with trio.move_on_after(WAIT_S):
                await self._replay(lab, one, stranger)
            nursery.cancel_scope.cancel()

    async def _replay(self, lab: Lab, one: Attacker, stranger) -> None:
        heard = record(one)
        while len(heard) <= OLD:
            await trio.sleep(0.2)
        late = await lab.system.add_node(LATECOMER, "node.role=seed", f"weights.base={lab.model}")
        try:
            newest = max(heard)
            old = [heard[version] for version in sorted(heard) if version < newest]
            before = {name: await until_held(lab, name, newest) for name in (HONEST, LATECOMER)}
            connections = [await attack(stranger, at) for at in await addresses(one, lab, before)]
            told = [await begin(connection, MESHSUB) for connection in connections]
            lowest = dict(before)
            sent = 0
            for number in range(ROUNDS):
                for stream in told:
                    with suppress(BaseLibp2pError, LinkLost):
                        for message in replays(old, stranger, number=number):
                            await publish_raw(stream, message)
                            sent += 1
                await trio.sleep(ROUND_S)
                for name in before:
                    lowest[name] = min(lowest[name], await held(lab, name))
            closed = [await is_closed(connection, within=0.1) for connection in connections]
        finally:
            late.kill()
            await late.wait()
        self.outcome.no_effect = bool(sent) and all(lowest[name] >= before[name] for name in before)
        ends = {name: f"{before[name]} -> {lowest[name]}" for name in before}
        self.outcome.note = (
            f"{sent} announcements of versions before {newest} to two nodes, which held at the least {ends}; "
            f"{sum(closed)} of {len(closed)} put the replayer out"
        )


def record(one: Attacker) -> dict[int, rpc_pb2.Message]:
    """The learner's announcements by version, as they come from now on, whole."""
    heard: dict[int, rpc_pb2.Message] = {}
    assert one.card is not None
    run, topic = one.card.run, policy_topic(one.card.run)
    one.mesh.subscribe(topic, accept=lambda _author, _message: True)
    gossip = one.mesh._gossip
    pass_on = gossip.push_msg

    async def listen(forwarder, message) -> None:
        if list(message.topicIDs) == [topic]:
            body = Envelope.decode(message.data, limit=limits.GOSSIP_BYTES).open(
                run=run, kind="policy", signer=one.learner
            )
            heard[PolicyHeader.decode(body, limit=limits.GOSSIP_BYTES).version] = message
        await pass_on(forwarder, message)

    gossip.push_msg = listen
    return heard


def replays(old: list[rpc_pb2.Message], stranger, *, number: int) -> Iterator[rpc_pb2.Message]:
    """Each as it was; as if the learner said it again; and as the stranger's own."""
    seqno = b"again%03d" % number
    for message in old:
        yield message
        again = rpc_pb2.Message()
        again.CopyFrom(message)
        again.seqno = seqno
        yield again
        yield signed(stranger, message.data, topic=message.topicIDs[0], seqno=seqno)


async def held(lab: Lab, name: str) -> int:
    """The version that a node says it holds."""
    status = await lab.system.until_node(name, lambda _status: True)
    return status.version_held


async def until_held(lab: Lab, name: str, version: int) -> int:
    """Wait until a node holds this version or a newer one, which is returned."""
    while True:
        with suppress(AssertionError):  # it is starting, on busy cores
            found = await held(lab, name)
            if found >= version:
                return found
        await trio.sleep(0.2)


async def addresses(one: Attacker, lab: Lab, names: dict[str, int]) -> list[str]:
    """Where these nodes can be dialled, as the learner tells everybody."""
    marks = ",".join("?" * len(names))
    wanted = {peer for (peer,) in lab.rows(f"SELECT peer FROM nodes WHERE name IN ({marks})", *names)}
    while True:
        raw = await one.ask(streams.PEERS, PeersRequest(count=limits.MAX_NEIGHBOURS).encode())
        found = {peer.peer: peer.addresses[0] for peer in PeersAnswer.decode(raw, limit=limits.PEERS_BYTES).peers}
        if wanted <= found.keys():
            return [found[peer] for peer in wanted]
        await trio.sleep(1)
