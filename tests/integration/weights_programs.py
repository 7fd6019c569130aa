"""Two small daemons that tests kill: a learner that publishes versions, and a node that fetches and takes them.

    python -m tests.integration.weights_programs learner FOLDER VERSIONS
    python -m tests.integration.weights_programs node FOLDER [disk]
    python -m tests.integration.weights_programs pack FOLDER VERSIONS
    python -m tests.integration.weights_programs full FOLDER
    python -m tests.integration.weights_programs full-disk FOLDER

With ``disk`` the working copy is on the disk, else in memory. Every image follows from its version number, so the
tests know each bit that must come out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import trio

from rollmesh_learner.publishing.publisher import Publisher
from rollmesh_peer.faults import fault_point
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.keeper import open_keeper
from rollmesh_peer.weights.kept_state import STATE_BYTES, KeptState, SnapshotPolicy
from rollmesh_peer.weights.ram import open_place
from rollmesh_peer.weights.workshop import open_workshop
from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError, Refused
from rollmesh_protocol.manifest import open_manifest
from rollmesh_protocol.messages import Head
from tests.unit.weights.kit import (
    LEARNER,
    RUN,
    SignedEdge,
    anchor,
    inode,
    nudged,
    random_image,
    root_of,
    sized,
    versions,
)

LAYOUT = sized(2)
BASE = random_image(LAYOUT, 1)
CHUNK = 1 << 12


# --- the ledger's part: lines, each durable before the next step ------------------------------------------------------
def note(folder: Path, *words: object) -> None:
    with (folder / "ledger").open("ab") as file:
        file.write((" ".join(map(str, words)) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def notes(folder: Path) -> list[list[str]]:
    path = folder / "ledger"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def reserved(folder: Path) -> list[int]:
    return [int(words[1]) for words in notes(folder) if words[0] == "reserved"]


def announced(folder: Path) -> list[Head]:
    return [
        Head(version=int(words[1]), step=int(words[2]), root=bytes.fromhex(words[3]))
        for words in notes(folder)
        if words[0] == "published"
    ]


def reserve(folder: Path) -> int:
    version = max(reserved(folder), default=0) + 1
    note(folder, "reserved", version)
    return version


# --- programs --------------------------------------------------------------------------------------------------------
async def learner(folder: Path, goal: int) -> None:
    """Publish until ``goal`` versions are out."""
    (folder / "memory").mkdir(exist_ok=True)
    with open_place(folder, ram_folder=folder / "memory", needed_bytes=6 * LAYOUT.image_bytes) as place:
        async with open_workshop(LAYOUT) as workshop:
            ring = place.folder / "ring"
            ring.mkdir()
            publisher = Publisher(
                folder / "published", ram=ring, run=RUN, identity=LEARNER, layout=LAYOUT, workshop=workshop,
                ring_versions=4, anchor_every=5, keep_versions=100, patch_chunk_bytes=CHUNK, anchor_chunk_bytes=CHUNK,
            )  # fmt: skip
            await publisher.restore(announced(folder))
            print("restored", publisher.head.version, flush=True)
            if publisher.head.version == 0:
                base = folder / "base.image"
                base.write_bytes(BASE)
                await publisher.publish_base(base, version=reserve(folder))
                tell(folder, publisher.head)
            while len(announced(folder)) < goal:
                version = reserve(folder)
                fault_point("test.reserved")
                held = publisher.image_of(publisher.head.root)
                assert held is not None
                trained = place.folder / "trained.image"
                trained.write_bytes(nudged(LAYOUT, held.read_bytes(), version))
                prepared = await publisher.prepare(trained, version=version, step=version)
                assert prepared is not None
                tell(folder, prepared.entry.head)
                fault_point("test.recorded")
                publisher.announced(prepared)
                await publisher.maintain()


def tell(folder: Path, head: Head) -> None:
    note(folder, "published", head.version, head.step, head.root.hex())
    print("published", head.version, flush=True)


async def node(folder: Path, *, ram_folder: Path | None) -> None:
    """Fetch and take every edge in ``folder``/source, in order of versions."""
    if ram_folder is not None:
        ram_folder.mkdir(exist_ok=True)
    store = EdgeStore(folder / "edges", run=RUN, learner=LEARNER.peer, layout=LAYOUT, quota_bytes=1 << 32)
    async with (
        open_workshop(LAYOUT) as workshop,
        open_keeper(
            folder / "weights", ram_folder=ram_folder, layout=LAYOUT, store=store, workshop=workshop,
            policy=SnapshotPolicy(chain_patches=3),
        ) as keeper,
    ):  # fmt: skip
        await keeper.restore()
        if keeper.root is None:
            base = folder / "base.image"
            base.write_bytes(BASE)
            await keeper.adopt_base(base)
        held = keeper.image.read_bytes()
        assert root_of(LAYOUT, held) == keeper.root
        print("restored", keeper.version, flush=True)
        for edge in unpack(folder / "source"):
            if edge.manifest.version <= keeper.version:
                continue
            store.add_manifest(edge.name, edge.envelope)
            for index in sorted(set(range(edge.manifest.chunk_count)) - store.held(edge.name)):
                store.write_chunk(edge.name, index, edge.chunk(index))
            await keeper.advance([edge.link])
            print("took", keeper.version, flush=True)
        print("end", root_of(LAYOUT, keeper.image.read_bytes()).hex(), flush=True)


async def full(folder: Path) -> None:
    """``folder``/disk is a small disk: fill it while weights are fetched and taken, then make room again."""
    limits.FREE_DISK_BYTES = 0  # type: ignore[misc]  # so that it can be filled to the last byte
    (folder / "memory").mkdir(exist_ok=True)
    disk = folder / "disk"
    v2, v3, v4, v5 = unpack(folder / "source")
    store = EdgeStore(disk / "edges", run=RUN, learner=LEARNER.peer, layout=LAYOUT, quota_bytes=1 << 32)
    async with (
        open_workshop(LAYOUT) as workshop,
        open_keeper(
            disk / "weights", ram_folder=folder / "memory", layout=LAYOUT, store=store, workshop=workshop,
            policy=SnapshotPolicy(chain_patches=2),
        ) as keeper,
        AsyncExitStack() as pins,
    ):  # fmt: skip
        for edge in (v3, v4):
            pins.enter_context(store.pin(edge.name))
        base = folder / "base.image"
        base.write_bytes(BASE)
        await keeper.adopt_base(base)
        fetch(store, v2)
        await keeper.advance([v2.link])
        fetch(store, v3)
        store.add_manifest(v4.name, v4.envelope)
        filler = fill(disk)
        try:
            store.write_chunk(v4.name, 0, v4.chunk(0))
        except HostError as error:
            print("chunk:", error, flush=True)
        try:
            store.add_manifest(v5.name, v5.envelope)
        except (Refused, HostError) as error:
            print("manifest:", error.code, flush=True)
        print("held", len(store.held(v4.name)), "version", keeper.version, flush=True)
        await keeper.advance([v3.link])  # from memory; neither the state nor a snapshot can be written
        async with keeper.reading() as view:
            print("took", view.version, root_of(LAYOUT, view.image.read_bytes()) == v3.manifest.root, flush=True)
        filler.unlink()
        fetch(store, v4)
        await keeper.advance([v4.link])
        print("took", keeper.version, flush=True)


async def full_disk(folder: Path) -> None:
    """``folder``/disk is a small disk with the working copy on it: there is no room for an undo log, then just enough.

    Says what happened, and in the end which version the state names that is durable.
    """
    limits.FREE_DISK_BYTES = 0  # type: ignore[misc]  # so that it can be filled to the last byte
    disk = folder / "disk"
    v2, v3, *_ = unpack(folder / "source")
    store = EdgeStore(disk / "edges", run=RUN, learner=LEARNER.peer, layout=LAYOUT, quota_bytes=1 << 32)
    async with (
        open_workshop(LAYOUT) as workshop,
        open_keeper(disk / "weights", ram_folder=None, layout=LAYOUT, store=store, workshop=workshop) as keeper,
        AsyncExitStack() as pins,
    ):
        leap = anchor(LAYOUT, nudged(LAYOUT, nudged(LAYOUT, nudged(LAYOUT, BASE, 2), 3), 4), version=4)
        pins.enter_context(store.pin(leap.name))
        base = folder / "base.image"
        base.write_bytes(BASE)
        await keeper.adopt_base(base)
        for edge in (v2, v3, leap):
            fetch(store, edge)
        await keeper.advance([v2.link])
        made_once = inode(keeper.image, witnesses=disk)
        filler = fill(disk)
        for edge in (v3, leap):
            try:
                await keeper.advance([edge.link])
            except HostError as error:
                print("took none:", str(error).replace(f"{folder}/", "").replace(leap.name.hex(), "4"), flush=True)
            async with keeper.reading() as view:
                print("held", view.version, root_of(LAYOUT, view.image.read_bytes()) == v2.manifest.root, flush=True)
        print("refused", keeper.is_refused(v3.name), sorted(file.name for file in keeper.image.parent.iterdir()))
        # Room for the log to the last page, so that the state does not fit beside it.
        os.truncate(filler, filler.stat().st_size - pages_of_log(nudged(LAYOUT, BASE, 2)) * PAGE)
        await keeper.advance([v3.link])
        async with keeper.reading() as view:
            print("took", view.version, root_of(LAYOUT, view.image.read_bytes()) == v3.manifest.root, flush=True)
        state = KeptState.decode((disk / "weights" / "weights.state").read_bytes(), limit=STATE_BYTES)
        print("written", state.version, "once made", inode(keeper.image, witnesses=disk) == made_once, flush=True)


PAGE = os.sysconf("SC_PAGESIZE")


def pages_of_log(old: bytes) -> int:
    """Pages that the undo log of version 3 takes: four bytes and two for every changed weight, and its heads."""
    new = nudged(LAYOUT, old, 3)
    changes = np.count_nonzero(np.frombuffer(old, "<u2") != np.frombuffer(new, "<u2"))
    return -(-(6 * int(changes) + 200) // PAGE)


def fetch(store: EdgeStore, edge: SignedEdge) -> None:
    store.add_manifest(edge.name, edge.envelope)
    for index in range(edge.manifest.chunk_count):
        store.write_chunk(edge.name, index, edge.chunk(index))


def fill(disk: Path) -> Path:
    """A file that takes all that is free."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return path


