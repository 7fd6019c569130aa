"""Who a peer is: an Ed25519 key pair, and the libp2p peer id that names its public key.

The peer id of an Ed25519 key is the base58 of an identity multihash over the protobuf of the public key, as libp2p
defines it, so a peer id and a public key can each be computed from the other. Keeping the key on disk is not done here.
"""

from __future__ import annotations

from typing import Final

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from rollmesh_protocol.errors import Refused

SEED_BYTES: Final = 32
PUBLIC_KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
PEER_ID_CHARS: Final = 52
"""Length of the base58 text of an Ed25519 peer id: ``12D3KooW`` and 44 characters."""

_PREFIX: Final = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
"""Identity multihash of 36 bytes; protobuf key type Ed25519; 32 bytes of key."""


class Identity:
    """A key pair that signs. The private part stays inside."""

    __slots__ = ("_private", "peer", "public_key", "seed")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"an Ed25519 seed has {SEED_BYTES} bytes, not {len(seed)}")
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.seed: Final = seed
        self.public_key: Final = self._private.public_key().public_bytes_raw()
        self.peer: Final = peer_of(self.public_key)

    def sign(self, message: bytes) -> bytes:
        """The 64-byte Ed25519 signature of ``message``."""
        return self._private.sign(message)

    def __repr__(self) -> str:
        return f"Identity({self.peer})"


def is_signed_by(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """True when ``signature`` is the Ed25519 signature of ``message`` under ``public_key`` (32 bytes)."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def peer_of(public_key: bytes) -> str:
    """The peer id of a 32-byte Ed25519 public key."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"an Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}")
    return base58.b58encode(_PREFIX + public_key).decode()


def public_key_of(peer: str) -> bytes:
    """The 32-byte public key inside an Ed25519 peer id, or :class:`Refused` for any other text."""
    try:
        raw = base58.b58decode(peer) if len(peer) <= 2 * PEER_ID_CHARS else b""
    except ValueError:
        raw = b""
    if len(raw) != len(_PREFIX) + PUBLIC_KEY_BYTES or not raw.startswith(_PREFIX):
        raise Refused("envelope.key", f"{peer[:60]!r} is not the peer id of an Ed25519 key")
    return raw[len(_PREFIX) :]


def short(peer: str) -> str:
    """The last eight characters, as logs and tables show a peer."""
    return peer[-8:]
