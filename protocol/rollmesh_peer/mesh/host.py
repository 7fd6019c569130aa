"""Opens the mesh over libp2p: checks the options, binds the ports, and gives them back when the block ends.

Invariant: a port is ours alone or there is a :class:`HostError`, and nothing of a mesh stays in the process. The peer
itself is made in ``libp2p_host``, the only package that knows the library.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from rollmesh_peer.mesh.address import Endpoint, endpoint_of, parse_endpoint
from rollmesh_peer.mesh.doorway import Rank, nobody_matters
from rollmesh_peer.mesh.libp2p_host.mesh import Libp2pMesh, quiet_library
from rollmesh_peer.mesh.libp2p_host.swarm import Caps
from rollmesh_peer.mesh.seam import Mesh
from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError
from rollmesh_protocol.identity import SEED_BYTES

log = logging.getLogger("rollmesh.mesh")

_BACKLOG: Final = 128


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """What a host is and takes."""

    key_seed: bytes = field(repr=False)
    """The 32-byte Ed25519 seed; the same seed gives the same peer id everywhere."""
    listen: tuple[str, ...] = ()
    """Multiaddrs such as ``/ip4/0.0.0.0/tcp/4700``; none for a host that only dials; port 0 for any free one."""
    announce: tuple[str, ...] = ()
    """Addresses under which others reach us although we do not listen there: a forwarded port, a public name."""
    max_connections: int = limits.MAX_CONNECTIONS
    per_block: int = limits.MAX_CONNECTIONS_PER_BLOCK
    """Incoming connections of one /24 or /48."""
    gossip: bool = True
    rank: Rank = nobody_matters
    """Whose streams come first when there are more than we can handle."""


@asynccontextmanager
async def open_mesh(options: HostOptions) -> AsyncIterator[Mesh]:
    """A mesh peer that lives as long as the block. An error inside the block comes out as it is, not in a group.

    Raises:
        HostError: a listen address is in use, or does not belong to this machine.
        UsageError: a listen or announce address is malformed.
    """
    if len(options.key_seed) != SEED_BYTES:
        raise HostError(f"the key has {len(options.key_seed)} bytes instead of {SEED_BYTES}")
    endpoints = [parse_endpoint(text, listening=True) for text in options.listen]
    announced = [parse_endpoint(text) for text in options.announce]
    quiet_library()
    caps = Caps(connections=options.max_connections, per_block=options.per_block)
    mesh = Libp2pMesh(key_seed=options.key_seed, caps=caps, gossip=options.gossip, rank=options.rank)
    listeners = await _listen(endpoints)
    failure: Exception | None = None
    async with mesh.running(listeners, endpoints=[*announced, *_bound(listeners)]):
        log.info("peer %s listens on %s", mesh.peer_id, ", ".join(mesh.addresses) or "nothing")
        try:
            yield mesh
        except Exception as error:  # noqa: BLE001 - raised again below, outside of the nurseries' groups
            failure = error
    if failure is not None:
        raise failure


async def check_listen(listen: tuple[str, ...]) -> None:
    """Find out whether these addresses can be listened on right now, and let go of them again.

    Raises:
        HostError, UsageError: as :func:`open_mesh`.
    """
    for listener in await _listen([parse_endpoint(text, listening=True) for text in listen]):
        await listener.aclose()


async def _listen(endpoints: list[Endpoint]) -> list[trio.SocketListener]:
    """Bind every endpoint, without SO_REUSEPORT: a port that somebody else has is an error and not shared."""
    listeners: list[trio.SocketListener] = []
    try:
        for endpoint in endpoints:
            listeners += await trio.open_tcp_listeners(endpoint.port, host=endpoint.host, backlog=_BACKLOG)
    except OSError as error:
        for listener in listeners:
            await listener.aclose()
        raise HostError(_listen_failure(endpoint, error)) from error
    return listeners


def _listen_failure(endpoint: Endpoint, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {endpoint.port} is in use by another program; choose another one to listen on"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{endpoint.host} is not an address of this machine; listen on /ip4/0.0.0.0/tcp/{endpoint.port}"
    if error.errno == errno.EACCES:
        return f"port {endpoint.port} may be opened by administrators only; choose one above 1023"
    return f"cannot listen on {endpoint}: {(error.strerror or str(error)).lower()}"


def _bound(listeners: list[trio.SocketListener]) -> list[Endpoint]:
    """Where others on this network reach the listeners; a wildcard becomes this machine's own addresses."""
    endpoints = []
    for listener in listeners:
        host, port = listener.socket.getsockname()[:2]
        if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            endpoints += [endpoint_of(own, port) for own in _own_hosts(is_ipv6=host == "::")]
        else:
            endpoints.append(endpoint_of(host, port))
    return endpoints


def _own_hosts(*, is_ipv6: bool) -> list[str]:
    """The address that leads out of this machine, if any, and the loopback one. Nothing is sent to find out."""
    hosts = []
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("2001:db8::1" if is_ipv6 else "192.0.2.1", 9))
            hosts.append(str(probe.getsockname()[0]))
        except OSError:
            log.debug("no way out over %s", "IPv6" if is_ipv6 else "IPv4")
    return [*hosts, "::1" if is_ipv6 else "127.0.0.1"]
