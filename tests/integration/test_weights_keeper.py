"""The keeper with its real worker process: weights advance on verified roots only and come back after anything."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from rollmesh_peer import faults
from rollmesh_peer.bit_sums import image_sums, pack_sums
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.keeper import Keeper, open_keeper
from rollmesh_peer.weights.kept_state import SnapshotPolicy
from rollmesh_peer.weights.lineage import Link
from rollmesh_peer.weights.workshop import open_workshop
from rollmesh_protocol.errors import ChildFailed, HostError, LinkLost, Refused
from rollmesh_protocol.layout import Layout
from tests.unit.weights.kit import (
    LEARNER,
    MIXED,
    RUN,
    SignedEdge,
    anchor,
    inode,
    nudged,
    patch,
    random_image,
    root_of,
    sign,
    sized,
    versions,
    write,
)

BASE = random_image(MIXED, 1)
EDGES, IMAGES = versions(MIXED, BASE, first=2, last=9)
NO_SNAPSHOTS = SnapshotPolicy(chain_patches=10_000, chain_most=10_000)


class Bench:
    """One node's weights layer, opened as often as a test wants."""

    def __init__(
        self,
        folder: Path,
        *,
        layout: Layout = MIXED,
        policy: SnapshotPolicy = NO_SNAPSHOTS,
        is_on_disk: bool = False,
    ) -> None:
        self.folder = folder
        self.is_on_disk = is_on_disk
        self.layout = layout
        self.policy = policy
        self.now = 1000.0
        (folder / "memory").mkdir()

    @asynccontextmanager
    async def opened(self, *, environ: Mapping[str, str] | None = None) -> AsyncIterator[tuple[Keeper, EdgeStore]]:
        store = EdgeStore(
            self.folder / "edges", run=RUN, learner=LEARNER.peer, layout=self.layout, quota_bytes=10_000_000_000
        )
        async with (
            open_workshop(self.layout, environ=environ) as workshop,
            open_keeper(
                self.folder / "weights",
                ram_folder=None if self.is_on_disk else self.folder / "memory",
                layout=self.layout,
                store=store,
                workshop=workshop,
                policy=self.policy,
                clock=lambda: self.now,
            ) as keeper,
        ):
            await keeper.restore()
            yield keeper, store

    def base(self, image: bytes = BASE) -> Path:
        return write(self.folder / "base.image", image)


def fetch(store: EdgeStore, *edges: SignedEdge) -> list[Link]:
    """Every chunk of these edges, as the swarm would bring them; the path that they are."""
    for edge in edges:
        store.add_manifest(edge.name, edge.envelope)
        for index in range(edge.manifest.chunk_count):
            store.write_chunk(edge.name, index, edge.chunk(index))
    return [edge.link for edge in edges]


async def holds(keeper: Keeper, image: bytes, *, version: int) -> None:
    async with keeper.reading(deadline_s=5) as view:
        assert view.image.read_bytes() == image
        assert (view.root, view.version) == (keeper.root, keeper.version)
        assert view.version == version


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_a_base_then_patches_one_by_one_then_a_restart(bench: Bench) -> None:
    async with bench.opened() as (keeper, store):
        assert keeper.root is None
        root = await keeper.adopt_base(bench.base(), expected_root=root_of(MIXED, BASE))
        assert root == root_of(MIXED, BASE)
        await holds(keeper, BASE, version=0)
        for edge, image in zip(EDGES, IMAGES, strict=True):
            await keeper.advance(fetch(store, edge))
            await holds(keeper, image, version=edge.manifest.version)
            assert keeper.step == edge.manifest.step
        memory = keeper.image
    assert not memory.exists()
    async with bench.opened() as (keeper, store):
        await holds(keeper, IMAGES[-1], version=9)
        assert keeper.step == 8
        assert keeper.highest == 9


