"""Which versions are out, in order, and the edges between them. Pure.

An entry's patch leads from the root of the entry before it; a whole history is therefore one line of roots, and a
rollback is an ordinary step along it. Beside that line run shortcuts: skip patches over several versions, for nodes
that are slow or slept, and cumulative patches from the base model, for those who join. Roots may occur twice, versions
never. What the publisher keeps on disk follows from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rollmesh_protocol import limits
from rollmesh_protocol.edges import cheapest_path
from rollmesh_protocol.manifest import Edge, Manifest
from rollmesh_protocol.messages import Head, PolicyHeader

NOTHING: Final = Head(version=0, step=0, root=bytes(32))
"""The head before the first publication."""


@dataclass(frozen=True)
class Sealed:
    """A manifest, its name and the length of its envelope."""

    name: bytes
    manifest: Manifest
    envelope_bytes: int

    @property
    def is_cumulative(self) -> bool:
        """True for a patch from the base model."""
        return self.manifest.kind == "cumulative"

    def edge(self) -> Edge:
        """Its short form."""
        return Edge(
            kind=self.manifest.kind,
            version=self.manifest.version,
            step=self.manifest.step,
            parent=self.manifest.parent,
            root=self.manifest.root,
            manifest=self.name,
            manifest_bytes=self.envelope_bytes,
            payload_bytes=self.manifest.payload_bytes,
        )

    def header(self) -> PolicyHeader:
        """What is gossiped about it."""
        return PolicyHeader(
            version=self.manifest.version,
            step=self.manifest.step,
            root=self.manifest.root,
            parent=self.manifest.parent,
            manifest=self.name,
            manifest_bytes=self.envelope_bytes,
            payload_bytes=self.manifest.payload_bytes,
        )


@dataclass(frozen=True)
class Entry:
    """A published version. Both edges may be gone from disk while it is still the start of the next entry's patch."""

    head: Head
    patch: Sealed | None
    anchor: Sealed | None
    shortcuts: tuple[Sealed, ...] = ()
    """Skip and cumulative patches that lead to it."""

    @property
    def edges(self) -> tuple[Sealed, ...]:
        """The edges that lead to it."""
        return (*(edge for edge in (self.patch, self.anchor) if edge is not None), *self.shortcuts)

    @property
    def tensors(self) -> bytes | None:
        """The digests of its tensors, if any manifest of it is still held."""
        return self.edges[0].manifest.tensors if self.edges else None


