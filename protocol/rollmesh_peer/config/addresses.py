"""Peer ids and multiaddresses as config values. They stay text; :mod:`rollmesh_peer.mesh.address` says what is one."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from rollmesh_peer.mesh.address import parse_endpoint, parse_peer_address
from rollmesh_protocol.errors import Refused, UsageError
from rollmesh_protocol.identity import public_key_of


def _listened(text: str) -> str:
    try:
        return str(parse_endpoint(text, listening=True))
    except UsageError as error:
        raise ValueError(error.detail) from error


def _announced(text: str) -> str:
    try:
        return str(parse_endpoint(text))
    except UsageError as error:
        raise ValueError(error.detail) from error


def _dialled(text: str) -> str:
    try:
        return str(parse_peer_address(text))
    except UsageError as error:
        raise ValueError(error.detail) from error


def _peer(text: str) -> str:
    try:
        public_key_of(text)
    except Refused as error:
        raise ValueError(error.detail) from error
    return text


ListenAddress = Annotated[str, AfterValidator(_listened)]
"""Where we listen: ``/ip4/0.0.0.0/tcp/4700``; port 0 is any free one."""
OwnAddress = Annotated[str, AfterValidator(_announced)]
"""Where others reach us: an IP address or a name, and a port."""
PeerAddress = Annotated[str, AfterValidator(_dialled)]
"""Where a peer is reached, and who it must be: ``/ip4/203.0.113.7/tcp/4700/p2p/12D3Koo...``."""
PeerId = Annotated[str, AfterValidator(_peer)]
"""The peer id of an Ed25519 key."""