async def test_a_whole_path_at_once_and_an_anchor_in_it(bench: Bench) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        await keeper.advance(fetch(store, *EDGES[:4]))
        await holds(keeper, IMAGES[3], version=5)
        leap = anchor(MIXED, IMAGES[5], version=7)
        await keeper.advance(fetch(store, leap, *EDGES[6:]))
        await holds(keeper, IMAGES[-1], version=9)
        # The anchor's payload is the snapshot now: no copy of it, and the base's is gone.
        assert not list((bench.folder / "weights" / "snapshots").iterdir())
    async with bench.opened() as (keeper, store):
        await holds(keeper, IMAGES[-1], version=9)


async def test_the_sums_are_those_of_the_weights_held_or_none(bench: Bench) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.measure()  # of nothing
        await keeper.adopt_base(bench.base())
        async with keeper.reading() as view:
            assert view.sums == b""
        for image in (BASE, IMAGES[0]):
            if image is not BASE:
                await keeper.advance(fetch(store, EDGES[0]))
                async with keeper.reading() as view:
                    assert view.sums == b""  # and not those of the weights before
            await keeper.measure()
            async with keeper.reading() as view:
                assert view.sums == pack_sums(image_sums(memoryview(image), layout=MIXED))


async def test_a_worker_that_dies_over_the_sums_costs_only_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench.opened() as (keeper, _store):
        await keeper.adopt_base(bench.base())

        async def dies(_image: Path) -> bytes:
            raise ChildFailed("killed")

        with monkeypatch.context() as patched:
            patched.setattr(keeper._workshop, "sums", dies)
            await keeper.measure()
        await holds(keeper, BASE, version=0)
        async with keeper.reading() as view:
            assert view.sums == b""
        await keeper.measure()
        async with keeper.reading() as view:
            assert view.sums


async def test_from_nothing_an_anchor_will_do(bench: Bench) -> None:
    async with bench.opened() as (keeper, store):
        with pytest.raises(LinkLost, match="no verified weights"):
            async with keeper.reading(deadline_s=0.01):
                pytest.fail("there is nothing to read")
        with pytest.raises(Refused) as caught:
            await keeper.advance(fetch(store, EDGES[0]))
        assert caught.value.code == "manifest.parent"
        await keeper.advance(fetch(store, anchor(MIXED, IMAGES[0], version=2), EDGES[1]))
        await holds(keeper, IMAGES[1], version=3)


async def test_a_base_with_other_bits_is_refused(bench: Bench) -> None:
    async with bench.opened() as (keeper, _):
        with pytest.raises(Refused) as caught:
            await keeper.adopt_base(bench.base(IMAGES[0]), expected_root=root_of(MIXED, BASE))
        assert caught.value.code == "patch.root"
        assert keeper.root is None
        with pytest.raises(HostError, match="bytes"):
            await keeper.adopt_base(bench.base(IMAGES[0][:-64]))


async def test_paths_that_do_not_lead_on_are_refused(bench: Bench) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        await keeper.advance(fetch(store, *EDGES[:2]))
        old = patch(MIXED, IMAGES[1], BASE, version=2)
        same = patch(MIXED, IMAGES[1], BASE, version=3)
        missing = anchor(MIXED, IMAGES[4], version=6)
        store.add_manifest(missing.name, missing.envelope)
        for path, code in (
            (fetch(store, EDGES[3]), "manifest.parent"),
            (fetch(store, EDGES[2], EDGES[4]), "manifest.parent"),
            ([], "manifest.parent"),
            (fetch(store, old), "manifest.version"),
            (fetch(store, same), "manifest.version"),
            ([missing.link], "request.unknown"),
        ):
            with pytest.raises(Refused) as caught:
                await keeper.advance(path)
            assert caught.value.code == code
        await holds(keeper, IMAGES[1], version=3)


