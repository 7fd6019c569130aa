"""Images of older versions, made again by the real worker from what a real publisher keeps on disk."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollmesh_learner.config import Environment, LearnerConfig, Model, Weights
from rollmesh_learner.config import Run as RunSection
from rollmesh_learner.publishing.archive import DAMAGED, GONE, NO_ROOM, Archive
from rollmesh_learner.publishing.opening import open_publisher
from rollmesh_learner.publishing.published import Sealed
from rollmesh_learner.publishing.publisher import Publisher
from rollmesh_peer import faults
from rollmesh_peer.weights.ram import DISK_FOLDER, place_in_memory
from rollmesh_protocol.errors import HostError
from tests.integration.test_weights_publisher import BASE, Run
from tests.unit.weights.kit import LEARNER, MIXED, RUN, nudged


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def plenty() -> int:
    return 1 << 40


@asynccontextmanager
async def archived(
    run: Run,
    versions: int,
    *,
    environ: Mapping[str, str] | None = None,
    room: Callable[[], int] = plenty,
    publisher_bytes: int = 0,
) -> AsyncIterator[tuple[Publisher, Archive]]:
    """A publisher with so many versions out, of which four are in memory, and its archive."""
    async with run.opened(environ=environ) as publisher:
        await run.base(publisher)
        await run.publish_some(publisher, versions - 1)
        archive = Archive(
            publisher, workshop=publisher._workshop, folder=run.folder / "ram", room=room,
            publisher_bytes=publisher_bytes,
        )  # fmt: skip
        yield publisher, archive


def root(run: Run, version: int) -> bytes:
    return run.ledger[version - 1].root


def image(run: Run, archive: Archive, version: int) -> bytes:
    """The image of a version that is at hand, which must be right."""
    path = archive.image_of(root(run, version))
    assert path is not None
    content = path.read_bytes()
    assert content == run.images[version]
    return content


def older_files(run: Run) -> list[Path]:
    return [*(run.folder / "ram").glob("*.older")]


def spoil(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def edge_to(publisher: Publisher, version: int, kind: str) -> Sealed:
    return next(
        edge
        for entry in publisher.history.entries
        for edge in entry.edges
        if (edge.manifest.version, edge.manifest.kind) == (version, kind)
    )


async def test_older_versions_are_made_one_at_a_time(run: Run) -> None:
    run.anchor_every = 5
    async with archived(run, 12) as (publisher, archive):
        for version in (12, 10, 9):
            image(run, archive, version)
        assert archive.image_of(root(run, 8)) is None
        for version in (1, 5, 6, 7, 8):  # a base, behind a patch or more, an anchor
            assert await archive.make(root(run, version)) == ""
            image(run, archive, version)
            assert len(older_files(run)) == 1, "the one before is gone"
            assert publisher.image_of(root(run, version)) is None, "it is not the publisher's"
        image(run, archive, 12)
        await archive.clear()
        assert older_files(run) == []
        assert archive.image_of(root(run, 8)) is None
        await archive.clear()


async def test_the_base_model_leads_to_what_lies_before_the_anchors_that_are_kept(run: Run) -> None:
    run.anchor_every = 3
    async with archived(run, 12) as (publisher, archive):
        anchors = [
            publisher.history.entries[position].head.version for position in publisher.history.anchor_positions()
        ]
        assert anchors == [7, 10]
        for version in (3, 1, 2):
            assert await archive.make(root(run, version)) == ""
            image(run, archive, version)


async def test_what_retention_has_let_go_of_is_gone(run: Run) -> None:
    run.anchor_every, run.keep_versions = 3, 4
    async with archived(run, 12) as (_, archive):
        assert await archive.make(root(run, 5)) == GONE
        assert await archive.make(bytes(32)) == GONE, "never published"
        assert older_files(run) == []
        assert await archive.make(root(run, 8)) == ""
        image(run, archive, 8)


async def test_a_damaged_anchor_is_passed_by_and_told_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.anchor_every = 4
    async with archived(run, 10) as (publisher, archive):
        spoil(publisher.store.payload_path(edge_to(publisher, 5, "anchor").name))
        assert await archive.make(root(run, 6)) == ""
        assert archive.image_of(root(run, 6)) is None, "one attempt, and there is another way"
        assert older_files(run) == []
        assert await archive.make(root(run, 6)) == ""
        image(run, archive, 6)
        assert await archive.make(root(run, 5)) == ""
        image(run, archive, 5)
        assert caplog.text.count("older weights are not made from") == 1


async def test_a_damaged_patch_costs_what_lies_behind_it_and_nothing_else(run: Run) -> None:
    async with archived(run, 10) as (publisher, archive):
        spoil(publisher.store.payload_path(edge_to(publisher, 4, "patch").name))
        assert await archive.make(root(run, 5)) == ""
        assert archive.image_of(root(run, 5)) is None
        assert await archive.make(root(run, 5)) == DAMAGED
        assert await archive.make(root(run, 4)) == DAMAGED
        assert older_files(run) == []
        assert await archive.make(root(run, 3)) == ""
        image(run, archive, 3)


async def test_a_skip_patch_leads_around_a_damaged_one(run: Run) -> None:
    run.skip_every = (3,)
    async with archived(run, 12) as (publisher, archive):
        spoil(publisher.store.payload_path(edge_to(publisher, 4, "skip").name))
        spoil(publisher.store.payload_path(edge_to(publisher, 6, "patch").name))
        for _ in range(2):
            assert await archive.make(root(run, 7)) == ""
        image(run, archive, 7)


async def test_a_damaged_base_model_is_no_way(run: Run) -> None:
    run.anchor_every = 3
    async with archived(run, 12) as (publisher, archive):
        ((_, base),) = publisher.base_images()
        spoil(base)
        assert await archive.make(root(run, 3)) == ""
        assert archive.image_of(root(run, 3)) is None
        assert await archive.make(root(run, 3)) == DAMAGED
        assert await archive.make(root(run, 8)) == "", "from the anchor"
        image(run, archive, 8)


async def test_without_room_nothing_is_made(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    free = [0]
    images = MIXED.image_bytes
    async with archived(run, 10, room=lambda: free[0], publisher_bytes=6 * images) as (_, archive):
        for free[0] in (0, images, 3 * images - 1):  # the publisher may put two more there
            assert await archive.make(root(run, 2)) == NO_ROOM
        assert older_files(run) == []
        assert "older weights are not made again: 0.00 GiB are needed in " in caplog.text
        free[0] = 3 * images
        assert await archive.make(root(run, 2)) == ""
        image(run, archive, 2)


async def test_a_disk_that_cannot_be_read_is_told_in_a_sentence(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> int:
        raise HostError("the disk cannot be read")

    async with archived(run, 6, room=refuse) as (_, archive):
        assert await archive.make(root(run, 1)) == DAMAGED
        assert "cannot be made again: the disk cannot be read" in caplog.text


async def test_a_worker_that_dies_leaves_nothing_behind_and_shuns_nothing(run: Run, tmp_path: Path) -> None:
    environ = {**os.environ, faults.FAULT: "weights.snapshot_copied:2", faults.ONCE: str(tmp_path / "fired")}
    async with archived(run, 6, environ=environ) as (_, archive):  # the first passing was the base's
        assert await archive.make(root(run, 2)) == DAMAGED
        assert (tmp_path / "fired").exists()
        assert older_files(run) == []
        assert await archive.make(root(run, 2)) == ""
        image(run, archive, 2)


async def test_what_an_image_is_made_from_is_not_deleted_meanwhile(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.anchor_every, run.keep_versions = 3, 4
    async with archived(run, 9) as (publisher, archive):
        restore = archive._workshop.restore
        anchor, patch = edge_to(publisher, 4, "anchor").name, edge_to(publisher, 5, "patch").name

        async def late(*arguments: object, **options: object):
            await run.publish_some(publisher, 4)
            held = publisher.history.names
            assert anchor not in held and patch not in held
            return await restore(*arguments, **options)

        monkeypatch.setattr(archive._workshop, "restore", late)
        assert await archive.make(root(run, 5)) == ""
        image(run, archive, 5)
        await publisher.maintain()
        assert not {anchor, patch} & {*publisher.store.names()}, "nothing is held on to"


async def test_a_version_that_was_published_again_needs_no_second_image(run: Run) -> None:
    """A rollback brings the weights of version 2 back into the ring, while the archive has them."""
    async with archived(run, 7) as (publisher, archive):
        assert await archive.make(root(run, 2)) == ""
        await run.publish(publisher, run.images[2], step=1)
        assert archive.image_of(root(run, 2)) == publisher.image_of(root(run, 2))
        await archive.clear()
        assert archive.image_of(root(run, 2)).read_bytes() == run.images[2]


@pytest.mark.parametrize("in_memory", [True, False])
async def test_what_a_killed_learner_left_is_gone_at_the_next_start(tmp_path: Path, *, in_memory: bool) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    folder = tmp_path / "run"
    place = place_in_memory(folder, ram_folder=memory) if in_memory else folder / DISK_FOLDER
    place.mkdir(parents=True)
    place.parent.chmod(0o700)
    place.chmod(0o700)
    left = place / f"{bytes(32).hex()}.older"
    left.write_bytes(b"half of an image")
    config = LearnerConfig(
        run=RunSection(name="r", steps=1), model=Model(source="base"), environments=(Environment(name="addition"),),
        weights=Weights(ram_folder=str(memory) if in_memory else ""),
    )  # fmt: skip
    async with open_publisher(config, run=RUN, identity=LEARNER, folder=folder, layout=MIXED) as opened:
        publisher, archive, exports = opened
        assert exports == place
        assert not left.exists()
        base = tmp_path / "base.image"
        base.write_bytes(BASE)
        await publisher.publish_base(base, version=1)
        for version in range(2, 12):
            trained = exports / "trained.new"
            trained.write_bytes(nudged(MIXED, BASE, version))
            prepared = await publisher.prepare(trained, version=version, step=version)
            assert prepared is not None
            publisher.announced(prepared)
        first = publisher.history.entries[1].head.root
        assert archive.image_of(first) is None
        assert await archive.make(first) == "", "there is room by the real figures"
        assert archive.image_of(first).read_bytes() == nudged(MIXED, BASE, 2)
