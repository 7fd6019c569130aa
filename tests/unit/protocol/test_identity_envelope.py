"""Keys, peer ids and the one way to a signed body."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from rollmesh_protocol.envelope import Envelope, seal
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import Identity, is_signed_by, peer_of, public_key_of

LEARNER, STRANGER = Identity(bytes(32)), Identity(bytes([1]) * 32)


@given(st.binary(min_size=32, max_size=32))
def test_peer_ids_are_those_of_libp2p(seed: bytes) -> None:
    identity = Identity(seed)
    assert identity.peer == str(ID.from_pubkey(create_new_key_pair(seed).public_key))
    assert public_key_of(identity.peer) == identity.public_key
    assert peer_of(identity.public_key) == identity.peer


@given(st.text(max_size=120))
def test_nonsense_is_no_peer_id(text: str) -> None:
    with pytest.raises(Refused):
        public_key_of(text)


def test_a_signature_holds_for_one_message_and_key() -> None:
    signature = LEARNER.sign(b"hello")
    assert is_signed_by(LEARNER.public_key, signature, b"hello")
    assert not is_signed_by(LEARNER.public_key, signature, b"hellp")
    assert not is_signed_by(STRANGER.public_key, signature, b"hello")
    assert not is_signed_by(b"short", signature, b"hello")


def test_the_private_key_does_not_show() -> None:
    assert LEARNER.seed.hex() not in repr(LEARNER)


def test_an_envelope_opens_only_as_what_it_was_sealed() -> None:
    envelope = Envelope.decode(seal(b"body", run="run", kind="lease", identity=LEARNER).encode(), limit=1000)
    assert envelope.open(run="run", kind="lease", signer=LEARNER.peer) == b"body"
    for code, arguments in {
        "envelope.run": {"run": "other", "kind": "lease", "signer": LEARNER.peer},
        "envelope.kind": {"run": "run", "kind": "result", "signer": LEARNER.peer},
        "envelope.key": {"run": "run", "kind": "lease", "signer": STRANGER.peer},
    }.items():
        with pytest.raises(Refused) as caught:
            envelope.open(**arguments)  # type: ignore[arg-type]
        assert caught.value.code == code


@pytest.mark.parametrize("field", ["run", "kind", "body", "key", "sig"])
def test_every_part_of_an_envelope_is_covered(field: str) -> None:
    envelope = seal(b"body", run="run", kind="lease", identity=LEARNER)
    other = seal(b"bodY", run="ruN", kind="result", identity=STRANGER)
    forged = Envelope.read(envelope.model_dump() | {field: getattr(other, field)})
    with pytest.raises(Refused):
        forged.open(run=forged.run, kind=forged.kind, signer=peer_of(forged.key))


def test_lengths_are_part_of_what_is_signed() -> None:
    """'ab' + 'c' must not be signed like 'a' + 'bc'."""
    first = seal(b"", run="runl", kind="lease", identity=LEARNER)
    moved = Envelope.read(first.model_dump() | {"run": "run"})
    with pytest.raises(Refused):
        moved.open(run="run", kind="lease", signer=LEARNER.peer)
