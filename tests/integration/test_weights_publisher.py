"""The publisher with its real worker process: what it publishes leads every node to the head, over restarts too."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollmesh_learner.publishing.published import NOTHING
from rollmesh_learner.publishing.publisher import Prepared, Publisher
from rollmesh_peer import faults
from rollmesh_peer.weights import durable
from rollmesh_peer.weights.workshop import open_workshop
from rollmesh_protocol.edges import cheapest_path
from rollmesh_protocol.errors import ChildFailed, HostError, Refused
from rollmesh_protocol.manifest import Edge
from rollmesh_protocol.messages import Head
from rollmesh_protocol.patch.codec import apply_patch
from tests.unit.weights.kit import LEARNER, MIXED, RUN, nudged, random_image, root_of, write

BASE = random_image(MIXED, 1)
ABSENT = bytes([1]) * 32


class Run:
    """A learner's publisher, opened as often as a test wants, and what its ledger would hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger: list[Head] = []
        self.images: dict[int, bytes] = {}
        self.version = 0
        self.anchor_every = 100
        self.keep_versions = 100
        self.skip_every: tuple[int, ...] = ()

    @asynccontextmanager
    async def opened(self, *, environ: Mapping[str, str] | None = None) -> AsyncIterator[Publisher]:
        ram = self.folder / "ram"
        shutil.rmtree(ram, ignore_errors=True)  # memory does not survive
        ram.mkdir()
        async with open_workshop(MIXED, environ=environ) as workshop:
            publisher = Publisher(
                self.folder / "published",
                ram=ram,
                run=RUN,
                identity=LEARNER,
                layout=MIXED,
                workshop=workshop,
                ring_versions=4,
                anchor_every=self.anchor_every,
                keep_versions=self.keep_versions,
                skip_every=self.skip_every,
                patch_chunk_bytes=4096,
                anchor_chunk_bytes=8192,
            )
            await publisher.restore(self.ledger)
            yield publisher

    async def base(self, publisher: Publisher, image: bytes = BASE, *, step: int = 0) -> None:
        self.version += 1
        header = await publisher.publish_base(write(self.folder / "base.image", image), version=self.version, step=step)
        assert (header.version, header.parent) == (self.version, None)
        self.ledger.append(publisher.head)
        self.images[self.version] = image

    async def prepare(self, publisher: Publisher, image: bytes, *, step: int | None = None) -> Prepared | None:
        self.version += 1
        path = write(self.folder / "trained.image", image)
        return await publisher.prepare(path, version=self.version, step=self.version if step is None else step)

    async def publish(self, publisher: Publisher, image: bytes, *, step: int | None = None) -> Prepared:
        prepared = await self.prepare(publisher, image, step=step)
        assert prepared is not None
        self.ledger.append(prepared.entry.head)
        publisher.announced(prepared)
        await publisher.maintain()
        self.images[self.version] = image
        return prepared

    async def publish_some(self, publisher: Publisher, count: int) -> None:
        for _ in range(count):
            await self.publish(publisher, nudged(MIXED, self.images[publisher.head.version], self.version + 77))


def walk(publisher: Publisher, held: bytes | None, image: bytes | None) -> tuple[bytes, tuple[Edge, ...]]:
    """A node's way to the head, by nothing but chunks and manifests: the image it gets, and the edges it took."""
    path = cheapest_path(publisher.edges_towards_head(held), held=held, goal=publisher.head.root)
    assert path is not None
    current = bytearray(image or b"")
    for edge in path:
        manifest = publisher.store.manifest(edge.manifest)
        assert manifest is not None
        chunks = [publisher.store.read_chunk(edge.manifest, index) for index in range(manifest.chunk_count)]
        payload = b"".join(chunks)
        assert len(payload) == edge.payload_bytes
        if edge.parent is None:
            current = bytearray(payload)
        else:
            apply_patch(MIXED, current, payload)
        assert root_of(MIXED, bytes(current)) == edge.root
    return bytes(current), path


def check(publisher: Publisher, run: Run, *, versions: int) -> None:
    """From each of the last versions and from nothing the head is reached; the ring holds what it should."""
    newest = run.images[publisher.head.version]
    assert publisher.head == run.ledger[-1]
    assert walk(publisher, None, None)[0] == newest
    assert walk(publisher, ABSENT, b"")[0] == newest
    for head in run.ledger[-versions:]:
        image, path = walk(publisher, head.root, run.images[head.version])
        assert image == newest
        assert all(edge.kind != "anchor" for edge in path)
    for head in run.ledger[-4:]:
        held = publisher.image_of(head.root)
        assert held is not None
        assert held.read_bytes() == run.images[head.version]
    assert len(list((run.folder / "ram").iterdir())) == len({head.root for head in run.ledger[-4:]})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


