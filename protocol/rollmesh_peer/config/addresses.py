"""Peer ids and multiaddresses as config values: checked as text, because the library also parses nonsense."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Final

from pydantic import AfterValidator

from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import public_key_of

MAX_ADDRESS_CHARS: Final = 400
"""A DNS name has at most 253 characters; the rest of an address is short."""

_ADDRESS: Final = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]{1,5})(?:/p2p/([^/]+))?")
_DNS_LABEL: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_MAX_PORT: Final = 65_535


def _checked(text: str, *, with_peer: bool) -> str:
    """``text``, if it is ``/ip4|ip6|dns|dns4|dns6/<host>/tcp/<port>``, ending in ``/p2p/<peer id>`` or not."""
    found = _ADDRESS.fullmatch(text) if len(text) <= MAX_ADDRESS_CHARS else None
    form = "/ip4/<address>/tcp/<port>" + ("/p2p/<peer id>" if with_peer else "")
    if found is None or (found[4] is not None) != with_peer:
        raise ValueError(f"{text!r} is not of the form {form}")
    kind, host, port, peer = found.groups()
    if kind in {"ip4", "ip6"}:
        try:
            (ipaddress.IPv4Address if kind == "ip4" else ipaddress.IPv6Address)(host)
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from error
    elif not all(map(_DNS_LABEL.fullmatch, host.split("."))):
        raise ValueError(f"{text!r}: {host!r} is no host name")
    if int(port) > _MAX_PORT:
        raise ValueError(f"{text!r}: ports end at {_MAX_PORT}")
    if peer is not None:
        _peer(peer)
    return text


def _peer(text: str) -> str:
    try:
        public_key_of(text)
    except Refused as error:
        raise ValueError(error.detail) from error
    return text


def _own(text: str) -> str:
    return _checked(text, with_peer=False)


def _of_peer(text: str) -> str:
    return _checked(text, with_peer=True)


PeerId = Annotated[str, AfterValidator(_peer)]
"""The peer id of an Ed25519 key."""
Address = Annotated[str, AfterValidator(_own)]
"""An address of our own: ``/ip4/0.0.0.0/tcp/4700``."""
PeerAddress = Annotated[str, AfterValidator(_of_peer)]
"""Where a peer is reached, and who it must be: ``/ip4/203.0.113.7/tcp/4700/p2p/12D3Koo...``."""
