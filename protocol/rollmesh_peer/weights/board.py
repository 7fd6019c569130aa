"""Who holds what of one payload: our own chunks, and those of the peers with whom we keep a have stream.

Bitmaps only, no I/O. The manifest may become known later than the first peer that asks about it: until then our own
bitmap is empty (zero bytes, which no known payload has) and the others' are kept as they came.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
import trio

from rollmesh_peer.weights.offers import Bits, Offers
from rollmesh_protocol import limits
from rollmesh_protocol.chunks import bitmap_bytes
from rollmesh_protocol.errors import Refused

UNKNOWN: Final = b""
"""The bitmap of somebody who does not know the manifest."""


class Pulse:
    """Wakes everybody who waits, again and again."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def fire(self) -> None:
        """Wake those who wait now."""
        self._event.set()
        self._event = trio.Event()

    async def wait(self) -> None:
        """Return at the next :meth:`fire`."""
        await self._event.wait()


class Board:
    """The bitmaps of one payload."""

    def __init__(self, name: bytes) -> None:
        self.name: Final = name
        self.changed: Final = Pulse()
        """Fires when something changes that a fetch wants to know."""
        self.talks: Final[set[Pulse]] = set()
        """Those of the have streams: they fire when we hold more, and when the other side of that one does."""
        self.last_change = -float("inf")
        self.is_fetching = 0
        """Tasks of ours that work on this payload."""
        self.talking: Counter[str] = Counter()
        """Have streams, either way, by peer."""
        self.opened: set[str] = set()
        """Peers to whom we opened one."""
        self.retry_at: dict[str, float] = {}
        """When a peer that broke off or refused may be asked again."""
        self.offers: Offers | None = None
        """An origin's."""
        self._own: Bits | None = None
        self._others: dict[str, bytes] = {}

    @property
    def is_known(self) -> bool:
        """True once the number of chunks is known."""
        return self._own is not None

    @property
    def chunk_count(self) -> int:
        """0 while it is not known."""
        return 0 if self._own is None else len(self._own)

    @property
    def is_complete(self) -> bool:
        """True when we hold every chunk."""
        return self._own is not None and bool(self._own.all())

    def learn(self, held: Bits) -> None:
        """The manifest is known, and this is what we hold."""
        if self._own is None or not np.array_equal(self._own, held):
            self._own = held.copy()
            self._others = {peer: raw for peer, raw in self._others.items() if raw == UNKNOWN or self._fits(raw)}
            self._note_own()

    def gain(self, index: int) -> None:
        """We hold one chunk more."""
        if self._own is not None:
            self._own[index] = True
            self._note_own()

    def own_bits(self) -> Bits:
        """The chunks that we hold, bool[chunks]; of length 0 while the payload is not known."""
        return np.zeros(0, np.bool_) if self._own is None else self._own

    def own_bitmap(self) -> bytes:
        """What we tell others."""
        return UNKNOWN if self._own is None else to_bytes(self._own)

    def hear(self, peer: str, bitmap: bytes) -> None:
        """What ``peer`` says it holds.

        Raises:
            Refused: ``request.invalid`` for a bitmap that does not fit the payload.
        """
        if self._own is not None and bitmap != UNKNOWN and not self._fits(bitmap):
            raise Refused("request.invalid", f"a bitmap of {len(bitmap)} bytes that does not fit the payload")
        if self._others.get(peer) != bitmap:
            self._others[peer] = bitmap
            self.note()

    def leave(self, peer: str) -> None:
        """``peer`` is gone."""
        if self.offers is not None:
            self.offers.leave(peer)
        if self._others.pop(peer, None) is not None:
            self.note()

    def others(self) -> dict[str, bytes]:
        """The bitmap of each peer that knows the payload; empty while we do not."""
        return {} if self._own is None else {peer: raw for peer, raw in self._others.items() if raw != UNKNOWN}

    def heard_of(self, peer: str) -> Bits | None:
        """What ``peer`` holds; None while either side does not know the payload."""
        raw = self.raw_of(peer)
        return None if raw is None else self.bits(raw)

    def raw_of(self, peer: str) -> bytes | None:
        """The same as the bitmap that it sent."""
        raw = self._others.get(peer, UNKNOWN)
        return None if self._own is None or raw == UNKNOWN else raw

    def num_held(self, peer: str) -> int:
        """How many chunks ``peer`` says it holds; 0 while we have not heard from it."""
        return int.from_bytes(self._others.get(peer, UNKNOWN), "little").bit_count()

    def knowers(self) -> list[str]:
        """Peers that know the manifest, whether we do or not."""
        return [peer for peer, raw in self._others.items() if raw != UNKNOWN]

    def bits(self, bitmap: bytes) -> Bits:
        """One of :meth:`others`, unpacked."""
        return np.unpackbits(np.frombuffer(bitmap, np.uint8), count=self.chunk_count, bitorder="little").astype(
            np.bool_
        )

    def has_everything(self, peer: str) -> bool:
        """True when ``peer`` holds the whole payload."""
        return self._own is not None and 0 < self.num_held(peer) == self.chunk_count

    @property
    def update_every_s(self) -> float:
        """Least time between two updates: long for large bitmaps."""
        return max(limits.HAVE_EVERY_S, bitmap_bytes(self.chunk_count) / limits.HAVE_BYTES_PER_S)

    def note(self) -> None:
        """Something changed that a fetch wants to know."""
        self.last_change = trio.current_time()
        self.changed.fire()

    def _note_own(self) -> None:
        self.note()
        for talk in self.talks:
            talk.fire()

    def _fits(self, raw: bytes) -> bool:
        if len(raw) != bitmap_bytes(self.chunk_count):
            return False
        spare = 8 * len(raw) - self.chunk_count
        return not spare or raw[-1] >> (8 - spare) == 0


def to_bytes(bits: Bits) -> bytes:
    """bool[chunks] as it travels."""
    return np.packbits(bits, bitorder="little").tobytes()


def held_bits(held: frozenset[int], *, chunk_count: int) -> Bits:
    """The indices of held chunks as bool[chunk_count]."""
    bits = np.zeros(chunk_count, np.bool_)
    bits[list(held)] = True
    return bits
