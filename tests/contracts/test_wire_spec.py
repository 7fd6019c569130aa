"""protocol/README.md read as a second implementation would read it: written from its text, compared with ours."""

from __future__ import annotations

import hashlib
import math
import struct

import msgpack
import numpy as np
import zstandard
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from rollmesh_peer.mesh.libp2p_host.gossip import message_id
from rollmesh_protocol import sampling
from rollmesh_protocol.chunks import to_bitmap
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.layout import Layout, TensorSpec
from rollmesh_protocol.lease import seed_of
from rollmesh_protocol.manifest import manifest_name
from rollmesh_protocol.patch import SECTION_BYTES, encode_patch
from tests.unit.protocol.examples import EXAMPLES

ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def u32le(number: int) -> bytes:
    return struct.pack("<I", number)


def p(field: bytes) -> bytes:
    return u32le(len(field)) + field


def base58(raw: bytes) -> str:
    number, text = int.from_bytes(raw, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = ALPHABET[digit] + text
    return "1" * (len(raw) - len(raw.lstrip(b"\0"))) + text


def test_peer_ids() -> None:
    identity = Identity(bytes(range(32)))
    assert base58(bytes.fromhex("002408011220") + identity.public_key) == identity.peer
    assert len(identity.peer) == 52 and identity.peer.startswith("12D3KooW")


def test_envelopes() -> None:
    envelope = msgpack.unpackb(EXAMPLES["lease_envelope"].encode())
    assert list(envelope) == ["run", "kind", "body", "key", "sig"]
    run, kind = envelope["run"].encode(), envelope["kind"].encode()
    signed = b"rollmesh/1/" + p(run) + p(kind) + blake3(envelope["body"]).digest()
    Ed25519PublicKey.from_public_bytes(envelope["key"]).verify(envelope["sig"], signed)
    assert manifest_name(b"any envelope") == blake3(b"any envelope").digest()


def test_layout_and_root() -> None:
    layout = Layout(
        tensors=(
            TensorSpec(name="a.weight", dtype="bf16", shape=(3, 5)),
            TensorSpec(name="scale", dtype="f32", shape=()),
        )
    )
    digests = (bytes(32), bytes([7]) * 32)
    rows = [p(b"a.weight") + p(b"bf16") + p(b"3,5"), p(b"scale") + p(b"f32") + p(b"")]
    assert layout.digest == blake3(b"rollmesh/layout" + b"".join(rows)).digest()
    assert (
        layout.root(digests)
        == blake3(
            b"rollmesh/root" + b"".join(row + p(digest) for row, digest in zip(rows, digests, strict=True))
        ).digest()
    )
    assert (layout.offsets, layout.image_bytes) == ((0, 64), 128)


def test_seeds() -> None:
    key = bytes(range(32))
    statement = p(b"run-1") + struct.pack("<Q", 41) + u32le(3)
    expected = int.from_bytes(blake3(statement, key=key).digest()[:8], "little")
    assert seed_of(key, run="run-1", group=41, sample=3) == expected


def philox(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        product0, product1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            product1 >> 32 ^ counter[1] ^ key[0], product1 & 0xFFFFFFFF,
            product0 >> 32 ^ counter[3] ^ key[1], product0 & 0xFFFFFFFF,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def test_noise() -> None:
    seed, position = 0x0123456789ABCDEF, 17
    for j in (0, 1, 2, 3, 4, 49_151):
        word = philox([j // 4, position, 0, 0], [seed % 2**32, seed >> 32])[j % 4]
        v = ((word >> 8) + 0.5) * 2**-24
        assert math.isclose(sampling.noise(seed, position, [j])[0], -math.log(-math.log1p(-v)), rel_tol=1e-12)


def test_bitmaps() -> None:
    assert to_bitmap([0, 9], chunk_count=10) == bytes([0b1, 0b10])


def applied(payload: bytes, image: bytes) -> bytes:
    """A patch, as the README tells it, without any check."""
    words = np.frombuffer(image, "<u2").copy()
    assert payload[:4].hex() == "524d5031"
    position = 4
    for start in range(0, len(image), 8 << 20):
        lengths = struct.unpack_from("<III", payload, position)
        position += 12
        parts = []
        for length in lengths:
            frame = payload[position : position + length]
            parts.append(zstandard.ZstdDecompressor().decompress(frame) if length else b"")
            position += length
        gaps, low, high = parts
        at, gap, changed = start // 2, 0, 0
        for byte in gaps:
            gap += byte
            if byte == 255:
                continue
            at += gap
            words[at] ^= low[changed] | high[changed] << 8
            at, gap, changed = at + 1, 0, changed + 1
        assert changed == len(low) == len(high)
    assert position == len(payload)
    return words.tobytes()


def test_patches() -> None:
    layout = Layout(tensors=(TensorSpec(name="w", dtype="bf16", shape=(SECTION_BYTES // 2 + 4096,)),))
    random = np.random.default_rng(5)
    old = random.integers(0, 256, layout.image_bytes, dtype=np.uint8)
    new = old.copy()
    new[random.integers(0, len(new), 300)] ^= 0x55
    new[:4] ^= 0xFF
    new[-1] ^= 1
    payload = encode_patch(layout, old=old.tobytes(), new=new.tobytes())
    assert payload is not None
    assert applied(payload, old.tobytes()) == new.tobytes()
    assert applied(payload, new.tobytes()) == old.tobytes()


def test_gossip_ids() -> None:
    from libp2p.pubsub.pb import rpc_pb2

    message = rpc_pb2.Message(from_id=b"author", topicIDs=["/rollmesh/1/r/policy"], data=b"envelope", seqno=b"9")
    parts = (b"author", b"/rollmesh/1/r/policy", b"envelope")
    expected = hashlib.sha256(b"".join(struct.pack(">I", len(part)) + part for part in parts)).digest()
    assert message_id(message) == expected