class History:
    """Published versions, oldest first."""

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self.entries: list[Entry] = list(entries)

    @property
    def head(self) -> Head:
        """The newest version; :data:`NOTHING` before the first."""
        return self.entries[-1].head if self.entries else NOTHING

    @property
    def header(self) -> PolicyHeader | None:
        """The newest version's header: of its patch where there is one."""
        edges = self.entries[-1].edges if self.entries else ()
        return edges[0].header() if edges else None

    @property
    def names(self) -> frozenset[bytes]:
        """Every manifest that is part of the history."""
        return frozenset(edge.name for entry in self.entries for edge in entry.edges)

    def append(self, entry: Entry) -> None:
        """Publish the next version. Its patch starts at the present head's root."""
        assert entry.head.version > self.head.version
        assert entry.patch is None or entry.patch.manifest.parent == self.head.root
        self.entries.append(entry)

    def add(self, edge: Sealed) -> None:
        """Give the entry of an anchor's, a skip patch's or a cumulative patch's version one more edge."""
        for index, entry in enumerate(self.entries):
            if entry.head.version != edge.manifest.version:
                continue
            if edge.manifest.kind == "anchor":
                self.entries[index] = replace(entry, anchor=edge)
            else:
                self.entries[index] = replace(entry, shortcuts=(*entry.shortcuts, edge))

    def drop_anchor(self, position: int) -> None:
        """The anchor of the entry at ``position`` is of no use any more."""
        self.entries[position] = replace(self.entries[position], anchor=None)

    def anchor_positions(self) -> list[int]:
        """The positions of entries that have an anchor, oldest first."""
        return [index for index, entry in enumerate(self.entries) if entry.anchor is not None]

    def versions_since_anchor(self) -> int:
        """Entries after the newest anchor; all of them when there is none."""
        positions = self.anchor_positions()
        return len(self.entries) - 1 - positions[-1] if positions else len(self.entries)

    def position(self, root: bytes | None) -> int | None:
        """Where ``root`` was published last."""
        return next(
            (index for index in range(len(self.entries) - 1, -1, -1) if self.entries[index].head.root == root), None
        )

    def edges_towards_head(self, root: bytes | None) -> tuple[Edge, ...]:
        """Enough edges for a cheapest path from ``root`` to the head, at most ``limits.MAX_EDGES``.

        The cheapest way from ``root`` and the cheapest from nothing; and, the newest first, other edges that a node may
        have begun to fetch.
        """
        if root == self.head.root:
            return ()
        offered = [sealed.edge() for entry in reversed(self.entries) for sealed in entry.edges]
        goal = self.head.root
        ways = [cheapest_path(offered, held=held, goal=goal) or () for held in (root, None)]
        chosen = {edge.manifest: edge for edge in (*ways[0], *ways[1])}
        held_at = self.position(root)
        since = self.entries[held_at].head.version if held_at is not None else self.head.version
        for edge in offered:
            if len(chosen) < limits.MAX_EDGES and edge.version > since and edge.parent is not None:
                chosen.setdefault(edge.manifest, edge)
        return tuple(chosen.values())[: limits.MAX_EDGES]

    def way(self, start: int, end: int) -> tuple[Sealed, ...] | None:
        """The patches of the cheapest way from the entry at ``start`` to that at ``end``; None when there is none."""
        between = self.entries[start + 1 : end + 1]
        edges = [edge for entry in between for edge in entry.edges]
        return cheapest_way(edges, start=self.entries[start].head.root, goal=self.entries[end].head.root)

    def trim(self, *, keep_versions: int, keep_anchors: int) -> None:
        """Forget what need not be kept.

        That is all but the newest ``keep_anchors`` anchors and as many cumulative patches, and entries that are older
        than both the newest ``keep_versions`` and those anchors.
        """
        anchors = self.anchor_positions()[-keep_anchors:]
        cumulative = [edge.name for entry in self.entries for edge in entry.shortcuts if edge.is_cumulative][
            -keep_anchors:
        ]
        oldest = min([max(0, len(self.entries) - keep_versions), *anchors[:1]])
        for index, entry in enumerate(self.entries):
            kept = tuple(edge for edge in entry.shortcuts if not edge.is_cumulative or edge.name in cumulative)
            self.entries[index] = replace(entry, anchor=entry.anchor if index in anchors else None, shortcuts=kept)
        del self.entries[:oldest]


def cheapest_way(edges: Iterable[Sealed], *, start: bytes, goal: bytes) -> tuple[Sealed, ...] | None:
    """The patches among ``edges`` that lead from root ``start`` to ``goal`` with the fewest bytes; None: no way."""
    patches = {edge.name: edge for edge in edges if edge.manifest.parent is not None}
    path = cheapest_path([edge.edge() for edge in patches.values()], held=start, goal=goal)
    return None if path is None else tuple(patches[edge.manifest] for edge in path)


def rebuild(announced: Sequence[Head], held: Sequence[Sealed]) -> History:
    """The history of the versions that were announced, as far back from the newest as edges in ``held`` connect it."""
    by_version: dict[int, list[Sealed]] = {}
    for edge in held:
        by_version.setdefault(edge.manifest.version, []).append(edge)
    entries = []
    for head in sorted(announced, key=lambda head: head.version):
        edges = [edge for edge in by_version.get(head.version, []) if edge.manifest.root == head.root]
        patch = next((edge for edge in edges if edge.manifest.kind == "patch"), None)
        anchor = next((edge for edge in edges if edge.manifest.kind == "anchor"), None)
        shortcuts = tuple(edge for edge in edges if edge.manifest.kind in ("skip", "cumulative"))
        entries.append(Entry(head=head, patch=patch, anchor=anchor, shortcuts=shortcuts))
    return History(_connected(entries))


def _connected(entries: Sequence[Entry]) -> list[Entry]:
    """The longest tail in which each entry's patch starts at the entry before it (or an anchor makes up for it)."""
    tail: list[Entry] = []
    for entry in reversed(entries):
        if tail and tail[0].patch is None:
            break
        if tail and tail[0].patch is not None and tail[0].patch.manifest.parent != entry.head.root:
            break
        tail.insert(0, entry)
    return tail
