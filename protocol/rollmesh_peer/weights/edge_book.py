"""The edges that a node has heard of, and the cheapest way over them. No I/O.

What is on disk already costs nothing in a plan, so a plan made in the middle of a fetch leaves that fetch only for a
whole way that is cheaper than what is left of it. Edges that turned out to be of no use are remembered with the reason.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from rollmesh_protocol import limits
from rollmesh_protocol.edges import cheapest_path
from rollmesh_protocol.manifest import Edge


class EdgeBook:
    """At most ``2 * limits.MAX_EDGES`` edges, the newest, and as many reasons."""

    def __init__(self) -> None:
        self._edges: OrderedDict[bytes, Edge] = OrderedDict()
        self._useless: OrderedDict[bytes, str] = OrderedDict()

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges that may be of use, in the order in which they were heard of."""
        return tuple(self._edges.values())

    def learn(self, edge: Edge) -> None:
        """Somebody told of this edge."""
        if edge.manifest not in self._useless:
            self._edges[edge.manifest] = edge
            self._edges.move_to_end(edge.manifest)
            _forget_oldest(self._edges)

    def replace(self, offered: Iterable[Edge], *, head_version: int) -> None:
        """The learner's list as of ``head_version``: what it does not offer any more is forgotten."""
        newer = [edge for edge in self._edges.values() if edge.version > head_version]
        self._edges.clear()
        for edge in (*offered, *newer):
            self.learn(edge)

    def forget(self, edge: Edge) -> None:
        """``edge`` cannot be had just now; it may be offered again."""
        self._edges.pop(edge.manifest, None)

    def discard(self, edge: Edge, *, why: str) -> None:
        """``edge`` is of no use, and never will be."""
        self._edges.pop(edge.manifest, None)
        self._useless[edge.manifest] = why
        _forget_oldest(self._useless)

    def why_useless(self, edge: Edge) -> str | None:
        """The reason for which ``edge`` was discarded."""
        return self._useless.get(edge.manifest)

    def plan(self, missing: Mapping[Edge, int], *, held: bytes | None, goal: bytes) -> tuple[Edge, ...] | None:
        """The way from ``held`` to ``goal`` for which the fewest bytes are still to be fetched, or None.

        Args:
            missing: the edges that may be used, and the payload bytes still to be fetched for each.
        """
        priced = {
            edge.manifest: edge.model_copy(
                update={"payload_bytes": still, "manifest_bytes": edge.manifest_bytes if still else 0}
            )
            for edge, still in missing.items()
        }
        path = cheapest_path(priced.values(), held=held, goal=goal)
        whole = {edge.manifest: edge for edge in missing}
        return None if path is None else tuple(whole[edge.manifest] for edge in path)


def _forget_oldest(table: OrderedDict[bytes, Edge] | OrderedDict[bytes, str]) -> None:
    while len(table) > 2 * limits.MAX_EDGES:
        table.popitem(last=False)
