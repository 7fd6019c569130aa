"""kill -9 of whole processes, at every named point and at random moments: the weights come back bit by bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollmesh_learner.publishing.published import Sealed, rebuild
from rollmesh_peer import faults
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.ram import DISK_FOLDER
from rollmesh_protocol.edges import cheapest_path
from rollmesh_protocol.patch.codec import apply_patch
from tests.integration.weights_programs import BASE, LAYOUT, announced, pack, reserved
from tests.unit.weights.kit import LEARNER, RUN, inode, nudged, root_of

ROOT = Path(__file__).parents[2]
GOAL = 8
LAST = 120
"""Versions for a node that is killed again and again: more than it takes meanwhile."""
MOMENTS = 18


def start(*words: object, fault: str = "") -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name not in (faults.FAULT, faults.ONCE)}
    if fault:
        environ[faults.FAULT] = fault
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.weights_programs", *map(str, words)],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=60)
    return out.splitlines()


def run_to_the_end(*words: object) -> list[str]:
    process = start(*words)
    lines = finish(process)
    assert process.returncode == 0
    return lines


# --- learner ---------------------------------------------------------------------------------------------------------
def check_learner(folder: Path) -> None:
    """No version twice, and from everything that was ever announced a node reaches the head with the right bits."""
    numbers = reserved(folder)
    assert numbers == sorted(set(numbers))
    heads = announced(folder)
    assert len(heads) == GOAL
    assert [head.version for head in heads] == sorted({head.version for head in heads})
    images = [BASE]
    for head in heads[1:]:
        images.append(nudged(LAYOUT, images[-1], head.version))
    store = EdgeStore(folder / "published" / "edges", run=RUN, learner=LEARNER.peer, layout=LAYOUT, quota_bytes=1 << 40)
    history = rebuild(heads, [sealed_of(store, name) for name in store.names() if store.is_complete(name)])
    for held, image in (*zip(heads, images, strict=True), (None, b"")):
        root = None if held is None else held.root
        path = cheapest_path(history.edges_towards_head(root), held=root, goal=heads[-1].root)
        assert path is not None
        current = bytearray(image)
        for edge in path:
            payload = store.payload_path(edge.manifest).read_bytes()
            if edge.parent is None:
                current = bytearray(payload)
            else:
                apply_patch(LAYOUT, current, payload)
        assert bytes(current) == images[-1]


def sealed_of(store: EdgeStore, name: bytes) -> Sealed:
    manifest, envelope = store.manifest(name), store.envelope(name)
    assert manifest is not None
    assert envelope is not None
    return Sealed(name=name, manifest=manifest, envelope_bytes=len(envelope))


POINTS = ("test.reserved", "publish.encoded", "publish.payload_durable", "publish.manifest_durable", "test.recorded")


@pytest.mark.parametrize(
    ("point", "passing"),
    [*((point, 1) for point in POINTS), *((point, 4) for point in POINTS), ("publish.anchor_written", 1)],
)
def test_a_learner_killed_at_a_point_goes_on(tmp_path: Path, point: str, passing: int) -> None:
    killed = start("learner", tmp_path, GOAL, fault=f"{point}:{passing}")
    finish(killed)
    assert killed.returncode == -signal.SIGKILL
    lines = run_to_the_end("learner", tmp_path, GOAL)
    assert lines[0].startswith("restored")
    check_learner(tmp_path)


@pytest.mark.slow
def test_a_learner_killed_at_random_moments_goes_on(tmp_path: Path) -> None:
    moments = random.Random(7)
    kills = 0
    for _ in range(5):
        process = start("learner", tmp_path, GOAL)
        kills += kill_within(process, moments.uniform(0.0, 0.5))
    assert kills > 2
    run_to_the_end("learner", tmp_path, GOAL)
    check_learner(tmp_path)


def kill_within(process: subprocess.Popen[str], seconds: float) -> bool:
    """Kill -9 this long after the process has told that it is back; False when it had already ended."""
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(seconds)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


# --- node ------------------------------------------------------------------------------------------------------------
def expected_root(last: int = GOAL) -> str:
    image = BASE
    for version in range(2, last + 1):
        image = nudged(LAYOUT, image, version)
    return root_of(LAYOUT, image).hex()


WHERE = pytest.mark.parametrize("where", [(), ("disk",)], ids=["in-memory", "on-disk"])


def on_disk(folder: Path) -> int | None:
    """Which file the working copy on the disk is; None while it has not been made."""
    image = folder / "weights" / DISK_FOLDER / "working.image"
    return inode(image, witnesses=folder) if image.exists() else None


@WHERE
@pytest.mark.parametrize(
    ("point", "passing", "version"),
    [
        ("store.chunk_written", 1, 0),
        ("store.chunk_written", 3, 0),
        ("store.chunk_written", 12, 3),
        ("store.payload_flushed", 1, 0),
        ("keeper.verified", 1, 0),
        ("keeper.verified", 3, 3),
        ("keeper.written_down", 1, 2),
        ("keeper.written_down", 5, 6),
        ("keeper.snapshot_durable", 1, 4),
        ("keeper.snapshot_durable", 2, 7),
    ],
)
def test_a_node_killed_at_a_point_has_its_last_verified_weights(
    tmp_path: Path, point: str, passing: int, version: int, where: tuple[str, ...]
) -> None:
    pack(tmp_path, GOAL)
    killed = start("node", tmp_path, *where, fault=f"{point}:{passing}")
    finish(killed)
    assert killed.returncode == -signal.SIGKILL
    made = on_disk(tmp_path)
    lines = run_to_the_end("node", tmp_path, *where)
    restored = int(lines[0].split()[1])
    assert lines[0].startswith("restored")
    assert restored == version
    assert lines[-1] == f"end {expected_root()}"
    assert on_disk(tmp_path) == made


@WHERE
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_killed_at_random_moments_never_loses_what_it_told(tmp_path: Path, where: tuple[str, ...]) -> None:
    pack(tmp_path, LAST)
    moments = random.Random(3)
    told, made, kills = 0, None, 0
    for number in range(MOMENTS):
        process = start("node", tmp_path, *where)
        assert process.stdout is not None
        # Some die while they start, and so while they undo or make anew; the others soon after some versions.
        lines = [process.stdout.readline() for _ in range(moments.randrange(5) if number % 3 else 0)]
        if lines:
            assert int(lines[0].split()[1]) >= told
            assert made in (None, on_disk(tmp_path))
            made = on_disk(tmp_path)
        time.sleep(moments.uniform(0.0, 0.03) if lines else moments.uniform(0.2, 1.2))
        process.kill()
        rest, _ = process.communicate()
        kills += process.returncode == -signal.SIGKILL
        lines += rest.splitlines()
        told = max([told, *(int(line.split()[1]) for line in lines if line.startswith(("restored", "took")))])
    assert told > 0
    assert kills > MOMENTS // 2
    lines = run_to_the_end("node", tmp_path, *where)
    assert int(lines[0].split()[1]) >= told
    assert lines[-1] == f"end {expected_root(LAST)}"
    assert list((tmp_path / "memory").glob("rollmesh-*/*/*.image")) == []
    assert on_disk(tmp_path) == made
