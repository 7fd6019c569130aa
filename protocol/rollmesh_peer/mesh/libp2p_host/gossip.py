"""GossipSub behind a gate: the library keeps the overlay, and sees only what passed our bounds.

Of every RPC only this is handed on: subscriptions to our topics, messages with one topic that we are in and a sane size
and pace, control for those topics with short lists. The author must have signed, and the subscriber's judge must accept
author and content, or the message is neither delivered nor passed on. Mends of the library: any error in here ended the
host; an IWANT that repeats one id was answered with that many copies; lists named by strangers were kept for ever; a
publisher whose sequence numbers repeat after a restart was not forwarded.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import trio
from libp2p.abc import IHost, INetStream
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub
from libp2p.pubsub.mcache import CacheEntry, MessageCache
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.validators import signature_validator
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from rollmesh_peer.mesh.libp2p_host.yamux import Report
from rollmesh_peer.mesh.rates import TokenBucket
from rollmesh_peer.mesh.subscriptions import Subscription, nothing
from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import short

log = logging.getLogger("rollmesh.mesh.gossip")

_DEGREE, _DEGREE_LOW, _DEGREE_HIGH = 6, 4, 12
"""Neighbours to whom messages of others are passed on: the values of the GossipSub specification."""
_HEARTBEAT_S: Final = 1
_MAX_ENTRIES: Final = 16
"""Messages, subscriptions, or control entries of one kind in one RPC."""
_MAX_IDS: Final = 64
"""Message ids in one RPC, asked for or offered."""
_ID_BYTES: Final = 32
_MAX_BACK_OFF_S: Final = 120
_RPCS_PER_S: Final = 10.0
"""An honest neighbour sends two a second, and one for each message that is passed on."""
_RPC_BURST: Final = 100
_SEEN: Final = 4096
"""Message ids remembered: minutes of the pace that is let through."""
_FLOOD_WEIGHT: Final = 0.05
"""Of an offence: honest peers burst now and then, so it takes hundreds of messages too many."""


def message_id(message: rpc_pb2.Message) -> bytes:
    """By author, topic and content: a repeated sequence number is no repetition, a stranger's copy another message."""
    digest = hashlib.sha256()
    for part in (message.from_id, "\n".join(message.topicIDs).encode(), message.data):
        digest.update(len(part).to_bytes(4, "big"))
        digest.update(part)
    return digest.digest()


class _ContentCache(MessageCache):
    """The library's cache of recent messages under the same ids that everything else uses."""

    def put(self, msg: rpc_pb2.Message) -> None:
        mid = message_id(msg)
        if mid not in self.msgs:
            self.msgs[mid] = msg
            self.history[0].append(CacheEntry(mid, list(msg.topicIDs)))


class _Seen:
    """The newest message ids. (The library's own cache has no bound, and a thread.)"""

    def __init__(self) -> None:
        self._ids: OrderedDict[bytes, None] = OrderedDict()

    def has(self, key: bytes) -> bool:
        return key in self._ids

    def add(self, key: bytes) -> bool:
        is_new = key not in self._ids
        self._ids[key] = None
        while len(self._ids) > _SEEN:
            self._ids.popitem(last=False)
        return is_new


