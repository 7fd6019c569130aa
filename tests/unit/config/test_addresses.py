"""Addresses and peer ids as config values."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from rollmesh_peer.config.addresses import Address, PeerAddress, PeerId
from rollmesh_protocol.identity import peer_of

PEER = peer_of(bytes(range(32)))


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/0.0.0.0/tcp/4700",
        "/ip6/::/tcp/0",
        "/dns/learner.example.org/tcp/65535",
        "/dns4/learner/tcp/1",
        "/dns6/my_box.lan/tcp/1",
    ],
)
def test_an_address_may_carry_the_peer_that_must_be_there(text):
    assert TypeAdapter(Address).validate_python(text) == text
    assert TypeAdapter(PeerAddress).validate_python(f"{text}/p2p/{PEER}") == f"{text}/p2p/{PEER}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not of the form"),
        ("0.0.0.0:4700", "is not of the form"),
        ("/ip4/0.0.0.0/udp/4700/quic-v1", "is not of the form"),
        ("/ip4/0.0.0.0/tcp/4700\n", "is not of the form"),
        ("/ip4/0.0.0.0/tcp/4700/p2p/x", "is not of the form"),
        ("/ip4/256.0.0.1/tcp/1", "Octet 256"),
        ("/ip4/::1/tcp/1", "Expected 4 octets"),
        ("/ip6/1.2.3.4/tcp/1", "At least 3 parts"),
        ("/ip4/1.2.3.4/tcp/65536", "ports end at 65535"),
        ("/dns/-x/tcp/1", "is no host name"),
        ("/dns/a..b/tcp/1", "is no host name"),
        ("/dns/" + "a." * 300 + "b/tcp/1", "is not of the form"),
    ],
)
def test_wrong_addresses_are_refused_with_a_reason(text, reason):
    with pytest.raises(ValidationError, match=reason):
        TypeAdapter(Address).validate_python(text)


@pytest.mark.parametrize("text", ["/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/1/p2p/", "/ip4/1.2.3.4/tcp/1/p2p/12D3KooW"])
def test_a_peer_address_without_a_true_peer_is_refused(text):
    with pytest.raises(ValidationError, match="form|peer id"):
        TypeAdapter(PeerAddress).validate_python(text)


@pytest.mark.parametrize("text", ["", "12D3KooW", PEER[:-1], PEER + "1", PEER.lower(), "Qm" + "a" * 44])
def test_a_peer_id_is_that_of_an_ed25519_key(text):
    assert TypeAdapter(PeerId).validate_python(PEER) == PEER
    with pytest.raises(ValidationError, match="peer id"):
        TypeAdapter(PeerId).validate_python(text)
