"""A working copy on a disk with its real worker process: it survives restarts and kills, and is not written again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from rollmesh_peer import faults
from rollmesh_peer.weights.image_file import undo_path, unnamed_path
from rollmesh_peer.weights.keeper import Keeper
from rollmesh_peer.weights.kept_state import SnapshotPolicy
from rollmesh_peer.weights.ram import DISK_FOLDER
from rollmesh_protocol.errors import ChildFailed, Refused
from tests.integration.test_weights_keeper import (
    BASE,
    EDGES,
    IMAGES,
    Bench,
    damage,
    fetch,
    filled,
    holds,
    wrong_root,
)
from tests.unit.weights.kit import MIXED, anchor, inode, nudged, patch, sign


class Mark(NamedTuple):
    """What changes when a file is made anew, or written into."""

    inode: int
    written_ns: int


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, is_on_disk=True)


def image_of(bench: Bench) -> Path:
    return bench.folder / "weights" / DISK_FOLDER / "working.image"


def mark(bench: Bench) -> Mark:
    image = image_of(bench)
    return Mark(inode(image, witnesses=bench.folder), image.stat().st_mtime_ns)


def armed(points: str, once: Path | None = None) -> Mapping[str, str]:
    return {**os.environ, faults.FAULT: points, **({faults.ONCE: str(once)} if once else {})}


async def test_a_restart_takes_the_image_up_and_does_not_write_it(bench: Bench) -> None:
    await filled(bench, *EDGES[:3])
    before = mark(bench)
    assert sorted(path.name for path in image_of(bench).parent.iterdir()) == [
        "lock",
        "working.image",
        "working.image.lock",
    ]
    for _ in range(2):
        async with bench.opened() as (keeper, _):
            await holds(keeper, IMAGES[2], version=4)
            assert mark(bench) == before
    async with bench.opened() as (keeper, store):
        await keeper.advance(fetch(store, *EDGES[3:]))
        await holds(keeper, IMAGES[-1], version=9)
        assert mark(bench).inode == before.inode
    async with bench.opened() as (keeper, store):
        await holds(keeper, IMAGES[-1], version=9)
        assert keeper.step == 8


async def test_once_there_is_memory_the_image_on_disk_goes(bench: Bench) -> None:
    await filled(bench, *EDGES[:3])
    bench.is_on_disk = False
    async with bench.opened() as (keeper, _):
        await holds(keeper, IMAGES[2], version=4)
        assert not image_of(bench).parent.exists()


async def test_after_a_snapshot_and_with_its_chain_gone_too(bench: Bench) -> None:
    bench.policy = SnapshotPolicy(chain_patches=3, chain_most=100)
    await filled(bench, *EDGES[:3])
    before = mark(bench)
    async with bench.opened() as (keeper, store):
        await keeper.advance(fetch(store, EDGES[3]))
        store.retain([])
    async with bench.opened() as (keeper, store):
        await holds(keeper, IMAGES[3], version=5)
        assert mark(bench).inode == before.inode


@pytest.mark.parametrize("how", ["damaged", "truncated", "missing", "empty"])
async def test_an_image_that_does_not_fit_is_made_anew(bench: Bench, how: str) -> None:
    await filled(bench, *EDGES[:3])
    image = image_of(bench)
    if how == "damaged":
        damage(image)
    elif how == "missing":
        image.unlink()
    else:
        os.truncate(image, 0 if how == "empty" else 1000)
    async with bench.opened() as (keeper, _):
        await holds(keeper, IMAGES[2], version=4)


@pytest.mark.parametrize("content", [b"", b"nonsense" * 100])
async def test_a_log_that_is_none_is_ignored(bench: Bench, content: bytes) -> None:
    await filled(bench, *EDGES[:3])
    before = mark(bench)
    undo_path(image_of(bench)).write_bytes(content)
    async with bench.opened() as (keeper, _):
        await holds(keeper, IMAGES[2], version=4)
        assert mark(bench) == before
        assert not undo_path(image_of(bench)).exists()


async def test_wrong_weights_are_undone_in_place(bench: Bench) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        await keeper.advance(fetch(store, EDGES[0]))
        made = mark(bench).inode
        bad = wrong_root(3, IMAGES[0], IMAGES[1], IMAGES[2])
        with pytest.raises(Refused) as caught:
            await keeper.advance(fetch(store, bad))
        assert caught.value.code == "patch.root"
        assert keeper.is_refused(bad.name)
        await holds(keeper, IMAGES[0], version=2)
        assert not undo_path(keeper.image).exists()
        await keeper.advance(fetch(store, EDGES[1]))
        await holds(keeper, IMAGES[1], version=3)
        assert mark(bench).inode == made
    async with bench.opened() as (keeper, store):
        await holds(keeper, IMAGES[1], version=3)
        assert mark(bench).inode == made


async def test_an_anchor_replaces_the_image_or_leaves_it(bench: Bench) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        await keeper.advance(fetch(store, *EDGES[:2]))
        before = mark(bench)
        bad = sign(MIXED, version=5, parent=None, image=IMAGES[4], payload=IMAGES[5])
        with pytest.raises(Refused) as caught:
            await keeper.advance(fetch(store, bad))
        assert caught.value.code == "patch.root"
        await holds(keeper, IMAGES[1], version=3)
        assert mark(bench) == before
        assert not unnamed_path(keeper.image).exists()
        await keeper.advance(fetch(store, anchor(MIXED, IMAGES[4], version=6), EDGES[5]))
        await holds(keeper, IMAGES[5], version=7)
        made = mark(bench)
    async with bench.opened() as (keeper, store):
        await holds(keeper, IMAGES[5], version=7)
        assert mark(bench) == made


async def test_a_path_that_leads_back_to_where_it_began(bench: Bench, tmp_path: Path) -> None:
    """Both ends of the log are one root, so it says nothing about whether the change was whole: undoing is right."""
    around = [patch(MIXED, BASE, IMAGES[0], version=2), patch(MIXED, IMAGES[0], BASE, version=3)]
    async with bench.opened(environ=armed("weights.flushed", tmp_path / "fired")) as (keeper, store):
        await keeper.adopt_base(bench.base())
        path = fetch(store, *around)
        with pytest.raises(ChildFailed):
            await keeper.advance(path)
        await holds(keeper, BASE, version=0)
        await keeper.advance(path)
        await holds(keeper, BASE, version=3)


# --- a worker that dies ----------------------------------------------------------------------------------------------
WORKER_POINTS = ("weights.undo_written", "weights.undo_durable", "weights.flipped", "weights.applied")


@pytest.mark.parametrize(
    "point", [*(f"{point}:{passing}" for point in WORKER_POINTS for passing in (1, 3)), "weights.flushed"]
)
async def test_a_worker_killed_at_a_point_costs_nothing(bench: Bench, tmp_path: Path, point: str) -> None:
    async with bench.opened(environ=armed(point, tmp_path / "fired")) as (keeper, store):
        await keeper.adopt_base(bench.base())
        made = mark(bench).inode
        path = fetch(store, *EDGES[:3])
        with pytest.raises(ChildFailed):
            await keeper.advance(path)
        assert (tmp_path / "fired").exists()
        await holds(keeper, BASE, version=0)
        assert not undo_path(keeper.image).exists()
        await keeper.advance(path)
        await holds(keeper, IMAGES[2], version=4)
        assert mark(bench).inode == made


@pytest.mark.parametrize("point", ["weights.flipped:2", "weights.flushed"])
async def test_what_the_next_start_finds_of_a_killed_worker_is_undone(
    bench: Bench, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon dies with its worker: nothing but the files is left, as they were at that moment."""
    await filled(bench, *EDGES[:1])
    made = mark(bench).inode
    async with bench.opened(environ=armed(point)) as (keeper, store):
        path = fetch(store, *EDGES[1:3])
        with monkeypatch.context() as patched:
            patched.setattr(Keeper, "_restore", nothing)
            patched.setattr(type(keeper._copy), "recover", no)
            with pytest.raises(ChildFailed):
                await keeper.advance(path)
        assert undo_path(keeper.image).exists()
    assert image_of(bench).read_bytes() != IMAGES[0]
    async with bench.opened() as (keeper, store):
        await holds(keeper, IMAGES[0], version=2)
        assert mark(bench).inode == made
        await keeper.advance(fetch(store, *EDGES[1:3]))
        await holds(keeper, IMAGES[2], version=4)