class _Overlay(GossipSub):
    """Who passes messages to whom. No scores: honest peers forward only what the judge accepts."""

    def __init__(self) -> None:
        super().__init__(
            protocols=[PROTOCOL_ID_V11],
            degree=_DEGREE,
            degree_low=_DEGREE_LOW,
            degree_high=_DEGREE_HIGH,
            heartbeat_interval=_HEARTBEAT_S,
            do_px=False,
            adaptive_gossip_enabled=False,
            spam_protection_enabled=False,
            eclipse_protection_enabled=False,
        )
        self.scorer = None
        self.mcache = _ContentCache(window_size=3, history_size=5)

    def _get_peers_to_send(
        self, topic_ids: Iterable[str], msg_forwarder: ID, origin: ID, msg_id: bytes | None = None
    ) -> Iterable[ID]:
        """Our own messages go to every subscriber that we are connected to; those of others along the overlay."""
        if self.pubsub is not None and msg_forwarder == self.pubsub.my_id:
            return {peer for topic in topic_ids for peer in self.pubsub.peer_topics.get(topic, ())}
        return super()._get_peers_to_send(topic_ids, msg_forwarder, origin, msg_id)

    def _check_equivocation(self, msg: rpc_pb2.Message) -> bool:  # noqa: ARG002 - the library's signature
        """Always in order: ids are by content, and the project's own envelopes carry a sequence."""
        return True

    async def publish(self, msg_forwarder: ID, pubsub_msg: rpc_pb2.Message) -> None:
        """Pass a message on. (The library keeps a time stamp of each for ever.)"""
        await super().publish(msg_forwarder, pubsub_msg)
        self.recent_message_deliveries.clear()


