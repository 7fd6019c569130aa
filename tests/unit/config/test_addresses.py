"""Addresses and peer ids as config values. What an address is, is tested with the mesh."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from rollmesh_peer.config.addresses import ListenAddress, OwnAddress, PeerAddress, PeerId
from rollmesh_protocol.identity import peer_of

PEER = peer_of(bytes(range(32)))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ListenAddress, "/ip4/0.0.0.0/tcp/0"),
        (ListenAddress, "/ip6/::/tcp/4700"),
        (OwnAddress, "/dns4/learner.example.org/tcp/4700"),
        (PeerAddress, f"/dns/learner/tcp/1/p2p/{PEER}"),
        (PeerId, PEER),
    ],
)
def test_what_is_right_stays_as_it_is(kind, text):
    assert TypeAdapter(kind).validate_python(text) == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ListenAddress, "0.0.0.0:4700"),
        (ListenAddress, "/dns/learner/tcp/4700"),
        (ListenAddress, f"/ip4/0.0.0.0/tcp/4700/p2p/{PEER}"),
        (OwnAddress, "/ip4/1.2.3.4/tcp/0"),
        (OwnAddress, "/ip4/1.2.3.4/udp/1/quic-v1"),
        (PeerAddress, "/ip4/1.2.3.4/tcp/1"),
        (PeerAddress, f"/ip4/1.2.3.4/tcp/1/p2p/{PEER[:-1]}"),
        (PeerId, ""),
        (PeerId, PEER[:-1]),
        (PeerId, PEER.lower()),
    ],
)
def test_what_is_wrong_is_refused_with_a_sentence(kind, text):
    with pytest.raises(ValidationError, match="Value error, .{10}"):
        TypeAdapter(kind).validate_python(text)
