"""What a flood is made of: one function for each kind, called again and again by every identity at its rate.

Each says what it does in one line, and how often a second one identity does it. Requests are well-formed and signed
unless the kind is about those that are not.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils import encode_uvarint

from rollmesh_peer.mesh.libp2p_host.yamux_frames import DATA, FIN, PING, RST, SYN, WINDOW, frame
from rollmesh_protocol import limits, streams
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.messages import (
    MAJOR,
    ChunkRequest,
    EdgesRequest,
    EngineInfo,
    HaveRequest,
    Hello,
    LeaseRequest,
    ManifestRequest,
    PeersRequest,
    ReturnRequest,
)
from rollmesh_protocol.rollout import Result, SampleResult, Segment
from rollmesh_protocol.status import StatusRequest
from tests.lab.flood_peer import FloodPeer, framed, proposal

Act = Callable[[FloodPeer], Awaitable[None]]
MESHSUB = "/meshsub/1.1.0"
JUNK = random.Random(1).randbytes(limits.RESULT_BYTES)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One flood."""

    act: Act
    rate: float
    """Times a second that each identity acts."""
    is_member: bool = True
    """False for strangers, who never say hello."""
    is_raw: bool = False
    """True when ``act`` needs no connection of the peer: it makes its own."""


def hello() -> bytes:
    engine = EngineInfo(backend="flood", dtype="bfloat16", device="cpu")
    return Hello(
        majors=(MAJOR,), software="flood", name="flood", role="seed", engine=engine, addresses=(), invite=None
    ).encode()


def lease_request(peer: FloodPeer, groups: int = 16) -> bytes:
    return LeaseRequest(groups=groups, version_held=1, root_held=peer.root, tokens_per_s=1e6, waiting_for="").encode()


def unknown_result(peer: FloodPeer) -> bytes:
    """A result that only the ledger can tell from a real one."""
    segments = (Segment(first_token=0, root=peer.root or bytes(32)),)
    sample = SampleResult(index=0, tokens=bytes(48), logprobs=bytes(48), finish="length", segments=segments)
    result = Result(lease_id=secrets.token_bytes(16), samples=(sample,) * 4, engine="flood", generate_s=0.1)
    return seal(result.encode(), run=peer.run, kind="result", identity=peer.identity).encode()


def request(protocol: str, body: Callable[[FloodPeer], bytes]) -> Act:
    async def act(peer: FloodPeer) -> None:
        await peer.fire(protocol, body(peer))

    return act


def large(size: int) -> Act:
    """A result of junk."""

    async def act(peer: FloodPeer) -> None:
        number = await peer.fire(streams.SUBMIT, None, flags=0)
        await peer.pour(number, size.to_bytes(4, "big") + JUNK[: min(size, len(JUNK))])

    return act


async def held_back(peer: FloodPeer) -> None:
    """The largest results, all but their last byte: they count as arriving for two minutes."""
    number = await peer.fire(streams.SUBMIT, None, flags=0)
    await peer.pour(number, limits.RESULT_BYTES.to_bytes(4, "big") + JUNK[:-1])


def bomb(size: int) -> bytes:
    """An array that says it has more elements than anybody has memory, and brings a few million of them."""
    return b"\x81\xa4body\xdd\xff\xff\xff\xff" + b"\xc0" * (size - 11)


def compressed_bomb() -> bytes:
    """A zstandard frame that declares a TiB, where a result is expected."""
    return b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x03\x00\x00" + bytes(1000)


async def chunk_stream(peer: FloodPeer) -> None:
    """Ten requests for eight chunks each on one stream."""
    names = peer.manifests or [bytes(32)]
    body = framed(ChunkRequest(manifest=names[0], indices=tuple(range(8))).encode())
    number = await peer.fire(streams.CHUNK, None, flags=0)
    await peer.write((frame(DATA, 0, number, len(body)) + body) * 10)


