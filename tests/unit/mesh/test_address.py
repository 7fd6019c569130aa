"""Addresses: what is taken, and the sentence for what is not."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_peer.mesh.address import Endpoint, block_of, endpoint_of, parse_endpoint, parse_peer_address
from rollmesh_protocol.errors import UsageError
from rollmesh_protocol.identity import Identity

PEER = Identity(bytes(32)).peer


@pytest.mark.parametrize(
    "endpoint",
    [
        "/ip4/203.0.113.7/tcp/4700",
        "/ip4/127.0.0.1/tcp/65535",
        "/ip6/2001:db8::7/tcp/1",
        "/ip6/::1/tcp/4700",
        "/dns4/rl.example.org/tcp/4700",
        "/dns6/a-b.example/tcp/4700",
        "/dns/localhost/tcp/4700",
    ],
)
def test_an_address_comes_back_as_it_was(endpoint):
    address = parse_peer_address(f"{endpoint}/p2p/{PEER}")
    assert str(address) == f"{endpoint}/p2p/{PEER}"
    assert str(address.endpoint) == endpoint
    assert address.peer == PEER


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "an empty address"),
        ("/", "does not end in /p2p/"),
        ("/ip4/1.2.3.4/tcp/4700", "does not end in /p2p/"),
        (f"/ip4/1.2.3.4/tcp/4700/p2p/{PEER}x", "is not a peer id"),
        (f"/ip4/1.2.3.4/tcp/4700/p2p/{PEER[:-1]}", "is not a peer id"),
        ("/ip4/1.2.3.4/tcp/4700/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "is not a peer id"),
        ("/ip4/1.2.3.4/tcp/4700/p2p/0OIl", "is not a peer id"),
        (f"/p2p/{PEER}", "an empty address"),
        (f"/ip4/1.2.3/tcp/4700/p2p/{PEER}", "no valid ip4"),
        (f"/ip4/01.2.3.4/tcp/4700/p2p/{PEER}", "no valid ip4"),
        (f"/ip6/1.2.3.4/tcp/4700/p2p/{PEER}", "no valid ip6"),
        (f"/ip6/fe80::1%eth0/tcp/4700/p2p/{PEER}", "IPv6 zone"),
        (f"/dns4/-bad-/tcp/4700/p2p/{PEER}", "no valid host name"),
        (f"/dns4/{'a.' * 200}/tcp/4700/p2p/{PEER}", "characters"),
        (f"/ip4/1.2.3.4/udp/4700/p2p/{PEER}", "is not an address like"),
        (f"/ip4/1.2.3.4/tcp/4700/quic/p2p/{PEER}", "is not an address like"),
        (f"/unix/x/tcp/4700/p2p/{PEER}", "must start with"),
        (f"ip4/1.2.3.4/tcp/4700/p2p/{PEER}", "is not an address like"),
        *(
            (f"/ip4/1.2.3.4/tcp/{port}/p2p/{PEER}", "no port between")
            for port in ("0", "-1", "65536", "x", "", "٣", "1e3")
        ),
    ],
)
def test_what_is_wrong_is_said(text, sentence):
    with pytest.raises(UsageError, match=sentence) as error:
        parse_peer_address(text)
    assert len(str(error.value)) < 250
    assert "\n" not in str(error.value)


@given(st.text(max_size=300))
def test_no_text_does_anything_but_fail_in_words(text):
    for parse in (parse_peer_address, parse_endpoint):
        with suppress(UsageError):
            parse(text)


def test_listening_takes_any_port_and_no_names():
    assert parse_endpoint("/ip4/0.0.0.0/tcp/0", listening=True).port == 0
    with pytest.raises(UsageError, match="ip4 or ip6"):
        parse_endpoint("/dns4/localhost/tcp/4700", listening=True)


@pytest.mark.parametrize(
    ("host", "block"),
    [
        ("203.0.113.7", "203.0.113.0/24"),
        ("::ffff:203.0.113.9", "203.0.113.0/24"),
        ("2001:db8:1:2::3", "2001:db8:1::/48"),
        ("127.0.0.1", None),
        ("::1", None),
        ("::ffff:127.0.0.1", None),
        ("10.1.2.3", "10.1.2.0/24"),
    ],
)
def test_blocks(host, block):
    assert block_of(endpoint_of(host, 1)) == block


def test_a_name_is_in_no_block():
    assert block_of(Endpoint(kind="dns4", host="example.org", port=1)) is None
    with pytest.raises(UsageError):
        endpoint_of("example.org", 1)