async def test_a_base_and_patches_and_a_restart(run: Run) -> None:
    async with run.opened() as publisher:
        assert publisher.head == NOTHING
        assert publisher.header is None
        await run.base(publisher)
        check(publisher, run, versions=1)
        await run.publish_some(publisher, 6)
        check(publisher, run, versions=7)
        header = publisher.header
        assert publisher.image_of(run.ledger[2].root) is None
    async with run.opened() as publisher:
        assert publisher.header == header
        check(publisher, run, versions=7)
        await run.publish_some(publisher, 1)
        check(publisher, run, versions=8)


async def test_nothing_changed_nothing_published(run: Run) -> None:
    async with run.opened() as publisher:
        await run.base(publisher)
        assert await run.prepare(publisher, BASE) is None
        assert publisher.head.version == 1
        assert not (run.folder / "trained.image").exists()


async def test_going_back_is_an_ordinary_patch(run: Run) -> None:
    """The learner comes back from the checkpoint of version 3 while nodes are at version 5."""
    async with run.opened() as publisher:
        await run.base(publisher)
        await run.publish_some(publisher, 4)
    async with run.opened() as publisher:
        orphaned = publisher.head
        await run.publish(publisher, run.images[3], step=2)
        assert publisher.head.root == run.ledger[2].root
        image, path = walk(publisher, orphaned.root, run.images[5])
        assert image == run.images[3]
        assert [edge.kind for edge in path] == ["patch"]
        assert publisher.edges_towards_head(run.ledger[2].root) == ()
        await run.publish_some(publisher, 1)
        check(publisher, run, versions=7)
    async with run.opened() as publisher:
        check(publisher, run, versions=7)


async def test_anchors_come_now_and_then_and_old_things_go(run: Run) -> None:
    run.anchor_every, run.keep_versions = 3, 4
    async with run.opened() as publisher:
        await run.base(publisher)
        await run.publish_some(publisher, 3)
        _, path = walk(publisher, None, None)
        assert [(edge.kind, edge.version) for edge in path] == [("anchor", 4)]
        await run.publish_some(publisher, 8)
        _, path = walk(publisher, None, None)
        assert [(edge.kind, edge.version) for edge in path] == [("anchor", 10), ("patch", 11), ("patch", 12)]
        kept = [publisher.store.manifest(name) for name in publisher.store.names()]
        anchors = sorted(manifest.version for manifest in kept if manifest is not None and manifest.kind == "anchor")
        assert anchors == [7, 10]
        assert min(manifest.version for manifest in kept if manifest is not None) == 7
        check(publisher, run, versions=6)
    async with run.opened() as publisher:
        check(publisher, run, versions=6)


async def test_images_older_than_the_newest_anchor_are_made_from_the_one_before(run: Run) -> None:
    run.anchor_every = 4
    async with run.opened() as publisher:
        await run.base(publisher)
        await run.publish_some(publisher, 4)
        assert publisher.history.versions_since_anchor() == 0
    async with run.opened() as publisher:
        check(publisher, run, versions=5)


def kinds_held(publisher: Publisher) -> list[tuple[str, int]]:
    held = [publisher.store.manifest(name) for name in publisher.store.names()]
    return sorted((manifest.kind, manifest.version) for manifest in held if manifest is not None)


async def test_skip_patches_lead_over_several_versions(run: Run) -> None:
    run.skip_every = (3, 6)
    async with run.opened() as publisher:
        await run.base(publisher)
        await run.publish_some(publisher, 13)
        shortcuts = [link for link in kinds_held(publisher) if link[0] == "skip"]
        assert shortcuts == [("skip", 4), ("skip", 7), ("skip", 7), ("skip", 10), ("skip", 13), ("skip", 13)]
        image, path = walk(publisher, run.ledger[0].root, BASE)
        assert image == run.images[14]
        assert [(edge.kind, edge.version) for edge in path] == [("skip", 7), ("skip", 13), ("patch", 14)]
        image, path = walk(publisher, run.ledger[4].root, run.images[5])
        assert image == run.images[14]
        assert [edge.version for edge in path] == [6, 7, 13, 14]
        assert len(list((run.folder / "ram").iterdir())) <= 4 + 2
    async with run.opened() as publisher:  # the ring is made along the shortcuts, and new ones follow
        assert publisher.image_of(run.ledger[-4].root) is not None
        assert walk(publisher, run.ledger[0].root, BASE)[0] == run.images[14]
        await run.publish_some(publisher, 3)
        assert ("skip", 17) in kinds_held(publisher)
        assert walk(publisher, run.ledger[0].root, BASE)[0] == run.images[17]


async def test_a_joiner_with_the_base_model_takes_a_cumulative_patch(run: Run) -> None:
    run.anchor_every, run.keep_versions = 5, 5
    async with run.opened() as publisher:
        await run.base(publisher)
        await run.publish_some(publisher, 22)
        assert [link for link in kinds_held(publisher) if link[0] == "cumulative"] == [
            ("cumulative", 16),
            ("cumulative", 21),
        ]
    async with run.opened() as publisher:
        base = root_of(MIXED, BASE)
        assert publisher.history.position(base) is None, "the version itself is long forgotten"
        image, path = walk(publisher, base, BASE)
        assert image == run.images[23]
        assert [(edge.kind, edge.version) for edge in path] == [("cumulative", 21), ("patch", 22), ("patch", 23)]
        await run.publish_some(publisher, 5)
        assert ("cumulative", 26) in kinds_held(publisher)


