"""The history of published versions: what is offered from where, what is kept, and how it is rebuilt."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_learner.publishing.published import NOTHING, Entry, History, Sealed, rebuild
from rollmesh_protocol import limits
from rollmesh_protocol.edges import cheapest_path
from rollmesh_protocol.manifest import Manifest
from rollmesh_protocol.messages import Head


def root(number: int) -> bytes:
    return number.to_bytes(32, "big")


def sealed(version: int, *, to: int, parent: int | None, payload_bytes: int = 1000) -> Sealed:
    manifest = Manifest(
        run="r", version=version, step=version, kind="anchor" if parent is None else "patch",
        parent=None if parent is None else root(parent), root=root(to),
        codec="raw" if parent is None else "context-1", layout=root(0), chunk_bytes=4096, payload_bytes=payload_bytes,
        chunks=bytes(32 * -(-payload_bytes // 4096)), tensors=root(to),
    )  # fmt: skip
    name = (version * 2 + (parent is None)).to_bytes(32, "big")
    return Sealed(name=name, manifest=manifest, envelope_bytes=500)


def history(roots: list[int], *, anchors: tuple[int, ...] = (1,)) -> History:
    """Versions 1.. with these roots; the versions in ``anchors`` have one."""
    made = History()
    for version, (before, to) in enumerate(itertools.pairwise([None, *roots]), start=1):
        patch = None if before is None else sealed(version, to=to, parent=before)
        anchor = sealed(version, to=to, parent=None, payload_bytes=100_000) if version in anchors else None
        made.append(Entry(head=Head(version=version, step=version, root=root(to)), patch=patch, anchor=anchor))
    return made


def path_versions(made: History, held: int | None) -> list[tuple[str, int]] | None:
    at = None if held is None else root(held)
    path = cheapest_path(made.edges_towards_head(at), held=at, goal=made.head.root)
    return None if path is None else [(edge.kind, edge.version) for edge in path]


def test_before_the_first_version() -> None:
    assert History().head == NOTHING
    assert History().header is None
    assert History().edges_towards_head(None) == ()


def test_from_each_root_patches_lead_to_the_head() -> None:
    made = history([10, 11, 12, 13])
    assert path_versions(made, 10) == [("patch", 2), ("patch", 3), ("patch", 4)]
    assert path_versions(made, 12) == [("patch", 4)]
    assert path_versions(made, 13) == []


def test_from_nothing_or_from_elsewhere_the_anchor_leads_there() -> None:
    made = history([10, 11, 12, 13], anchors=(1, 3))
    for held in (None, 99):
        assert path_versions(made, held) == [("anchor", 3), ("patch", 4)]


def test_after_a_rollback_the_last_time_of_a_root_counts() -> None:
    made = history([10, 11, 12, 11, 13])
    assert path_versions(made, 11) == [("patch", 5)]
    assert path_versions(made, 12) == [("patch", 4), ("patch", 5)]


def test_a_chain_too_long_to_name_gives_way_to_the_anchor() -> None:
    roots = list(range(10, 10 + limits.MAX_EDGES + 50))
    made = history(roots, anchors=(1, limits.MAX_EDGES))
    assert len(made.edges_towards_head(root(10))) <= limits.MAX_EDGES
    path = path_versions(made, 10)
    assert path is not None
    assert path[0] == ("anchor", limits.MAX_EDGES)
    assert path_versions(made, roots[-2]) == [("patch", len(roots))]


def test_the_header_is_the_newest_patch_or_the_anchor() -> None:
    made = history([10, 11])
    header = made.header
    assert header is not None
    assert (header.version, header.parent, header.root) == (2, root(10), root(11))
    first = history([10]).header
    assert first is not None
    assert first.parent is None


def test_trimming_keeps_the_last_versions_and_those_back_to_the_kept_anchors() -> None:
    made = history(list(range(10, 30)), anchors=(1, 5, 10, 15))
    made.trim(keep_versions=3, keep_anchors=2)
    assert [entry.head.version for entry in made.entries] == list(range(10, 21))
    assert [made.entries[index].head.version for index in made.anchor_positions()] == [10, 15]
    made.trim(keep_versions=18, keep_anchors=1)
    assert [entry.head.version for entry in made.entries] == list(range(10, 21))
    assert [made.entries[index].head.version for index in made.anchor_positions()] == [15]


def test_trimming_by_versions_reaches_behind_the_anchors() -> None:
    made = history(list(range(10, 30)), anchors=(1, 15))
    made.trim(keep_versions=12, keep_anchors=1)
    assert [entry.head.version for entry in made.entries] == list(range(9, 21))
    assert path_versions(made, 18) is not None  # version 9, now without an edge of its own before it


def test_versions_since_the_anchor_are_counted() -> None:
    assert history([10, 11, 12], anchors=(1,)).versions_since_anchor() == 2
    assert history([10, 11, 12], anchors=(1, 3)).versions_since_anchor() == 0


def test_a_version_must_follow_on_the_head() -> None:
    made = history([10, 11])
    with pytest.raises(AssertionError):
        made.append(Entry(head=Head(version=3, step=3, root=root(12)), patch=sealed(3, to=12, parent=10), anchor=None))


def shortcut(version: int, *, to: int, parent: int, kind: str = "skip", payload_bytes: int = 1500) -> Sealed:
    """A skip or cumulative patch; half as dear as the patches it replaces, or less."""
    plain = sealed(version, to=to, parent=parent, payload_bytes=payload_bytes)
    manifest = plain.manifest.model_copy(update={"kind": kind})
    return Sealed(name=bytes([255, kind == "skip", version, parent]) + bytes(28), manifest=manifest, envelope_bytes=500)


def test_shortcuts_are_offered_and_taken() -> None:
    made = history(list(range(10, 20)))
    made.add(shortcut(5, to=14, parent=11))
    made.add(shortcut(9, to=18, parent=14))
    made.add(shortcut(8, to=17, parent=10, kind="cumulative"))
    assert path_versions(made, 11) == [("skip", 5), ("skip", 9), ("patch", 10)]
    assert path_versions(made, 12) == [("patch", 4), ("patch", 5), ("skip", 9), ("patch", 10)]
    assert path_versions(made, 10) == [("cumulative", 8), ("patch", 9), ("patch", 10)]
    way = made.way(1, 9)
    assert way is not None
    assert [edge.manifest.version for edge in way] == [5, 9, 10]
    assert made.way(9, 1) is None
    again = rebuild([entry.head for entry in made.entries], everything(made))
    assert again.entries == made.entries


def test_trimming_keeps_the_newest_cumulative_patches_which_need_no_version_before_them() -> None:
    made = history(list(range(10, 30)), anchors=(1, 10, 15))
    for version in (10, 13, 15):
        made.add(shortcut(version, to=9 + version, parent=10, kind="cumulative"))
    made.trim(keep_versions=3, keep_anchors=2)
    assert [edge.manifest.version for edge in everything(made) if edge.is_cumulative] == [13, 15]
    assert path_versions(made, 10) == [("cumulative", 15), *(("patch", version) for version in range(16, 21))]


def everything(made: History) -> list[Sealed]:
    return [edge for entry in made.entries for edge in entry.edges]


def test_rebuilding_gives_the_same_history() -> None:
    made = history([10, 11, 12, 11, 13], anchors=(1, 4))
    again = rebuild([entry.head for entry in made.entries], everything(made))
    assert again.entries == made.entries


def test_what_was_never_announced_is_not_in_a_rebuilt_history() -> None:
    made = history([10, 11, 12])
    again = rebuild([entry.head for entry in made.entries[:2]], everything(made))
    assert again.head.version == 2
    assert again.names == history([10, 11]).names


def test_a_rebuilt_history_ends_where_an_edge_is_missing() -> None:
    made = history([10, 11, 12, 13, 14], anchors=(1, 4))
    held = [edge for edge in everything(made) if edge.manifest.version != 3]
    again = rebuild([entry.head for entry in made.entries], held)
    assert [entry.head.version for entry in again.entries] == [3, 4, 5]
    assert path_versions(again, 12) == [("patch", 4), ("patch", 5)]


@given(
    roots=st.lists(st.integers(1, 6), min_size=1, max_size=40),
    anchors=st.sets(st.integers(1, 40)),
    keep_versions=st.integers(1, 40),
    keep_anchors=st.integers(1, 3),
)
def test_every_kept_root_reaches_the_head_and_rebuilding_is_exact(
    roots: list[int], anchors: set[int], keep_versions: int, keep_anchors: int
) -> None:
    line = [value for index, value in enumerate(roots) if index == 0 or value != roots[index - 1]]
    made = history(line, anchors=(1, *anchors))
    made.trim(keep_versions=keep_versions, keep_anchors=keep_anchors)
    assert len(made.entries) >= min(keep_versions, len(line))
    assert made.anchor_positions()
    for entry in made.entries:
        assert path_versions(made, int.from_bytes(entry.head.root, "big")) is not None
    assert path_versions(made, None) is not None
    assert rebuild([entry.head for entry in made.entries], everything(made)).entries == made.entries
