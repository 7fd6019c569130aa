"""protocol/README.md read as a second implementation would read it: written from its text, compared with ours."""

from __future__ import annotations

import hashlib
import math
import struct

import msgpack
import numpy as np
import pytest
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
from rollmesh_protocol.patch.codec import encode_patch
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


def unpacked(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame)


class Streams:
    """rANS symbols and raw bits, as the README tells it, without any check."""

    def __init__(self, words: bytes, raw: bytes) -> None:
        self.words = list(struct.unpack(f"<{len(words) // 2}H", words))
        self.raw, self.raw_words = int.from_bytes(raw, "little"), len(raw) // 4
        self.bits = 0
        self.x = self.words.pop(0) * 65536 + self.words.pop(0)

    def symbol(self, table: np.ndarray) -> int:
        r = self.x % 4096
        s = int(np.searchsorted(np.cumsum(table), r, side="right"))
        self.x = int(table[s]) * (self.x // 4096) + r - int(table[:s].sum())
        if self.x < 65536:
            self.x = self.x * 65536 + self.words.pop(0)
        return s

    def bits_of(self, count: int) -> int:
        value = (self.raw >> self.bits) % (1 << count)
        self.bits += count
        return value

    def number(self, symbol: int) -> int:
        if symbol < 16:
            return symbol
        k, part = 4 + (symbol - 16) // 8, (symbol - 16) % 8
        return ((8 + part) << (k - 3)) + self.bits_of(k - 3)

    @property
    def is_used_up(self) -> bool:
        return self.x == 65536 and not self.words and -(-self.bits // 32) == self.raw_words


def stepped(word: int, number: int, width: int) -> int:
    top, full = 1 << (width - 1), (1 << width) - 1
    ordered = word ^ full if word & top else word | top
    step = (number >> 1) + 1
    ordered = (ordered + (-step if number % 2 else step)) & full
    return ordered ^ top if ordered & top else ordered ^ full


def applied(payload: bytes, rows: dict[str, list[int]]) -> None:
    """A patch, as the README tells it: changes the words of each row in place."""
    assert payload[:4].hex() == "524d5032"
    (length,) = struct.unpack_from("<I", payload, 4)
    head, position, at = unpacked(payload[8 : 8 + length]), 8 + length, 0
    tables = {}
    for row in rows:
        gap_count, step_count = head[at], head[at + 1]
        mode, gap, step = np.frombuffer(head, np.uint8, 768, at + 2).reshape(3, 256)
        size = (gap_count + step_count) * 256
        low, high = np.frombuffer(head, np.uint8, 2 * size, at + 770).reshape(2, -1, 256).astype(int)
        tables[row] = (mode, gap, step, low + 256 * high, gap_count)
        at += 770 + 2 * size
    cut = 4_194_304
    blocks = [(row, start) for row, words in rows.items() for start in range(0, len(words), cut)]
    kinds = head[at : at + len(blocks)]
    planes = np.frombuffer(head, np.uint8, 12 * len(blocks), at + len(blocks)).reshape(3, 4, len(blocks)).astype(int)
    changed, first, second = (planes * [[1], [1 << 8], [1 << 16], [1 << 24]]).sum(axis=1)
    for index, (row, start) in enumerate(blocks):
        middle = position + first[index]
        end = middle + second[index]
        width = 32 if row == "f32" else 16
        words = rows[row][start : start + cut]
        if kinds[index] == 1:
            done = walked(words, width, Streams(payload[position:middle], payload[middle:end]), *tables[row])
        elif kinds[index] == 2:
            dense = np.frombuffer(unpacked(payload[position:middle]), np.uint8).reshape(width // 8, -1)
            numbers = [int.from_bytes(column.tobytes(), "little") for column in dense.T]
            done = sum(1 for n in numbers if n)
            words = [stepped(w, n - 1, width) if n else w for w, n in zip(words, numbers, strict=True)]
        else:
            done = 0
        rows[row][start : start + cut] = words
        assert done == changed[index]
        position = end
    assert position == len(payload)


def walked(words, width, streams, mode, gap, step, frequencies, gap_count) -> int:
    left: dict[int, float] = {}
    changes = 0

    def next_gap(kind: int) -> float:
        symbol = streams.symbol(frequencies[gap[kind] - 1])
        return math.inf if symbol == 255 else streams.number(symbol)

    for index, word in enumerate(words):
        kind = (word >> (23 if width == 32 else 7)) % 256
        if not gap[kind]:
            continue
        if kind not in left:
            left[kind] = next_gap(kind)
        if left[kind]:
            left[kind] -= 1
            continue
        symbol = streams.symbol(frequencies[gap_count + step[kind] - 1])
        if mode[kind]:
            n = symbol * 2 ** (width - 8) + streams.bits_of(width - 8)
            words[index] = (n >> 1) | (n % 2) << (width - 1)
        else:
            words[index] = stepped(word, streams.number(symbol), width)
        changes += 1
        left[kind] = next_gap(kind)
    assert streams.is_used_up
    return changes


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_patches(share: float) -> None:
    shapes = {"f32": 301, "bf16": 4000, "f16": 77}
    layout = Layout(tensors=tuple(TensorSpec(name=name, dtype=name, shape=(size,)) for name, size in shapes.items()))
    random = np.random.default_rng(5)
    old, new = bytearray(layout.image_bytes), bytearray(layout.image_bytes)
    rows: dict[str, list[int]] = {}
    wanted = {}
    for name, offset in zip(shapes, layout.offsets, strict=True):
        values = random.normal(0, 0.1, shapes[name]).astype(np.float16 if name == "f16" else np.float32)
        values[:20] = 0
        words = values.view(np.uint16 if name == "f16" else np.uint32)
        words = (words >> 16).astype(np.uint16) if name == "bf16" else words
        other = words.copy()
        if share == 1.0:
            other[:] = random.integers(0, 1 << 16, len(words))
        else:
            chosen = random.random(len(words)) < share
            other[chosen] += random.integers(1, 300, int(chosen.sum())).astype(words.dtype)
            other[3] = 0x8012
        old[offset : offset + words.nbytes] = words.tobytes()
        new[offset : offset + words.nbytes] = other.tobytes()
        rows[name], wanted[name] = words.tolist(), other.tolist()
    payload = encode_patch(layout, old=bytes(old), new=bytes(new))
    assert payload is not None
    in_order = {name: rows[name] for name in ("bf16", "f16", "f32")}
    applied(payload, in_order)
    assert in_order == wanted


def test_gossip_ids() -> None:
    from libp2p.pubsub.pb import rpc_pb2

    message = rpc_pb2.Message(from_id=b"author", topicIDs=["/rollmesh/1/r/policy"], data=b"envelope", seqno=b"9")
    parts = (b"author", b"/rollmesh/1/r/policy", b"envelope")
    expected = hashlib.sha256(b"".join(struct.pack(">I", len(part)) + part for part in parts)).digest()
    assert message_id(message) == expected