async def test_a_shortcut_that_cannot_be_written_costs_nothing_but_itself(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.skip_every = (2,)
    async with run.opened() as publisher:
        await run.base(publisher)

        async def refuse(*_arguments: object, **_options: object) -> None:
            raise HostError("no space left")

        monkeypatch.setattr(publisher, "_write_shortcut", refuse)
        await run.publish_some(publisher, 3)
        monkeypatch.undo()
        await run.publish_some(publisher, 2)
        assert [link for link in kinds_held(publisher) if link[0] == "skip"] == [("skip", 5)]
        check(publisher, run, versions=6)


async def test_what_was_prepared_but_never_announced_is_gone(run: Run) -> None:
    async with run.opened() as publisher:
        await run.base(publisher)
        await run.publish_some(publisher, 1)
        prepared = await run.prepare(publisher, nudged(MIXED, BASE, 5))
        assert prepared is not None
        assert publisher.store.is_complete(prepared.header.manifest)
        await publisher.maintain()  # must not take away what waits for the ledger
        assert publisher.store.is_complete(prepared.header.manifest)
        assert publisher.head.version == 2
        replacement = await run.prepare(publisher, nudged(MIXED, BASE, 6))
        assert replacement is not None
        assert not prepared.image.exists()
        await publisher.maintain()
        assert not publisher.store.is_complete(prepared.header.manifest)
    async with run.opened() as publisher:
        assert replacement.header.manifest not in publisher.store.names()
        check(publisher, run, versions=2)
        await run.publish_some(publisher, 1)
        assert publisher.head.version == 5


async def test_a_lost_disk_is_a_new_beginning(run: Run) -> None:
    async with run.opened() as publisher:
        await run.base(publisher)
        await run.publish_some(publisher, 2)
    shutil.rmtree(run.folder / "published" / "edges")
    async with run.opened() as publisher:
        assert publisher.head == NOTHING
        await run.base(publisher, run.images[3], step=2)
        assert publisher.head.version == 4
        assert walk(publisher, run.ledger[0].root, BASE)[0] == run.images[3]
    async with run.opened() as publisher:
        assert publisher.head.version == 4
        assert publisher.header is not None


async def test_a_damaged_anchor_gives_way_to_the_one_before_and_is_replaced(run: Run) -> None:
    run.anchor_every = 3
    async with run.opened() as publisher:
        await run.base(publisher)
        await run.publish_some(publisher, 4)
        newest = publisher.history.entries[publisher.history.anchor_positions()[-1]].anchor
        assert newest is not None
        with publisher.store.payload_path(newest.name).open("r+b") as file:
            file.write(b"\xff\x00\xff\x00")
    async with run.opened() as publisher:
        assert publisher.head.version == 5
        held = publisher.image_of(publisher.head.root)
        assert held is not None
        assert held.read_bytes() == run.images[5]
        await run.publish_some(publisher, 3)
        check(publisher, run, versions=8)
        assert walk(publisher, None, None)[1][0].version > 4


async def test_an_anchor_found_damaged_when_served_is_replaced(run: Run) -> None:
    async with run.opened() as publisher:
        await run.base(publisher)
        await run.publish_some(publisher, 2)
        (anchor,) = [entry.anchor for entry in publisher.history.entries if entry.anchor is not None]
        with publisher.store.payload_path(anchor.name).open("r+b") as file:
            file.write(b"\xff\x00\xff\x00")
        with pytest.raises(Refused):
            publisher.store.read_chunk(anchor.name, 0)
        await publisher.maintain()
        assert [edge.version for edge in walk(publisher, None, None)[1]] == [3]


async def test_a_worker_that_dies_while_encoding_loses_nothing(run: Run, tmp_path: Path) -> None:
    environ = {**os.environ, faults.FAULT: "weights.encoded", faults.ONCE: str(tmp_path / "fired")}
    async with run.opened(environ=environ) as publisher:
        await run.base(publisher)
        image = nudged(MIXED, BASE, 3)
        with pytest.raises(ChildFailed):
            await run.prepare(publisher, image)
        assert (run.folder / "trained.image").read_bytes() == image
        await run.publish(publisher, image)
        check(publisher, run, versions=2)


async def test_a_full_disk_keeps_the_head_and_the_image(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run.opened() as publisher:
        await run.base(publisher)
        image = nudged(MIXED, BASE, 3)

        def refuse(*_: object) -> None:
            raise HostError("the manifest cannot be written: the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(durable, "write_file", refuse)
            with pytest.raises(HostError, match="full"):
                await run.prepare(publisher, image)
        assert publisher.head.version == 1
        assert (run.folder / "trained.image").read_bytes() == image
        await run.publish(publisher, image)
        check(publisher, run, versions=2)