async def test_a_rollback_is_an_old_root_under_a_new_version(bench: Bench) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        await keeper.advance(fetch(store, *EDGES[:3]))
        await keeper.advance(fetch(store, patch(MIXED, IMAGES[2], IMAGES[0], version=5)))
        await holds(keeper, IMAGES[0], version=5)
        # The same root once more, by name only.
        assert await keeper.confirm(root=root_of(MIXED, IMAGES[0]), version=6, step=1)
        assert (keeper.version, keeper.step) == (6, 1)
        assert not await keeper.confirm(root=root_of(MIXED, IMAGES[1]), version=7, step=1)
        assert await keeper.confirm(root=root_of(MIXED, IMAGES[0]), version=2, step=9)
        assert (keeper.version, keeper.step) == (6, 1)
    async with bench.opened() as (keeper, store):
        await holds(keeper, IMAGES[0], version=6)


def wrong_root(version: int, old: bytes, new: bytes, promised: bytes) -> SignedEdge:
    """A signed patch to ``new`` whose manifest promises something else: a bug of the learner."""
    good = patch(MIXED, old, new, version=version)
    return sign(MIXED, version=version, parent=root_of(MIXED, old), image=promised, payload=good.payload)


async def test_wrong_weights_are_undone_and_the_edge_is_remembered(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        await keeper.advance(fetch(store, EDGES[0]))
        bad = wrong_root(3, IMAGES[0], IMAGES[1], IMAGES[2])
        with pytest.raises(Refused) as caught:
            await keeper.advance(fetch(store, bad))
        assert caught.value.code == "patch.root"
        assert keeper.is_refused(bad.name)
        assert "version 3 is not taken" in caplog.text
        await holds(keeper, IMAGES[0], version=2)
        await keeper.advance(fetch(store, EDGES[1]))
        await holds(keeper, IMAGES[1], version=3)


async def test_an_untouched_tensor_must_keep_its_digest(bench: Bench) -> None:
    """The patch touches one tensor, the manifest also promises another change."""
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        touched = bytearray(BASE)
        touched[0] ^= 1
        promised = bytearray(touched)
        promised[MIXED.offsets[6]] ^= 1
        bad = wrong_root(2, BASE, bytes(touched), bytes(promised))
        with pytest.raises(Refused):
            await keeper.advance(fetch(store, bad))
        await holds(keeper, BASE, version=0)


@pytest.mark.parametrize("payload", [b"RMP1", b"nonsense", b"RMP1" + bytes(12) + b"x"])
async def test_a_payload_that_does_not_decode_changes_nothing(bench: Bench, payload: bytes) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        bad = sign(MIXED, version=2, parent=root_of(MIXED, BASE), image=IMAGES[0], payload=payload)
        with pytest.raises(Refused) as caught:
            await keeper.advance(fetch(store, bad))
        assert caught.value.code in ("patch.invalid", "patch.root")
        assert keeper.is_refused(bad.name)
        await holds(keeper, BASE, version=0)


async def test_of_a_path_the_good_part_is_taken(bench: Bench) -> None:
    bad = wrong_root(4, IMAGES[1], IMAGES[2], IMAGES[3])
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        beyond = patch(MIXED, IMAGES[3], IMAGES[4], version=5)
        with pytest.raises(Refused):
            await keeper.advance(fetch(store, *EDGES[:2], bad, beyond))
        await holds(keeper, IMAGES[1], version=3)
        assert keeper.is_refused(bad.name)
        assert not any(keeper.is_refused(edge.name) for edge in (*EDGES[:2], beyond))
    async with bench.opened() as (keeper, store):
        await holds(keeper, IMAGES[1], version=3)


async def test_an_anchor_that_is_not_what_it_promises_is_replaced_by_what_was_there(bench: Bench) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        await keeper.advance(fetch(store, *EDGES[:2]))
        bad = sign(MIXED, version=5, parent=None, image=IMAGES[4], payload=IMAGES[5])
        with pytest.raises(Refused) as caught:
            await keeper.advance(fetch(store, bad))
        assert caught.value.code == "patch.root"
        await holds(keeper, IMAGES[1], version=3)
        assert not keeper.is_quarantined


async def test_a_payload_that_rots_before_it_is_applied_is_noticed(bench: Bench) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        path = fetch(store, EDGES[0])
        damage(store.payload_path(EDGES[0].name))
        with pytest.raises(Refused) as caught:
            await keeper.advance(path)
        assert caught.value.code == "chunk.digest"
        await holds(keeper, BASE, version=0)


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


# --- what is broken on disk at a restart -----------------------------------------------------------------------------
async def filled(bench: Bench, *edges: SignedEdge) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        await keeper.advance(fetch(store, *edges))
        assert keeper.version == edges[-1].manifest.version


async def test_a_broken_patch_cuts_the_chain_and_quarantines(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await filled(bench, *EDGES[:5])
    damage(bench.folder / "edges" / f"{EDGES[3].name.hex()}.payload")
    async with bench.opened() as (keeper, store):
        await holds(keeper, IMAGES[2], version=4)
        assert keeper.highest == 6
        assert keeper.is_quarantined
        assert "the chain is good for 3 of 5 patches" in caplog.text
        # Up to the highest version the same version is taken again, a lower one is not.
        with pytest.raises(Refused) as caught:
            await keeper.advance(fetch(store, anchor(MIXED, IMAGES[3], version=5)))
        assert caught.value.code == "manifest.version"
        await keeper.advance(fetch(store, anchor(MIXED, IMAGES[4], version=6)))
        assert not keeper.is_quarantined
        await holds(keeper, IMAGES[4], version=6)


async def test_a_missing_patch_cuts_the_chain(bench: Bench) -> None:
    await filled(bench, *EDGES[:5])
    (bench.folder / "edges" / f"{EDGES[2].name.hex()}.payload").unlink()
    async with bench.opened() as (keeper, store):
        await holds(keeper, IMAGES[1], version=3)
        await keeper.advance(fetch(store, *EDGES[2:6]))
        await holds(keeper, IMAGES[5], version=7)


async def test_a_truncated_patch_cuts_the_chain(bench: Bench) -> None:
    await filled(bench, *EDGES[:3])
    os.truncate(bench.folder / "edges" / f"{EDGES[2].name.hex()}.payload", 50)
    async with bench.opened() as (keeper, _):
        await holds(keeper, IMAGES[1], version=3)


@pytest.mark.parametrize("how", ["damaged", "truncated", "missing"])
async def test_a_broken_snapshot_falls_back_to_an_anchor_or_to_nothing(bench: Bench, how: str) -> None:
    await filled(bench, *EDGES[:3])
    (snapshot,) = (bench.folder / "weights" / "snapshots").iterdir()
    (bench.folder / "base.image").unlink()
    if how == "damaged":
        damage(snapshot)
    elif how == "truncated":
        os.truncate(snapshot, 1000)
    else:
        snapshot.unlink()
    async with bench.opened() as (keeper, store):
        assert keeper.root is None
        assert keeper.highest == 4
        fetch(store, anchor(MIXED, IMAGES[1], version=3))
        await keeper.restore()
        await holds(keeper, IMAGES[1], version=3)
        assert keeper.is_quarantined
        await keeper.advance(fetch(store, EDGES[2]))
        await holds(keeper, IMAGES[2], version=4)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x80", b"\xc1" * 100])
async def test_a_broken_state_file_is_no_state_at_all(bench: Bench, content: bytes) -> None:
    await filled(bench, *EDGES[:2])
    write(bench.folder / "weights" / "weights.state", content)
    async with bench.opened() as (keeper, store):
        assert keeper.root is None
        await keeper.adopt_base(bench.folder / "base.image")
        await keeper.advance(fetch(store, *EDGES[:2]))
        await holds(keeper, IMAGES[1], version=3)


async def test_the_state_of_another_model_is_not_taken(bench: Bench) -> None:
    await filled(bench, *EDGES[:2])
    bench.layout = sized(1)
    async with bench.opened() as (keeper, _):
        assert keeper.root is None


# --- snapshots -------------------------------------------------------------------------------------------------------
def snapshots(bench: Bench) -> list[str]:
    return sorted(path.name for path in (bench.folder / "weights" / "snapshots").iterdir())


async def test_a_long_chain_becomes_a_snapshot_and_its_patches_may_go(bench: Bench) -> None:
    bench.policy = SnapshotPolicy(chain_patches=3, chain_most=100)
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        for edge in EDGES[:4]:
            await keeper.advance(fetch(store, edge))
        assert snapshots(bench) == [f"{root_of(MIXED, IMAGES[2]).hex()}.image"]
        store.retain([])
        assert store.names() == (EDGES[3].name,)
    async with bench.opened() as (keeper, store):
        await holds(keeper, IMAGES[3], version=5)


async def test_the_daily_budget_of_snapshots_is_kept(bench: Bench) -> None:
    bench.policy = SnapshotPolicy(chain_patches=1, chain_most=100, daily_bytes=2 * MIXED.image_bytes)
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        for edge in EDGES[:4]:
            await keeper.advance(fetch(store, edge))
        assert snapshots(bench) == [f"{root_of(MIXED, IMAGES[1]).hex()}.image"]
    async with bench.opened() as (keeper, store):
        await keeper.advance(fetch(store, EDGES[4]))
        assert snapshots(bench) == [f"{root_of(MIXED, IMAGES[1]).hex()}.image"]
        bench.now += 86_401
        await keeper.advance(fetch(store, EDGES[5]))
        assert snapshots(bench) == [f"{root_of(MIXED, IMAGES[5]).hex()}.image"]


async def test_what_the_chain_needs_is_not_deleted(bench: Bench) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        await keeper.advance(fetch(store, *EDGES[:3]))
        fetch(store, EDGES[3])
        store.retain([])
        assert set(store.names()) == {edge.name for edge in EDGES[:3]}


# --- readers ---------------------------------------------------------------------------------------------------------
async def test_weights_do_not_change_while_they_are_read(bench: Bench) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        path = fetch(store, EDGES[0])
        async with trio.open_nursery() as nursery:
            async with keeper.reading() as view:
                nursery.start_soon(keeper.advance, path)
                await trio.testing.wait_all_tasks_blocked(0.2)
                assert view.image.read_bytes() == BASE
                assert keeper.version == 0
            changed = await keeper.wait_changed(view.root)
            assert changed.version == 2


async def test_a_reader_waits_for_the_first_weights(bench: Bench) -> None:
    seen: list[int] = []

    async def read(keeper: Keeper) -> None:
        async with keeper.reading(deadline_s=30) as view:
            seen.append(view.version)

    async with bench.opened() as (keeper, store), trio.open_nursery() as nursery:
        nursery.start_soon(read, keeper)
        await trio.testing.wait_all_tasks_blocked(0.1)
        await keeper.advance(fetch(store, anchor(MIXED, IMAGES[0], version=2)))
    assert seen == [2]


# --- a worker that dies ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("passing", [1, 2, 3])
async def test_a_worker_killed_between_patches_costs_nothing(bench: Bench, tmp_path: Path, passing: int) -> None:
    """The image is torn: patched in part, verified by nobody. It is made anew and the same path is then taken."""
    environ = {**os.environ, faults.FAULT: f"weights.applied:{passing}", faults.ONCE: str(tmp_path / "fired")}
    async with bench.opened(environ=environ) as (keeper, store):
        await keeper.adopt_base(bench.base())
        path = fetch(store, *EDGES[:3])
        with pytest.raises(ChildFailed):
            await keeper.advance(path)
        assert (tmp_path / "fired").exists()
        await holds(keeper, BASE, version=0)
        await keeper.advance(path)
        await holds(keeper, IMAGES[2], version=4)


@pytest.mark.slow
@pytest.mark.parametrize("is_on_disk", [False, True])
async def test_a_worker_killed_at_random_moments_never_leaves_wrong_weights(
    tmp_path: Path, *, is_on_disk: bool
) -> None:
    """Patch after patch, while the worker is killed at moments spread over the time that a patch takes."""
    layout = sized(16)
    base = random_image(layout, 1)
    edges, images = versions(layout, base, first=2, last=20, chunk_bytes=1 << 18)
    bench = Bench(tmp_path, layout=layout, is_on_disk=is_on_disk)
    kills = 0
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base(base))
        made_once = inode(keeper.image, witnesses=tmp_path) if is_on_disk else 0
        path = fetch(store, edges[0])
        started = trio.current_time()
        await keeper.advance(path)
        step_s = (trio.current_time() - started) / (len(edges) - 3)
    for first in range(1, len(edges), 3):  # a worker that dies oftener in one life of its daemon is kept waiting long
        async with bench.opened() as (keeper, store):
            for number in range(first, first + 3):
                path = fetch(store, edges[number])
                kills += await taken_under_fire(keeper, path, images[number - 1 : number + 1], step_s * (number - 1))
            if is_on_disk:
                assert inode(keeper.image, witnesses=tmp_path) == made_once
    assert kills > 4


async def taken_under_fire(keeper: Keeper, path: Sequence[Link], images: Sequence[bytes], seconds: float) -> bool:
    """Take a path from the first image to the second while the worker is killed after ``seconds``; True if it hit."""
    before = await current(keeper)
    assert before[0] == images[0]
    is_hit = False
    # The kill before may have come after its patch: then another worker is only just starting.
    async with keeper._workshop.supervisor.use() as worker, trio.open_nursery() as nursery:
        nursery.start_soon(kill_after, worker.pid, seconds)
        try:
            await keeper.advance(path)
        except ChildFailed:
            is_hit = True
            assert await current(keeper) == before
            await keeper.advance(path)
    assert await current(keeper) == (images[1], path[-1][1].version)
    return is_hit


async def kill_after(pid: int, seconds: float) -> None:
    await trio.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):  # it may be gone since the kill before
        os.kill(pid, signal.SIGKILL)