async def nothing(_keeper: object) -> None:
    pass


async def no(_copy: object, _named: object) -> bool:
    return False


async def test_a_worker_killed_while_it_undoes_is_no_harm(bench: Bench) -> None:
    """The next one makes the image anew: slower, and as right."""
    async with bench.opened(environ=armed("weights.flipped,weights.led_back")) as (keeper, store):
        await keeper.adopt_base(bench.base())
        with pytest.raises(ChildFailed):
            await keeper.advance(fetch(store, *EDGES[:3]))
        await holds(keeper, BASE, version=0)
        assert not undo_path(keeper.image).exists()
    async with bench.opened() as (keeper, store):
        await holds(keeper, BASE, version=0)
        await keeper.advance(fetch(store, *EDGES[:3]))
        await holds(keeper, IMAGES[2], version=4)


async def test_a_worker_killed_before_a_new_image_has_its_name(bench: Bench, tmp_path: Path) -> None:
    await filled(bench, *EDGES[:1])
    before = mark(bench)
    async with bench.opened(environ=armed("weights.image_made", tmp_path / "fired")) as (keeper, store):
        path = fetch(store, anchor(MIXED, IMAGES[3], version=5))
        with pytest.raises(ChildFailed):
            await keeper.advance(path)
        await holds(keeper, IMAGES[0], version=2)
        assert mark(bench) == before
        await keeper.advance(path)
        await holds(keeper, IMAGES[3], version=5)
        assert not unnamed_path(keeper.image).exists()


async def test_a_worker_waits_for_one_that_still_writes(bench: Bench) -> None:
    """The worker of a daemon that was killed may hang in a flush: nothing else touches the image meanwhile."""
    fcntl = pytest.importorskip("fcntl")
    await filled(bench, *EDGES[:1])
    lock = image_of(bench).with_name("working.image.lock")
    async with bench.opened() as (keeper, store):
        path = fetch(store, EDGES[1])
        descriptor = os.open(lock, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.advance, path)
            await trio.testing.wait_all_tasks_blocked(0.3)
            assert keeper.image.read_bytes() == IMAGES[0]
            os.close(descriptor)
        await holds(keeper, IMAGES[1], version=3)


@pytest.mark.slow
async def test_two_hundred_patches_in_a_row_under_the_log(bench: Bench) -> None:
    image = BASE
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        made = mark(bench).inode
        for version in range(2, 202):
            new = nudged(MIXED, image, version)
            await keeper.advance(fetch(store, patch(MIXED, image, new, version=version)))
            image = new
        assert mark(bench).inode == made
    async with bench.opened() as (keeper, store):
        await holds(keeper, image, version=201)
        assert mark(bench).inode == made