def pack(folder: Path, last: int) -> None:
    """Write edges for versions 2 to ``last`` where :func:`node` looks for them."""
    (folder / "source").mkdir(parents=True)
    edges, _ = versions(LAYOUT, BASE, first=2, last=last, chunk_bytes=CHUNK)
    for edge in edges:
        stem = folder / "source" / f"{edge.manifest.version:04}-{edge.name.hex()}"
        stem.with_suffix(".envelope").write_bytes(edge.envelope)
        stem.with_suffix(".payload").write_bytes(edge.payload)


def unpack(source: Path) -> Iterator[SignedEdge]:
    for path in sorted(source.glob("*.envelope")):
        envelope, name = path.read_bytes(), bytes.fromhex(path.stem.split("-")[1])
        manifest = open_manifest(envelope, name=name, run=RUN, learner=LEARNER.peer, layout=LAYOUT)
        yield SignedEdge(name, envelope, manifest, path.with_suffix(".payload").read_bytes())


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "learner":
        trio.run(learner, where, int(sys.argv[3]))
    elif what == "node":
        is_on_disk = "disk" in sys.argv[3:]
        trio.run(lambda: node(where, ram_folder=None if is_on_disk else where / "memory"))
    elif what == "full":
        trio.run(full, where)
    elif what == "full-disk":
        trio.run(full_disk, where)
    else:
        pack(where, int(sys.argv[3]))
