"""Serving: manifests and chunks to admitted peers, within the bounds of our uplink and of what one peer may take.

Nodes and the learner serve alike. Invariant: to one peer, per manifest and ``limits.SERVED_WINDOW_S``, no more than
``limits.SERVED_FILE_RATIO`` times the payload (a chunk is begun only below that), whatever it asks for. Every wait has
a deadline. Fetching is not done here.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from rollmesh_peer.mesh.requests import Route, StreamRoute, closed_answer
from rollmesh_peer.mesh.seam import MeshStream
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.passes import PassBook
from rollmesh_peer.weights.uploads import UploadRate, UploadSlots
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.manifest import Manifest
from rollmesh_protocol.messages import ChunkRequest, ManifestRequest
from rollmesh_protocol.streams import CHUNK, MANIFEST

log = logging.getLogger("rollmesh.swarm")

_STREAM_S = 3600.0
"""A chunk stream is opened anew after this long."""


@dataclass(slots=True)
class _Account:
    since: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Payload:
    manifest: Manifest
    sent: Counter[int] = field(default_factory=Counter)
    """How often each chunk was sent."""


class ServedBytes:
    """What each peer was sent of each payload lately. Pure; at most ``limits.MAX_CONDUCT_PEERS`` accounts."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[tuple[str, bytes], _Account] = OrderedDict()

    def charge(self, peer: str, name: bytes, *, num_bytes: int, payload_bytes: int, now: float) -> None:
        """Count a chunk that is about to be sent.

        Raises:
            Refused: ``chunk.served`` when the peer has had its share.
        """
        key = (peer, name)
        account = self._accounts.get(key)
        if account is None or now - account.since > limits.SERVED_WINDOW_S:
            self._accounts.pop(key, None)
            account = self._accounts[key] = _Account(since=now)
            if len(self._accounts) > limits.MAX_CONDUCT_PEERS:
                self._accounts.popitem(last=False)
        if account.num_bytes >= limits.SERVED_FILE_RATIO * payload_bytes:
            raise Refused("chunk.served")
        account.num_bytes += num_bytes


def _nothing_known(_name: bytes, _peer: str) -> int:
    return 0