async def current(keeper: Keeper) -> tuple[bytes, int]:
    async with keeper.reading(deadline_s=30) as view:
        return view.image.read_bytes(), view.version


async def test_a_worker_killed_in_a_snapshot_costs_only_the_snapshot(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench.policy = SnapshotPolicy(chain_patches=2, chain_most=100)
    environ = {**os.environ, faults.FAULT: "weights.snapshot_written", faults.ONCE: str(tmp_path / "fired")}
    async with bench.opened(environ=environ) as (keeper, store):
        await keeper.adopt_base(bench.base())
        await keeper.advance(fetch(store, *EDGES[:2]))
        assert "no snapshot is made" in caplog.text
        assert f"{root_of(MIXED, BASE).hex()}.image" in snapshots(bench)
        await holds(keeper, IMAGES[1], version=3)
        await keeper.advance(fetch(store, EDGES[2]))
        assert snapshots(bench) == [f"{root_of(MIXED, IMAGES[2]).hex()}.image"]
        await holds(keeper, IMAGES[2], version=4)


@pytest.mark.slow
async def test_two_hundred_patches_in_a_row_are_bit_identical(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    bench.policy = SnapshotPolicy(chain_patches=64)
    image = BASE
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        for version in range(2, 202):
            new = nudged(MIXED, image, version)
            await keeper.advance(fetch(store, patch(MIXED, image, new, version=version)))
            image = new
        await holds(keeper, image, version=201)
    async with bench.opened() as (keeper, store):
        await holds(keeper, image, version=201)
    assert not caplog.records
