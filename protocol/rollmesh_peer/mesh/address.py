"""Addresses of peers: the few multiaddrs that this mesh can dial, checked strictly.

``/ip4/203.0.113.7/tcp/4700/p2p/12D3Koo...`` and the same with ``ip6``, ``dns``, ``dns4`` or ``dns6``. The libraries'
own parsers take an empty text and a nonsense peer id; this one does not. Nothing is resolved or dialled here.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from rollmesh_protocol.errors import Refused, UsageError
from rollmesh_protocol.identity import public_key_of

MAX_ADDRESS_CHARS: Final = 400
"""A DNS name has at most 253 characters, a peer id 52."""

_HOST_NAME: Final = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\.?")
_NAME_KINDS: Final = ("dns", "dns4", "dns6")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a TCP port is: ``kind`` is ip4, ip6, dns, dns4 or dns6."""

    kind: str
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """True for an address inside this machine."""
        return self.kind in ("ip4", "ip6") and ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"/{self.kind}/{self.host}/tcp/{self.port}"


@dataclass(frozen=True, kw_only=True)
class PeerAddress:
    """An endpoint, and the peer that must answer there."""

    endpoint: Endpoint
    peer: str

    def __str__(self) -> str:
        return f"{self.endpoint}/p2p/{self.peer}"


def parse_peer_address(text: str) -> PeerAddress:
    """The address in ``text``, which must end in ``/p2p/`` and a peer id.

    Raises:
        UsageError: one sentence that names the text and what is wrong with it.
    """
    head, mark, peer = _checked(text).rpartition("/p2p/")
    if not mark:
        raise UsageError(f"{_shown(text)} does not end in /p2p/ and a peer id")
    try:
        public_key_of(peer)
    except Refused as error:
        raise UsageError(f"{_shown(peer)} is not a peer id; it starts with 12D3KooW and has 52 characters") from error
    return PeerAddress(endpoint=parse_endpoint(head), peer=peer)


def parse_endpoint(text: str, *, listening: bool = False) -> Endpoint:
    """The endpoint in ``text``, without a peer id. With ``listening``, port 0 is allowed and names are not.

    Raises:
        UsageError: one sentence that names the text and what is wrong with it.
    """
    parts = _checked(text).split("/")
    if len(parts) != 5 or parts[0] or parts[3] != "tcp":
        raise UsageError(f"{_shown(text)} is not an address like /ip4/203.0.113.7/tcp/4700")
    _, kind, host, _, port_text = parts
    if not port_text.isascii() or not port_text.isdigit() or len(port_text) > len("65535") or int(port_text) > 65535:
        raise UsageError(f"{_shown(text)} has no port between 1 and 65535")
    port = int(port_text)
    if port == 0 and not listening:
        raise UsageError(f"{_shown(text)} has no port between 1 and 65535")
    if kind in ("ip4", "ip6"):
        return Endpoint(kind=kind, host=_checked_ip(host, kind=kind, text=text), port=port)
    if kind in _NAME_KINDS and not listening:
        if not _HOST_NAME.fullmatch(host) or len(host) > 253:
            raise UsageError(f"{_shown(text)} has no valid host name")
        return Endpoint(kind=kind, host=host, port=port)
    kinds = "ip4 or ip6" if listening else "ip4, ip6, dns, dns4 or dns6"
    raise UsageError(f"{_shown(text)} must start with /{kinds}, in that form")


def endpoint_of(host: str, port: int) -> Endpoint:
    """The endpoint of a socket's IP address; an IPv4 address mapped into IPv6 counts as IPv4.

    Raises:
        UsageError: ``host`` is no IP address.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError as error:
        raise UsageError(f"{_shown(host)} is not an IP address") from error
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return Endpoint(kind=f"ip{address.version}", host=str(address), port=port)


def block_of(endpoint: Endpoint) -> str | None:
    """The /24 (IPv4) or /48 (IPv6) that an IP endpoint belongs to; None for loopback and for names."""
    if endpoint.kind not in ("ip4", "ip6") or endpoint.is_loopback:
        return None
    bits = 24 if endpoint.kind == "ip4" else 48
    return str(ipaddress.ip_network(f"{endpoint.host}/{bits}", strict=False))


def _checked(text: str) -> str:
    if not text:
        raise UsageError("an empty address")
    if len(text) > MAX_ADDRESS_CHARS:
        raise UsageError(f"an address of {len(text)} characters, where {MAX_ADDRESS_CHARS} are allowed")
    return text


def _checked_ip(host: str, *, kind: str, text: str) -> str:
    try:
        address = ipaddress.IPv4Address(host) if kind == "ip4" else ipaddress.IPv6Address(host)
    except ValueError as error:
        raise UsageError(f"{_shown(text)} has no valid {kind} address") from error
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
        raise UsageError(f"{_shown(text)} has an IPv6 zone, which means nothing on another machine")
    return str(address)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:117] + "...")
