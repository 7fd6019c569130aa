"""The cheapest way from the weights a node holds to the head, over edges priced in bytes."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from rollmesh_protocol.manifest import Edge


def cheapest_path(edges: Iterable[Edge], *, held: bytes | None, goal: bytes) -> tuple[Edge, ...] | None:
    """The edges from root ``held`` to root ``goal`` that cost the fewest bytes, or None when there is no way.

    ``held`` may be None (nothing usable at hand): then only a path that begins with an anchor will do. An anchor can
    be taken from anywhere. The empty path means that the goal is already held. Dijkstra's algorithm.
    """
    if held == goal:
        return ()
    onward: dict[bytes | None, list[Edge]] = {}
    for edge in edges:
        onward.setdefault(edge.parent, []).append(edge)
    order = itertools.count()
    frontier: list[tuple[int, int, bytes | None, tuple[Edge, ...]]] = [(0, next(order), held, ())]
    settled: set[bytes | None] = set()
    while frontier:
        cost, _, root, path = heapq.heappop(frontier)
        if root == goal:
            return path
        if root in settled:
            continue
        settled.add(root)
        anchors = onward.get(None, []) if root is not None else []
        for edge in itertools.chain(onward.get(root, []), anchors):
            if edge.root not in settled:
                heapq.heappush(frontier, (cost + edge.cost_bytes, next(order), edge.root, (*path, edge)))
    return None
