"""Who may join: the admission modes and the bounds on address blocks, decided without I/O (layer L0)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, Literal

from rollmesh_peer.mesh.address import block_of, parse_endpoint
from rollmesh_peer.mesh.rates import TokenBucket
from rollmesh_protocol import codec, limits
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.errors import Refused, UsageError
from rollmesh_protocol.messages import MAJOR, Hello, Invite

Mode = Literal["open", "allowlist", "invite"]
INVITE_BYTES: Final = 1024
MOST_MAJORS: Final = 16
"""Versions that a refusal names."""
REGISTRATION_S: Final = 3600.0
"""Seconds in which an address block may bring as many new identities as it may have nodes."""


def open_hello(request: bytes) -> Hello:
    """The hello in ``request``. One of another major version is refused in words whatever else it holds.

    Raises:
        Refused: ``version.unsupported``, ``request.invalid`` or ``request.too_large``.
    """
    fields = codec.unpack(request, limit=limits.HELLO_BYTES)
    majors = fields.get("majors")
    if isinstance(majors, tuple) and majors and all(type(major) is int for major in majors) and MAJOR not in majors:
        theirs = ", ".join(map(str, majors[:MOST_MAJORS]))
        raise Refused("version.unsupported", f"this learner speaks version {MAJOR} of the protocol, the node {theirs}")
    return Hello.read(fields)


def check_allowlist(peer: str, *, allowed: Iterable[str]) -> None:
    """Refuse a peer that is not on the list."""
    if peer not in set(allowed):
        raise Refused("node.allowlist", f"this run takes listed nodes only, and {peer} is not on the list")


def open_invite(hello: Hello, *, run: str, learner: str) -> bytes:
    """The token of a hello's invitation, once the learner's own signature on it has been checked."""
    if hello.invite is None:
        raise Refused("node.invite", "this run takes invited nodes only, and the join line has no invitation")
    try:
        envelope = Envelope.decode(hello.invite, limit=INVITE_BYTES)
        body = envelope.open(run=run, kind="invite", signer=learner)
        return Invite.decode(body, limit=INVITE_BYTES).token
    except Refused as error:
        raise Refused("node.invite", f"the invitation is not good: {error.detail}") from error


def check_block(address: str, *, others: Iterable[str], most: int) -> None:
    """Refuse one more peer from an address block (IPv4 /24, IPv6 /48) that has ``most`` already. Loopback is free.

    ``address`` and ``others`` are transport multiaddrs; one that has no IP address belongs to no block.
    """
    block = block_at(address)
    if block is None:
        return
    if sum(1 for other in others if block_at(other) == block) >= most:
        raise Refused("node.too_many", f"there are {most} nodes from {block} already")


class Registrations:
    """How many identities that were never seen before each address block has brought lately.

    Quarantine would mean little if a new key were free: a block brings at most twice ``per_block`` of them at once, and
    ``per_block`` more an hour. Loopback is free. At most ``limits.MAX_BLOCKS`` blocks are remembered, the newest. The
    ledger has every arrival: a learner that starts again counts them once more (:meth:`recall`), so that its restart
    gives no block a second burst.
    """

    def __init__(self, *, per_block: int) -> None:
        self._per_block = per_block
        self._left: OrderedDict[str, TokenBucket] = OrderedDict()

    def register(self, address: str, *, now: float) -> None:
        """Count one more from ``address`` (a transport multiaddr), or refuse it: ``node.too_many``."""
        block = block_at(address)
        if block is not None and not self._take(block, now):
            raise Refused("node.too_many", f"{block} has brought too many new nodes lately; try again in an hour")

    def recall(self, arrivals: Iterable[tuple[str, float]]) -> None:
        """Count those that were let in before: (block, when), in order of their times, on the clock of ``now``."""
        for block, at in arrivals:
            self._take(block, at)

    def _take(self, block: str, now: float) -> bool:
        left = self._left.get(block)
        if left is None:
            left = TokenBucket(rate=self._per_block / REGISTRATION_S, burst=2 * self._per_block, now=now)
            self._left[block] = left
        self._left.move_to_end(block)
        if len(self._left) > limits.MAX_BLOCKS:
            self._left.popitem(last=False)
        return left.take(now)


def block_at(address: str) -> str | None:
    """The address block of a transport multiaddr; None for loopback and for what has no IP address."""
    try:
        return block_of(parse_endpoint(address))
    except UsageError:
        return None
