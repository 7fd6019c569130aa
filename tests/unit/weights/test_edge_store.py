"""The edge store: only verified things count, whatever was interrupted, and what is in use stays."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from rollmesh_peer.weights import durable
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_protocol.errors import HostError, Refused
from rollmesh_protocol.identity import Identity
from tests.unit.weights.kit import LEARNER, MIXED, RUN, SignedEdge, anchor, nudged, patch, random_image, sign, write

IMAGE = random_image(MIXED, 1)
NEXT = nudged(MIXED, IMAGE, 2)
ANCHOR = anchor(MIXED, IMAGE, version=1)
PATCH = patch(MIXED, IMAGE, NEXT, version=2)
QUOTA = 10_000_000


def open_store(folder: Path, *, quota_bytes: int = QUOTA) -> EdgeStore:
    return EdgeStore(folder, run=RUN, learner=LEARNER.peer, layout=MIXED, quota_bytes=quota_bytes)


def fill(store: EdgeStore, edge: SignedEdge, *, but: int | None = None) -> None:
    store.add_manifest(edge.name, edge.envelope)
    for index in range(edge.manifest.chunk_count):
        if index != but:
            store.write_chunk(edge.name, index, edge.chunk(index))


def test_chunks_in_any_order_make_the_payload(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.add_manifest(ANCHOR.name, ANCHOR.envelope) == ANCHOR.manifest
    indices = list(range(ANCHOR.manifest.chunk_count))
    assert len(indices) > 3
    for done, index in enumerate(reversed(indices)):
        assert not store.is_complete(ANCHOR.name)
        assert len(store.held(ANCHOR.name)) == done
        store.write_chunk(ANCHOR.name, index, ANCHOR.chunk(index))
        assert store.read_chunk(ANCHOR.name, index) == ANCHOR.chunk(index)
    assert store.is_complete(ANCHOR.name)
    assert store.payload_path(ANCHOR.name).read_bytes() == IMAGE
    assert store.manifest(ANCHOR.name) == ANCHOR.manifest
    assert store.envelope(ANCHOR.name) == ANCHOR.envelope


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, ANCHOR)
    fill(store, PATCH)
    again = open_store(tmp_path)
    assert set(again.names()) == {ANCHOR.name, PATCH.name}
    assert again.is_complete(ANCHOR.name)
    assert again.read_chunk(PATCH.name, 0) == PATCH.chunk(0)
    assert again.used_bytes() == store.used_bytes()


def test_an_interrupted_download_resumes(tmp_path: Path) -> None:
    fill(open_store(tmp_path), ANCHOR, but=2)
    again = open_store(tmp_path)
    assert again.held(ANCHOR.name) == set(range(ANCHOR.manifest.chunk_count)) - {2}
    assert not again.is_complete(ANCHOR.name)
    again.write_chunk(ANCHOR.name, 2, ANCHOR.chunk(2))
    assert again.payload_path(ANCHOR.name).read_bytes() == IMAGE


def test_damaged_chunks_of_an_interrupted_download_are_fetched_again(tmp_path: Path) -> None:
    fill(open_store(tmp_path), ANCHOR, but=0)
    (part,) = tmp_path.glob("*.part")
    with part.open("r+b") as file:
        file.seek(3 * ANCHOR.manifest.chunk_bytes + 17)
        file.write(b"\0\0\0\0\0\0\0\0")
    again = open_store(tmp_path)
    assert again.held(ANCHOR.name) == set(range(ANCHOR.manifest.chunk_count)) - {0, 3}


def test_a_download_whose_last_flush_was_cut_off_is_completed_at_the_start(tmp_path: Path) -> None:
    fill(open_store(tmp_path), ANCHOR)
    (whole,) = tmp_path.glob("*.payload")
    whole.rename(whole.with_suffix(".part"))
    assert open_store(tmp_path).is_complete(ANCHOR.name)


def test_a_payload_of_the_wrong_length_is_discarded(tmp_path: Path) -> None:
    fill(open_store(tmp_path), ANCHOR)
    (whole,) = tmp_path.glob("*.payload")
    os.truncate(whole, 100)
    again = open_store(tmp_path)
    assert again.held(ANCHOR.name) == frozenset()
    fill(again, ANCHOR)
    assert again.payload_path(ANCHOR.name).read_bytes() == IMAGE


def test_a_chunk_that_rots_on_the_disk_is_not_served_and_fetched_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, ANCHOR)
    with store.payload_path(ANCHOR.name).open("r+b") as file:
        file.seek(ANCHOR.manifest.chunk_bytes)
        file.write(bytes(100))
    with pytest.raises(Refused) as caught:
        store.read_chunk(ANCHOR.name, 1)
    assert caught.value.code == "request.unknown"
    assert not store.is_complete(ANCHOR.name)
    assert store.held(ANCHOR.name) == set(range(ANCHOR.manifest.chunk_count)) - {1}
    store.write_chunk(ANCHOR.name, 1, ANCHOR.chunk(1))
    assert store.payload_path(ANCHOR.name).read_bytes() == IMAGE


@pytest.mark.parametrize("index", [0, ANCHOR.manifest.chunk_count - 1])
def test_wrong_chunks_are_refused(tmp_path: Path, index: int) -> None:
    store = open_store(tmp_path)
    store.add_manifest(ANCHOR.name, ANCHOR.envelope)
    good = ANCHOR.chunk(index)
    for bad in (b"", good[:-1], good + b"\0", bytes([good[0] ^ 1]) + good[1:], ANCHOR.chunk(1)):
        with pytest.raises(Refused) as caught:
            store.write_chunk(ANCHOR.name, index, bad)
        assert caught.value.code == "chunk.digest"
    assert store.held(ANCHOR.name) == frozenset()


def test_unknown_names_and_indices_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.add_manifest(ANCHOR.name, ANCHOR.envelope)
    for name, index in ((PATCH.name, 0), (ANCHOR.name, ANCHOR.manifest.chunk_count), (ANCHOR.name, -1)):
        with pytest.raises(Refused) as caught:
            store.write_chunk(name, index, PATCH.chunk(0))
        assert caught.value.code == "request.unknown"
        with pytest.raises(Refused):
            store.read_chunk(name, index)
    with pytest.raises(Refused):
        store.payload_path(ANCHOR.name)
    assert store.manifest(PATCH.name) is None
    assert store.envelope(PATCH.name) is None
    assert store.held(PATCH.name) == frozenset()
    assert not store.is_complete(PATCH.name)


STRANGER = Identity(bytes(32))


@pytest.mark.parametrize(
    ("edge", "code"),
    [
        (sign(MIXED, version=2, parent=None, image=IMAGE, payload=IMAGE, identity=STRANGER), "envelope.key"),
        (sign(MIXED, version=2, parent=None, image=IMAGE, payload=IMAGE, run="another-run"), "envelope.run"),
    ],
)
def test_manifests_of_others_are_refused(tmp_path: Path, edge: SignedEdge, code: str) -> None:
    store = open_store(tmp_path)
    with pytest.raises(Refused) as caught:
        store.add_manifest(edge.name, edge.envelope)
    assert caught.value.code == code
    with pytest.raises(Refused) as caught:
        store.add_manifest(ANCHOR.name, edge.envelope)
    assert caught.value.code == "manifest.invalid"
    assert not store.names()
    assert not list(tmp_path.iterdir())


def test_a_manifest_that_was_damaged_on_the_disk_is_discarded_with_its_payload(tmp_path: Path) -> None:
    fill(open_store(tmp_path), ANCHOR)
    (manifest,) = tmp_path.glob("*.manifest")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert not open_store(tmp_path).names()
    assert not list(tmp_path.iterdir())


def test_a_download_beyond_the_quota_is_refused_with_numbers(tmp_path: Path) -> None:
    store = open_store(tmp_path, quota_bytes=ANCHOR.manifest.payload_bytes)
    with pytest.raises(Refused) as caught:
        store.add_manifest(ANCHOR.name, ANCHOR.envelope)
    assert caught.value.code == "manifest.limits"
    assert "GiB" in str(caught.value)


def test_a_download_beyond_the_free_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    monkeypatch.setattr(durable, "free_bytes", lambda folder: 100)
    with pytest.raises(Refused) as caught:
        store.add_manifest(ANCHOR.name, ANCHOR.envelope)
    assert caught.value.code == "manifest.limits"


def test_old_payloads_make_room_but_never_pinned_ones(tmp_path: Path) -> None:
    anchors = [anchor(MIXED, random_image(MIXED, seed), version=seed + 1) for seed in range(4)]
    store = open_store(tmp_path, quota_bytes=int(2.5 * len(IMAGE)))
    with store.pin(anchors[0].name):
        for edge in anchors[:3]:
            fill(store, edge)
        assert store.names() == (anchors[0].name, anchors[2].name)
        with store.pin(anchors[2].name), pytest.raises(Refused) as caught:
            store.add_manifest(anchors[3].name, anchors[3].envelope)
        assert caught.value.code == "manifest.limits"
        assert store.names() == (anchors[0].name, anchors[2].name)
    fill(store, anchors[3])
    assert store.names() == (anchors[2].name, anchors[3].name)
    assert len(list(tmp_path.iterdir())) == 4


def test_nothing_is_deleted_in_vain(tmp_path: Path) -> None:
    store = open_store(tmp_path, quota_bytes=int(2.9 * len(IMAGE)))
    fill(store, PATCH)
    with store.pin(ANCHOR.name):
        fill(store, ANCHOR)
        double = sign(MIXED, version=9, parent=bytes(32), image=NEXT, payload=bytes(2 * len(IMAGE)))
        with pytest.raises(Refused):
            store.add_manifest(double.name, double.envelope)
    assert store.names() == (PATCH.name, ANCHOR.name)


def test_retain_deletes_the_rest_but_what_is_pinned(tmp_path: Path) -> None:
    edges = [anchor(MIXED, random_image(MIXED, seed), version=seed + 1) for seed in range(3)]
    store = open_store(tmp_path)
    for edge in edges:
        fill(store, edge)
    with store.pin(edges[0].name), store.pin(edges[0].name):
        store.retain([edges[1].name])
        assert store.names() == (edges[0].name, edges[1].name)
    store.retain([edges[1].name])
    assert store.names() == (edges[1].name,)
    assert {path.stem for path in tmp_path.iterdir()} == {edges[1].name.hex()}
    with pytest.raises(Refused):
        store.read_chunk(edges[0].name, 0)


def test_a_publishers_own_payload_is_adopted_without_a_copy(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = open_store(tmp_path / "store")
    source = write(tmp_path / "image", IMAGE)
    store.add_manifest(ANCHOR.name, ANCHOR.envelope, payload=source)
    assert store.is_complete(ANCHOR.name)
    assert store.payload_path(ANCHOR.name).stat().st_ino == source.stat().st_ino
    assert store.read_chunk(ANCHOR.name, 1) == ANCHOR.chunk(1)
    store.add_manifest(PATCH.name, PATCH.envelope)
    store.adopt_payload(PATCH.name, write(tmp_path / "patch", PATCH.payload))
    assert open_store(tmp_path / "store").is_complete(PATCH.name)
    with pytest.raises(HostError):
        store.adopt_payload(PATCH.name, source)


def test_a_disk_that_is_full_leaves_nothing_that_counts_as_good(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel refuse bytes in the middle of a chunk, as a full disk does."""
    store = open_store(tmp_path)
    store.add_manifest(ANCHOR.name, ANCHOR.envelope)
    store.write_chunk(ANCHOR.name, 0, ANCHOR.chunk(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ANCHOR.manifest.chunk_bytes + 100, hard))
    try:
        with pytest.raises(HostError):
            store.write_chunk(ANCHOR.name, 1, ANCHOR.chunk(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.held(ANCHOR.name) == {0}
    assert open_store(tmp_path).held(ANCHOR.name) == {0}
    fill(store, ANCHOR)
    assert store.payload_path(ANCHOR.name).read_bytes() == IMAGE


def test_many_threads_may_write_and_read_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.add_manifest(ANCHOR.name, ANCHOR.envelope)
    failures: list[BaseException] = []

    def work(offset: int) -> None:
        try:
            for index in range(ANCHOR.manifest.chunk_count):
                at = (index + offset) % ANCHOR.manifest.chunk_count
                store.write_chunk(ANCHOR.name, at, ANCHOR.chunk(at))
                assert store.read_chunk(ANCHOR.name, at) == ANCHOR.chunk(at)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(3 * number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.payload_path(ANCHOR.name).read_bytes() == IMAGE