async def have_stream(peer: FloodPeer) -> None:
    """A stream about a payload that does not exist."""
    body = HaveRequest(admission=peer.admission, manifest=secrets.token_bytes(32), bitmap=bytes(limits.HAVE_BYTES // 2))
    await peer.fire(streams.HAVE, body.encode(), flags=0)


async def gossip(peer: FloodPeer) -> None:
    """Twenty messages of its own, well signed, on the learner's topic."""
    topic = streams.policy_topic(peer.run)
    number = await peer.fire(MESHSUB, None, flags=0)
    for _ in range(20):
        message = rpc_pb2.Message(
            topicIDs=[topic], data=secrets.token_bytes(1000), seqno=secrets.token_bytes(8),
            from_id=ID.from_base58(peer.identity.peer).to_bytes(),
        )  # fmt: skip
        message.signature = peer.identity.sign(b"libp2p-pubsub:" + message.SerializeToString())
        raw = rpc_pb2.RPC(publish=[message]).SerializeToString()
        raw = encode_uvarint(len(raw)) + raw
        await peer.write(frame(DATA, 0, number, len(raw)) + raw)


async def gossip_control(peer: FloodPeer) -> None:
    """Grafts, prunes, and ids asked for and offered."""
    topic = streams.policy_topic(peer.run)
    number = await peer.fire(MESHSUB, None, flags=0)
    ids = [secrets.token_bytes(32) for _ in range(500)]
    control = {
        "graft": [{"topicID": topic}] * 50, "ihave": [{"topicID": topic, "messageIDs": ids}],
        "iwant": [{"messageIDs": ids}],
    }  # fmt: skip
    raw = rpc_pb2.RPC(control=control).SerializeToString()
    raw = encode_uvarint(len(raw)) + raw
    await peer.write((frame(DATA, 0, number, len(raw)) + raw) * 3)


async def silent_streams(peer: FloodPeer) -> None:
    """Streams on which nothing is ever said."""
    peer.counts["sent"] += 10
    await peer.write(b"".join(frame(WINDOW, SYN, peer.number(), 0) for _ in range(10)))


async def silent_requests(peer: FloodPeer) -> None:
    """Streams that agree on a protocol and then say nothing."""
    for _ in range(4):
        await peer.fire(streams.SUBMIT, None, flags=0)


async def half_closed(peer: FloodPeer) -> None:
    """Streams that are closed before anything is said, and ones closed after the first byte."""
    for _ in range(10):
        number = peer.number()
        peer.counts["sent"] += 1
        await peer.write(frame(WINDOW, SYN, number, 0) + frame(DATA, FIN, number, 1) + b"\x13")


async def rapid_reset(peer: FloodPeer) -> None:
    """Streams opened, negotiated and reset in one write: they never count as open."""
    opening = proposal(streams.STATUS) + framed(StatusRequest(page=0).encode())
    burst = bytearray()
    for _ in range(50):
        number = peer.number()
        burst += frame(WINDOW, SYN, number, 0) + frame(DATA, 0, number, len(opening)) + opening
        burst += frame(WINDOW, RST, number, 0)
    peer.counts["sent"] += 50
    await peer.write(bytes(burst))


async def pings(peer: FloodPeer) -> None:
    """A thousand pings in one write."""
    peer.counts["sent"] += 1000
    await peer.write(frame(PING, SYN, 0, 1) * 1000)


async def crumbs(peer: FloodPeer) -> None:
    """A message in frames of one byte."""
    number = await peer.fire(streams.SUBMIT, None, flags=0)
    peer.counts["sent"] += 500
    header = limits.RESULT_BYTES.to_bytes(4, "big")
    await peer.write(frame(DATA, 0, number, 4) + header + (frame(DATA, 0, number, 1) + b"\0") * 500)


async def drip(peer: FloodPeer) -> None:
    """A large message at one byte a second, on as many streams as are allowed."""
    number = await peer.fire(streams.SUBMIT, None, flags=0)
    await peer.write(frame(DATA, 0, number, 4) + limits.RESULT_BYTES.to_bytes(4, "big"))
    for _ in range(30):
        await trio.sleep(1)
        await peer.write(frame(DATA, 0, number, 1) + b"\0")


async def deaf(peer: FloodPeer) -> None:
    """Asks, and never reads an answer, nor anything else."""
    peer.is_deaf = True
    for _ in range(5):
        await peer.fire(streams.HELLO, hello())


async def overrun(peer: FloodPeer) -> None:
    """Ignores the window that it was granted."""
    number = await peer.fire(streams.HAVE, None, flags=0)
    for _ in range(10):
        await peer.write(frame(DATA, 0, number, 60_000) + JUNK[:60_000])


async def dark_tcp(peer: FloodPeer) -> None:
    """TCP connections that never speak."""
    peer.counts["sent"] += 1
    with trio.move_on_after(20):
        stream = await trio.open_tcp_stream(peer.target.endpoint.host, peer.target.endpoint.port)
        await stream.receive_some(1)
        peer.counts["cut off"] += 1


async def garbage_tcp(peer: FloodPeer) -> None:
    """TCP connections that speak nonsense, half of them in the shape of a handshake."""
    peer.counts["sent"] += 1
    opening = b"" if peer.counts["sent"] % 2 else b"\x13/multistream/1.0.0\n\x07/noise\n\xff\xff"
    stream = await trio.open_tcp_stream(peer.target.endpoint.host, peer.target.endpoint.port)
    async with stream:
        await stream.send_all(opening + JUNK[:2000])
        with trio.move_on_after(5):
            await stream.receive_some(100)


async def reconnect(peer: FloodPeer) -> None:
    """A whole handshake, and gone again."""
    fresh = FloodPeer(str(peer.target), peer.counts)
    peer.counts["sent"] += 1
    async with fresh.connected():
        pass


KINDS: dict[str, Kind] = {
    "hello": Kind(act=request(streams.HELLO, lambda _: hello()), rate=20),
    "lease": Kind(act=request(streams.LEASE, lease_request), rate=40),
    "lease, strangers": Kind(act=request(streams.LEASE, lease_request), rate=40, is_member=False),
    "submit, unknown leases": Kind(act=request(streams.SUBMIT, unknown_result), rate=20),
    "submit, forged": Kind(act=request(streams.SUBMIT, lambda p: unknown_result(p)[:-1] + b"\0"), rate=20),
    "submit, largest": Kind(act=large(limits.RESULT_BYTES), rate=0.5),
    "submit, held back": Kind(act=held_back, rate=0.5),
    "submit, largest, strangers": Kind(act=large(limits.RESULT_BYTES), rate=0.5, is_member=False),
    "submit, one byte too large": Kind(act=large(limits.RESULT_BYTES + 1), rate=5),
    "submit, bombs": Kind(act=request(streams.SUBMIT, lambda _: bomb(200_000)), rate=4),
    "submit, compressed bombs": Kind(act=request(streams.SUBMIT, lambda _: compressed_bomb()), rate=20),
    "return": Kind(
        act=request(
            streams.RETURN,
            lambda _: ReturnRequest(lease_ids=tuple(secrets.token_bytes(16) for _ in range(64)), code="x").encode(),
        ),
        rate=40,
    ),
    "edges": Kind(act=request(streams.EDGES, lambda _: EdgesRequest(root=None).encode()), rate=40),
    "peers": Kind(act=request(streams.PEERS, lambda _: PeersRequest(count=16).encode()), rate=40),
    "manifest": Kind(
        act=request(streams.MANIFEST, lambda p: ManifestRequest(name=(p.manifests or [bytes(32)])[0]).encode()),
        rate=40,
    ),
    "chunk": Kind(act=chunk_stream, rate=4),
    "have": Kind(act=have_stream, rate=10),
    "status": Kind(act=request(streams.STATUS, lambda _: StatusRequest(page=0).encode()), rate=40, is_member=False),
    "gossip": Kind(act=gossip, rate=1),
    "gossip control": Kind(act=gossip_control, rate=5),
    "unknown protocols": Kind(act=request("/ipfs/id/1.0.0", lambda _: b""), rate=40),
    "streams without a word": Kind(act=silent_streams, rate=5),
    "requests without a word": Kind(act=silent_requests, rate=5),
    "half-closed streams": Kind(act=half_closed, rate=5),
    "rapid resets": Kind(act=rapid_reset, rate=5),
    "pings": Kind(act=pings, rate=5),
    "crumbs": Kind(act=crumbs, rate=2),
    "one byte a second": Kind(act=drip, rate=2),
    "answers never read": Kind(act=deaf, rate=5),
    "windows ignored": Kind(act=overrun, rate=2),
    "silent TCP": Kind(act=dark_tcp, rate=2, is_member=False, is_raw=True),
    "garbage on TCP": Kind(act=garbage_tcp, rate=4, is_member=False, is_raw=True),
    "reconnecting": Kind(act=reconnect, rate=2, is_member=False, is_raw=True),
}