class Gossip(Pubsub):
    """The gate, and the subscribers behind it."""

    def __init__(self, host: IHost, *, report: Report) -> None:
        self.overlay: Final = _Overlay()
        super().__init__(
            host,
            self.overlay,
            strict_signing=True,
            msg_id_constructor=message_id,
            max_subscriptions_per_peer=limits.MAX_TOPICS_PER_PEER,
            max_inbound_rpc_size=limits.GOSSIP_RPC_BYTES,
        )
        self.seen_messages.stop()
        self.seen_messages = _Seen()  # type: ignore[assignment]
        self.counter = time.time_ns()
        self._report = report
        self._subscribers: dict[str, Subscription] = {}
        self._rpcs: dict[ID, TokenBucket] = {}
        self._messages: dict[tuple[ID, str], TokenBucket] = {}

    # --- our own side ------------------------------------------------------------------------------------------------
    def listen(self, subscription: Subscription) -> None:
        """Judge and deliver by this subscription from now on. To hear anything, :meth:`subscribe` to its topic too."""
        self._subscribers[subscription.topic] = subscription

    async def send(self, topic: str, message: bytes) -> None:
        """Publish under our own key.

        Raises:
            Refused: ``request.too_large``.
        """
        if len(message) > limits.GOSSIP_BYTES:
            raise Refused("request.too_large", f"a gossip message has at most {limits.GOSSIP_BYTES} bytes")
        if topic not in self._subscribers:
            self.listen(Subscription(topic, accept=nothing))
        await self.subscribe(topic)
        await self.publish(topic, message)

    # --- what others send --------------------------------------------------------------------------------------------
    async def continuously_read_stream(self, stream: INetStream) -> None:
        """Read one peer's RPCs until its stream ends; an error here is an offence of that peer."""
        peer_id = stream.muxed_conn.peer_id
        while True:
            raw = await read_varint_prefixed_bytes_limited(stream, limits.GOSSIP_RPC_BYTES)
            if not self._pace(peer_id).take(trio.current_time()):
                self._report(str(peer_id), "gossip RPCs in a flood", weight=_FLOOD_WEIGHT)
                continue
            rpc = self._cleaned(rpc_pb2.RPC.FromString(raw))
            for subscription in rpc.subscriptions:
                self.handle_subscription(peer_id, subscription)
            for message in rpc.publish:
                await self.push_msg(peer_id, message)
            if rpc.HasField("control"):
                await self.router.handle_rpc(rpc, peer_id)

    async def push_msg(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> None:
        """Deliver and pass on one message if it is new, in pace, signed by its author, and accepted."""
        mid = message_id(msg)
        if self.seen_messages.has(mid):
            return
        if msg_forwarder != self.my_id and not self._is_acceptable(msg_forwarder, msg):
            return
        self.seen_messages.add(mid)
        await self.router.publish(msg_forwarder, msg)

    def _handle_dead_peer(self, peer_id: ID) -> None:
        """The library's books are closed on a peer; its queue of such peers must outlive a mistake in them."""
        try:
            super()._handle_dead_peer(peer_id)
        except Exception:
            log.exception("taking %s out of gossip failed", short(str(peer_id)))
        if not self._peer_is_connected(peer_id):
            self._forget_pace(peer_id)

    def _is_acceptable(self, forwarder: ID, message: rpc_pb2.Message) -> bool:
        topic = message.topicIDs[0]
        now = trio.current_time()
        key = (forwarder, topic)
        pace = self._messages.get(key)
        if pace is None:
            rate = float(limits.GOSSIP_PER_TOPIC_S)
            pace = self._messages[key] = TokenBucket(rate=rate, burst=rate, now=now)
        if not pace.take(now):
            self._report(str(forwarder), f"gossip on {topic} in a flood", weight=_FLOOD_WEIGHT)
            return False
        author = str(ID(message.from_id))
        if author == str(self.my_id) or self._subscribers[topic].takes_nothing:
            return False
        if not signature_validator(message):
            self._report(str(forwarder), "a gossip message that its author did not sign")
            return False
        return self._subscribers[topic].offer(author, message.data)

    def _forget_pace(self, peer_id: ID) -> None:
        self._rpcs.pop(peer_id, None)
        for key in [key for key in self._messages if key[0] == peer_id]:
            del self._messages[key]

    def _pace(self, peer_id: ID) -> TokenBucket:
        pace = self._rpcs.get(peer_id)
        if pace is None:
            pace = self._rpcs[peer_id] = TokenBucket(rate=_RPCS_PER_S, burst=_RPC_BURST, now=trio.current_time())
        return pace

    def _cleaned(self, rpc: rpc_pb2.RPC) -> rpc_pb2.RPC:
        """A copy of ``rpc`` with nothing but what we take."""
        clean = rpc_pb2.RPC()
        clean.subscriptions.extend(s for s in rpc.subscriptions[:_MAX_ENTRIES] if _is_topic(s.topicid))
        clean.publish.extend(m for m in rpc.publish[:_MAX_ENTRIES] if self._is_sane(m))
        if rpc.HasField("control"):
            self._clean_control(rpc.control, into=clean.control)
        return clean

    def _is_sane(self, message: rpc_pb2.Message) -> bool:
        return (
            len(message.topicIDs) == 1
            and message.topicIDs[0] in self._subscribers
            and len(message.data) <= limits.GOSSIP_BYTES
            and max(len(message.from_id), len(message.seqno), len(message.signature), len(message.key)) <= 128
        )

    def _clean_control(self, control: rpc_pb2.ControlMessage, *, into: rpc_pb2.ControlMessage) -> None:
        for graft in control.graft[:_MAX_ENTRIES]:
            if graft.topicID in self._subscribers:
                into.graft.add(topicID=graft.topicID)
        for prune in control.prune[:_MAX_ENTRIES]:
            if prune.topicID in self._subscribers:
                into.prune.add(topicID=prune.topicID, backoff=min(prune.backoff, _MAX_BACK_OFF_S))
        for have in control.ihave[:_MAX_ENTRIES]:
            if have.topicID in self._subscribers:
                into.ihave.add(topicID=have.topicID, messageIDs=_ids(have.messageIDs))
        wanted = _ids(mid for want in control.iwant[:_MAX_ENTRIES] for mid in want.messageIDs[:_MAX_IDS])
        if wanted:
            into.iwant.add(messageIDs=wanted)


def _ids(found: Iterable[bytes]) -> list[bytes]:
    """At most ``_MAX_IDS`` different ids of our own form."""
    ids: dict[bytes, None] = {}
    for mid in found:
        if len(mid) == _ID_BYTES:
            ids[bytes(mid)] = None
        if len(ids) >= _MAX_IDS:
            break
    return list(ids)


def _is_topic(topic: str) -> bool:
    return topic.startswith("/rollmesh/") and len(topic) <= limits.MAX_TOPIC_CHARS
