"""The protocol ids and gossip topics: one place where both sides look them up."""

from __future__ import annotations

from typing import Final

HELLO: Final = "/rollmesh/hello"
"""Without a version, so that a mismatch of majors gets a sentence instead of a failed negotiation."""
LEASE: Final = "/rollmesh/1/lease"
SUBMIT: Final = "/rollmesh/1/submit"
RETURN: Final = "/rollmesh/1/return"
MANIFEST: Final = "/rollmesh/1/manifest"
EDGES: Final = "/rollmesh/1/edges"
PEERS: Final = "/rollmesh/1/peers"
HAVE: Final = "/rollmesh/1/have"
CHUNK: Final = "/rollmesh/1/chunk"
STATUS: Final = "/rollmesh/1/status"


def policy_topic(run: str) -> str:
    """The gossip topic of signed policy headers."""
    return f"/rollmesh/1/{run}/policy"


def notice_topic(run: str) -> str:
    """The gossip topic of signed notices."""
    return f"/rollmesh/1/{run}/notice"
