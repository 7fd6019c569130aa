"""Copies of a keeper's weights for another process: the right bits, whatever the daemon does, and nothing touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh_peer.weights import copies as copies_module
from rollmesh_peer.weights.copies import Way, find_way, image_root, open_copies, working_files
from rollmesh_protocol.errors import HostError
from tests.integration.test_weights_keeper import BASE, EDGES, IMAGES, Bench, fetch
from tests.unit.node.cards import make_card
from tests.unit.weights.kit import LEARNER, MIXED, RUN, anchor, root_of

CARD = make_card(run=RUN, learner=LEARNER.peer, layout=MIXED)
ROOTS = [root_of(MIXED, image) for image in (BASE, *IMAGES[:3])]


def way_of(bench: Bench) -> Way:
    way = find_way(bench.folder / "weights", bench.folder / "edges", card=CARD)
    assert way is not None
    return way


def copying(bench: Bench, *, working: tuple[Path, ...] = ()):
    return open_copies(bench.folder / "copies", way=way_of(bench), layout=MIXED, working=working)


async def fill(bench: Bench) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        await keeper.advance(fetch(store, *EDGES[:3]))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_every_version_of_the_chain_can_be_had_when_the_daemon_is_gone(bench: Bench) -> None:
    await fill(bench)
    before = {path: path.read_bytes() for path in bench.folder.rglob("*") if path.is_file()}
    assert way_of(bench).roots == dict(zip(ROOTS, (0, 2, 3, 4), strict=True))
    async with copying(bench) as copies:
        for root, image in zip(ROOTS, (BASE, *IMAGES[:3]), strict=True):
            assert (await copies.make(root)).read_bytes() == image
        with pytest.raises(HostError, match="another process"):
            async with copying(bench):
                pass
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in (bench.folder / "copies").iterdir()} == {"lock"}


async def test_the_working_copy_of_a_running_daemon_is_copied_and_goes_on(bench: Bench, monkeypatch) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.adopt_base(bench.base())
        await keeper.advance(fetch(store, *EDGES[:2]))
        working = working_files(bench.folder / "weights", ram_folder=bench.folder / "memory")
        assert keeper.image == working[0]
        async with copying(bench, working=working) as copies:
            monkeypatch.setattr(copies_module, "open_workshop", None)  # not needed
            copy = await copies.make(ROOTS[2])
            assert copy.read_bytes() == IMAGES[1]
            await keeper.advance(fetch(store, EDGES[2]))
            assert copy.read_bytes() == IMAGES[1] and keeper.root == ROOTS[3]


async def test_a_working_copy_that_is_torn_is_made_again_from_the_disk(bench: Bench) -> None:
    await fill(bench)
    torn = bench.folder / "torn"
    torn.write_bytes(IMAGES[2][:5000] + IMAGES[0][5000:])
    async with copying(bench, working=(bench.folder / "none", torn)) as copies:
        assert (await copies.make(ROOTS[3])).read_bytes() == IMAGES[2]


async def test_a_damaged_payload_is_an_error_and_never_wrong_weights(bench: Bench) -> None:
    await fill(bench)
    payload = bench.folder / "edges" / f"{EDGES[2].name.hex()}.payload"
    payload.write_bytes(payload.read_bytes()[:-1] + b"?")
    async with copying(bench) as copies:
        with pytest.raises(HostError, match="cannot be made again"):
            await copies.make(ROOTS[3])
        assert (await copies.make(ROOTS[2])).read_bytes() == IMAGES[1]


async def test_an_anchor_and_a_chain_that_is_cut(bench: Bench) -> None:
    async with bench.opened() as (keeper, store):
        await keeper.advance(fetch(store, anchor(MIXED, BASE, version=1), *EDGES[:2]))
    assert list(way_of(bench).roots) == ROOTS[:3]
    (bench.folder / "edges" / f"{EDGES[1].name.hex()}.manifest").unlink()
    assert list(way_of(bench).roots) == ROOTS[:2]


def test_there_is_no_way_without_weights_or_to_another_model(bench: Bench) -> None:
    assert find_way(bench.folder / "weights", bench.folder / "edges", card=CARD) is None


async def test_no_room_is_told_in_numbers(bench: Bench, monkeypatch) -> None:
    await fill(bench)
    assert find_way(bench.folder / "weights", bench.folder / "edges", card=make_card()) is None
    monkeypatch.setattr(copies_module.durable, "free_bytes", lambda folder: 12)
    with pytest.raises(HostError, match="0.00 GB are free on the disk"):
        async with copying(bench):
            pass


def test_the_root_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "image"
    file.write_bytes(BASE)
    assert image_root(file, layout=MIXED) == ROOTS[0]
    file.write_bytes(BASE[:-64])
    with pytest.raises(HostError):
        image_root(file, layout=MIXED)
