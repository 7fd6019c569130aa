"""Whom the learner introduces to whom: a few random members of the run that can be dialled. Pure.

Spread over address blocks where that is possible, because peers of one block tend to fail, throttle or collude
together. Chance comes as an argument, and no state is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

from rollmesh_peer.mesh.address import block_of, parse_peer_address
from rollmesh_protocol import limits
from rollmesh_protocol.errors import UsageError
from rollmesh_protocol.messages import MAX_ADDRESSES, Neighbour

_BLOCK_SHARE = 4
"""At most one in so many introductions is of the same address block, as long as others are left."""


def introduce(members: Mapping[str, Sequence[str]], *, to: str, count: int, random: Random) -> tuple[Neighbour, ...]:
    """Up to ``count`` neighbours for the peer ``to``.

    Args:
        members: admitted peers and the full multiaddrs under which each says it can be dialled; those without any,
            and ``to`` itself, are passed over. Addresses that are malformed or name another peer are dropped.
    """
    able = {peer: _dialable(peer, addresses) for peer, addresses in members.items() if peer != to}
    order = [peer for peer, addresses in able.items() if addresses]
    random.shuffle(order)
    count = min(count, limits.MAX_NEIGHBOURS)
    most = max(1, count // _BLOCK_SHARE)
    taken: Counter[str] = Counter()
    chosen: list[str] = []
    crowded: list[str] = []
    for peer in order:
        block = _block(able[peer])
        if block is not None and taken[block] >= most:
            crowded.append(peer)
            continue
        if block is not None:
            taken[block] += 1
        chosen.append(peer)
    return tuple(Neighbour(peer=peer, addresses=able[peer]) for peer in (chosen + crowded)[:count])


def _dialable(peer: str, addresses: Sequence[str]) -> tuple[str, ...]:
    good = []
    for text in addresses[:MAX_ADDRESSES]:
        try:
            address = parse_peer_address(text)
        except UsageError:
            continue
        if address.peer == peer:
            good.append(str(address))
    return tuple(good)


def _block(addresses: Sequence[str]) -> str | None:
    """The block of the first address that has one."""
    blocks = (block_of(parse_peer_address(address).endpoint) for address in addresses)
    return next((block for block in blocks if block is not None), None)
