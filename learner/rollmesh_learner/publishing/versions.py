"""Which policy versions are out: the head, the recent roots that work may still name, and what followed what."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from operator import itemgetter

import trio

from rollmesh_protocol.messages import Head
from rollmesh_protocol.rollout import Swap

KEPT_VERSIONS = 64
"""Recent roots remembered; far more than any S."""
KEPT_LINE = 4096
"""Versions whose order is remembered: more than a learner publishes while one lease stands."""


class Versions:
    """The published heads of a run, newest last. The head before the first publication has version 0."""

    def __init__(self) -> None:
        self._by_root: OrderedDict[bytes, Head] = OrderedDict()
        self._line: list[Swap] = []
        self._head: Head | None = None
        self._changed = trio.Event()

    @property
    def head(self) -> Head:
        """The newest published policy."""
        if self._head is None:
            return Head(version=0, step=0, root=bytes(32))
        return self._head

    def publish(self, head: Head) -> None:
        """``head`` is out. With a root that is out already, only its step moves: the weights did not change."""
        self._by_root.pop(head.root, None)
        self._by_root[head.root] = head
        while len(self._by_root) > KEPT_VERSIONS:
            self._by_root.popitem(last=False)
        if not self._line or head.version > self._line[-1][0]:
            self._line = [*self._line[1 - KEPT_LINE :], (head.version, head.root)]
        self._head = head
        self._changed.set()
        self._changed = trio.Event()

    def reset(self, heads: Iterable[Head], *, undone: Iterable[Head] = ()) -> None:
        """Start again from ``heads`` (oldest first), as the ledger has them after a rewind.

        Versions that were ``undone`` count for nothing, but nodes have had them.
        """
        self._by_root.clear()
        self._line = []
        self._head = None
        for head in heads:
            self.publish(head)
        line = {*self._line, *((head.version, head.root) for head in undone)}
        self._line = sorted(line, key=itemgetter(0))[-KEPT_LINE:]

    def since(self, version: int) -> tuple[Swap, ...]:
        """Everything that ever went out after ``version``, ascending, what was undone included."""
        return tuple(self._line[bisect_right(self._line, version, key=itemgetter(0)) :])

    def by_root(self, root: bytes) -> Head | None:
        """The newest version with this root, or None when it was never published or is forgotten."""
        return self._by_root.get(root)

    async def wait_published(self, version: int) -> Head:
        """The head, once it is at ``version`` or later."""
        while self.head.version < version:
            await self._changed.wait()
        return self.head
