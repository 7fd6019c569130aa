"""Which versions are out, in order, and the edges between them. Pure.

An entry's patch leads from the root of the entry before it; a whole history is therefore one line of roots, and a
rollback is an ordinary step along it. Roots may occur twice, versions never. What the publisher keeps on disk follows
from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from rollmesh_protocol import limits
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

    @property
    def edges(self) -> tuple[Sealed, ...]:
        """The edges that lead to it."""
        return tuple(edge for edge in (self.patch, self.anchor) if edge is not None)

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

    def add_anchor(self, anchor: Sealed) -> None:
        """Give the entry of the anchor's version its second edge."""
        for index, entry in enumerate(self.entries):
            if entry.head.version == anchor.manifest.version:
                self.entries[index] = replace(entry, anchor=anchor)

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

    def edges_towards_head(self, root: bytes | None) -> tuple[Edge, ...]:
        """Enough edges for a cheapest path from ``root`` to the head, at most ``limits.MAX_EDGES``.

        The patches from the last time that ``root`` was published, if they are all there; the newest anchor, and the
        patches after it.
        """
        if root == self.head.root:
            return ()
        chosen: dict[bytes, Edge] = {}
        anchors = self.anchor_positions()
        if anchors:
            newest = self.entries[anchors[-1]]
            assert newest.anchor is not None
            chosen[newest.anchor.name] = newest.anchor.edge()
            chosen |= self._patches_after(anchors[-1]) or {}
        held_at = [index for index, entry in enumerate(self.entries) if entry.head.root == root]
        patches = self._patches_after(held_at[-1]) if held_at else None
        if patches is not None and len(chosen | patches) <= limits.MAX_EDGES:
            chosen |= patches
        return tuple(chosen.values())[: limits.MAX_EDGES]

    def trim(self, *, keep_versions: int, keep_anchors: int) -> None:
        """Forget what need not be kept: all but the newest anchors, and entries that are older than both limits."""
        anchors = self.anchor_positions()[-keep_anchors:]
        oldest = min([max(0, len(self.entries) - keep_versions), *anchors[:1]])
        for index in range(len(self.entries)):
            if index not in anchors:
                self.entries[index] = replace(self.entries[index], anchor=None)
        del self.entries[:oldest]

    def _patches_after(self, position: int) -> dict[bytes, Edge] | None:
        """The patches from the entry at ``position`` to the head; None when one is missing."""
        patches = [entry.patch for entry in self.entries[position + 1 :]]
        if any(patch is None for patch in patches):
            return None
        return {patch.name: patch.edge() for patch in patches if patch is not None}


def rebuild(announced: Sequence[Head], held: Sequence[Sealed]) -> History:
    """The history of the versions that were announced, as far back from the newest as edges in ``held`` connect it."""
    by_version: dict[int, list[Sealed]] = {}
    for edge in held:
        by_version.setdefault(edge.manifest.version, []).append(edge)
    entries = []
    for head in sorted(announced, key=lambda head: head.version):
        edges = [edge for edge in by_version.get(head.version, []) if edge.manifest.root == head.root]
        patch = next((edge for edge in edges if edge.manifest.parent is not None), None)
        anchor = next((edge for edge in edges if edge.manifest.parent is None), None)
        entries.append(Entry(head=head, patch=patch, anchor=anchor))
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
