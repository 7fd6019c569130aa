"""The join line: what an operator hands out and a volunteer pastes behind ``--join``.

One or several full addresses of the same learner and, perhaps, an invitation, joined by commas:
``/ip4/203.0.113.7/tcp/4700/p2p/12D3Koo...,/dns4/rl.example.org/tcp/4700/p2p/12D3Koo...,invite:3q2-7w``. No character in
it means anything to a shell, so it needs no quotes. What an invitation says is not looked at here.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Final

from rollmesh_peer.mesh.address import PeerAddress, parse_peer_address
from rollmesh_protocol.errors import UsageError

MAX_LINE_CHARS: Final = 8192
MAX_ADDRESSES: Final = 16
MAX_INVITE_BYTES: Final = 1024

_INVITE: Final = "invite:"
_SEPARATORS: Final = re.compile(r"[,\s]+")


@dataclass(frozen=True, kw_only=True)
class JoinLine:
    """Where a learner is, and the invitation to its run if there is one."""

    addresses: tuple[PeerAddress, ...]
    invite: bytes | None = None

    def __post_init__(self) -> None:
        if not self.addresses:
            raise UsageError("a join line without an address; it looks like /ip4/203.0.113.7/tcp/4700/p2p/12D3Koo...")
        if len(self.addresses) > MAX_ADDRESSES:
            raise UsageError(f"a join line with {len(self.addresses)} addresses; {MAX_ADDRESSES} are allowed")
        if len({address.peer for address in self.addresses}) > 1:
            raise UsageError("a join line that names more than one learner")
        if self.invite is not None and not 0 < len(self.invite) <= MAX_INVITE_BYTES:
            raise UsageError("a join line with an empty or oversized invitation")

    @property
    def learner(self) -> str:
        """The learner's peer id: the root of trust of the run."""
        return self.addresses[0].peer

    @classmethod
    def parse(cls, text: str) -> JoinLine:
        """The join line in ``text``; commas, spaces and line breaks separate its parts.

        Raises:
            UsageError: one sentence that says what is wrong.
        """
        if len(text) > MAX_LINE_CHARS:
            raise UsageError(f"a join line of {len(text)} characters; {MAX_LINE_CHARS} are allowed")
        parts = [part for part in _SEPARATORS.split(text) if part]
        invites = [part for part in parts if part.startswith(_INVITE)]
        if len(invites) > 1:
            raise UsageError("a join line with more than one invitation")
        addresses = dict.fromkeys(parse_peer_address(part) for part in parts if not part.startswith(_INVITE))
        return cls(addresses=tuple(addresses), invite=_decoded(invites[0]) if invites else None)

    def __str__(self) -> str:
        parts = [str(address) for address in self.addresses]
        if self.invite is not None:
            parts.append(_INVITE + base64.urlsafe_b64encode(self.invite).decode().rstrip("="))
        return ",".join(parts)


def _decoded(part: str) -> bytes:
    text = part.removeprefix(_INVITE)
    try:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", text):
            raise binascii.Error
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error as error:
        raise UsageError("the invitation in the join line is damaged; paste the whole line") from error