class Seeder:
    """Answers manifest and chunk streams.

    Args:
        passes: who may ask.
        upload_bytes_per_s: the owner's cap; None for none.
        num_held: (manifest name, peer) -> how many of its chunks that peer says it holds. Who holds the fewest is
            served first: a payload is out when the last peer has it, so nobody is to fall behind. (Who understates it
            gets no more than its share of the payload, only sooner.)
    """

    def __init__(
        self,
        *,
        store: EdgeStore,
        passes: PassBook,
        upload_bytes_per_s: float | None = None,
        slots: int = limits.UPLOAD_SLOTS,
        num_held: Callable[[bytes, str], int] | None = None,
    ) -> None:
        self._store = store
        self._passes = passes
        self._slots = UploadSlots(slots)
        self._rate = UploadRate(upload_bytes_per_s)
        self._num_held = num_held or _nothing_known
        self._served = ServedBytes()
        self._payloads: OrderedDict[bytes, _Payload] = OrderedDict()
        self._streams: Counter[str] = Counter()
        self._takers: set[str] = set()
        self.bytes_served = 0
        """Bytes of chunks sent since the start."""
        self.chunks_served = 0

    def routes(self) -> tuple[Route | StreamRoute, ...]:
        """What the router serves."""
        return (
            Route(
                protocol=MANIFEST,
                request_bytes=limits.SMALL_BYTES,
                answer_bytes=limits.MANIFEST_BYTES,
                handle=self.serve_manifest,
                deadline_s=limits.TRANSFER_S,
                admit=self._passes.require,
            ),
            StreamRoute(protocol=CHUNK, handle=self.serve_chunks, deadline_s=_STREAM_S),
        )

    def take_takers(self) -> frozenset[str]:
        """The peers that took chunks since this was last asked."""
        takers, self._takers = frozenset(self._takers), set()
        return takers

    def chunks_sent_once(self, name: bytes) -> int:
        """How many different chunks of a payload were sent to anybody since the start."""
        payload = self._payloads.get(name)
        return len(payload.sent) if payload else 0

    async def serve_manifest(self, peer: str, message: bytes) -> bytes:
        """The sealed manifest that ``peer`` asks for.

        Raises:
            Refused: malformed, not admitted, or ``request.unknown``.
        """
        request = ManifestRequest.decode(message, limit=limits.SMALL_BYTES)
        self._passes.require(peer)
        envelope = self._store.envelope(request.name)  # in memory: a thread for each would be what a flood is after
        if envelope is None:
            raise Refused("request.unknown", "this peer does not hold that manifest")
        return envelope

    async def serve_chunks(self, stream: MeshStream) -> None:
        """Answer chunk requests on one stream until the peer closes it, and wants no more, or asks nothing for a while.

        Raises:
            Refused: malformed, not admitted, busy, or not here; the stream ends with it.
        """
        peer = stream.peer
        self._passes.require(peer)
        if self._streams[peer] >= limits.MAX_CHUNK_STREAMS_PER_PEER:
            raise Refused("request.busy", "too many chunk streams")
        self._streams[peer] += 1
        fault: LinkLost | Refused | None = None
        try:
            async with trio.open_nursery() as nursery:
                put, get = trio.open_memory_channel[bytes | Refused](0)
                nursery.start_soon(self._hear, stream, put, nursery.cancel_scope)
                try:
                    await self._answer(stream, get)
                except (LinkLost, Refused) as error:
                    fault = error
                nursery.cancel_scope.cancel()
        finally:
            self._streams[peer] -= 1
            self._streams += Counter()
        if fault is not None:
            raise fault
        await stream.reset()

    async def _hear(
        self, stream: MeshStream, requests: trio.MemorySendChannel[bytes | Refused], talk: trio.CancelScope
    ) -> None:
        """Pass requests on, and stop whatever is done for the peer when it gives the stream up.

        So an ask that the peer has withdrawn costs nothing: it leaves the queue for our uplink, or the sending ends.
        """
        try:
            while True:
                await requests.send(await stream.receive(limits.SMALL_BYTES))
        except Refused as refusal:
            await requests.send(refusal)
        except LinkLost:
            talk.cancel()

    async def _answer(self, stream: MeshStream, requests: trio.MemoryReceiveChannel[bytes | Refused]) -> None:
        while True:
            with trio.move_on_after(limits.CHUNK_IDLE_S) as idle:
                message = await requests.receive()
            if idle.cancelled_caught:
                return
            if isinstance(message, Refused):
                raise message
            request = ChunkRequest.decode(message, limit=limits.SMALL_BYTES)
            for index in request.indices:
                await self._send_chunk(stream, request.manifest, index)

    async def _send_chunk(self, stream: MeshStream, name: bytes, index: int) -> None:
        peer = stream.peer
        self._passes.require(peer)
        payload = await self._payload(name)
        if index >= payload.manifest.chunk_count:
            raise Refused("request.unknown", "no such chunk here")
        length = payload.manifest.chunk_length(index)
        async with self._slots.slot(peer, sent=payload.sent.get(index, 0), num_held=self._num_held(name, peer)):
            await self._rate.spend(length)
            chunk = await trio.to_thread.run_sync(self._store.read_chunk, name, index)
            self._served.charge(
                peer, name, num_bytes=length, payload_bytes=payload.manifest.payload_bytes, now=trio.current_time()
            )
            payload.sent[index] += 1
            with trio.move_on_after(limits.TRANSFER_S) as sending:
                await stream.send(closed_answer(chunk))
        if sending.cancelled_caught:
            await stream.reset()
            raise LinkLost("a peer took too long to read a chunk")
        self.bytes_served += length
        self.chunks_served += 1
        if len(self._takers) < limits.MAX_CONDUCT_PEERS:
            self._takers.add(peer)

    async def _payload(self, name: bytes) -> _Payload:
        """The manifest, and how often each chunk was sent; of the newest few payloads."""
        payload = self._payloads.get(name)
        if payload is None:
            manifest = self._store.manifest(name)
            if manifest is None:
                raise Refused("request.unknown", "that manifest is not held here")
            payload = self._payloads.setdefault(name, _Payload(manifest))
            if len(self._payloads) > limits.MAX_EDGES:
                self._payloads.popitem(last=False)
        self._payloads.move_to_end(name)
        return payload
