"""Remembered addresses: bounded, written whole, and never the reason that anything fails."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_peer.mesh.peer_cache import PeerCache
from rollmesh_protocol import limits
from rollmesh_protocol.errors import UsageError
from rollmesh_protocol.identity import Identity


def address(peer, port=4700):
    return f"/ip4/203.0.113.7/tcp/{port}/p2p/{Identity(peer.to_bytes(32, 'big')).peer}"


def peer_of(text):
    return text.rpartition("/")[2]


def test_what_was_remembered_is_there_in_the_next_run(tmp_path):
    path = tmp_path / "data" / "peers.json"
    cache = PeerCache(path)
    for text in (address(1), address(2), address(1, port=4701), address(1)):
        cache.remember(text)
    for seen in (cache, PeerCache(path)):
        assert seen.addresses_of(peer_of(address(1))) == (address(1), address(1, port=4701))
        assert seen.peers() == (peer_of(address(1)), peer_of(address(2)))
    assert [file.name for file in path.parent.iterdir()] == ["peers.json"]


def test_the_oldest_are_forgotten(tmp_path):
    cache = PeerCache(tmp_path / "peers.json")
    for peer in range(limits.MAX_CACHED_PEERS + 5):
        cache.remember(address(peer))
    for port in range(1, 20):
        cache.remember(address(70, port=port))
    again = PeerCache(tmp_path / "peers.json")
    assert len(again.peers()) == limits.MAX_CACHED_PEERS
    assert peer_of(address(0)) not in again.peers()
    assert again.addresses_of(peer_of(address(70))) == tuple(address(70, port=port) for port in (19, 18, 17, 16))
    assert again.peers() == cache.peers()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b'{"format": 2, "addresses": ["x"]}',
        b'{"format": 1, "addresses": 7}',
        b'{"format": 1}',
        b"[" * 100_000,
        b" " * (2 << 20),
    ],
)
def test_a_file_that_is_no_use_counts_as_empty(tmp_path, content):
    path = tmp_path / "peers.json"
    path.write_bytes(content)
    cache = PeerCache(path)
    assert cache.peers() == ()
    cache.remember(address(1))
    assert PeerCache(path).peers() == (peer_of(address(1)),)


def test_what_is_good_in_a_file_is_used(tmp_path):
    path = tmp_path / "peers.json"
    path.write_text(json.dumps({"format": 1, "addresses": ["garbage", None, address(1), {}, 5, address(2)]}))
    assert PeerCache(path).peers() == (peer_of(address(1)), peer_of(address(2)))


@given(st.binary(max_size=200))
def test_no_file_does_any_harm(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("cache") / "peers.json"
    path.write_bytes(content)
    assert PeerCache(path).peers() == ()


def test_a_place_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    cache = PeerCache(tmp_path / "file" / "peers.json")
    cache.remember(address(1))
    assert cache.peers()
    with pytest.raises(UsageError):
        cache.remember("garbage")
