"""kill -9 of the learner between any two durable points: it is started again, and nobody else does anything.

One run, one learner that dies at one point after another, and two nodes that live through all of it. After every death
the ledger is compared with everything it ever held.
"""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

import pytest

from rollmesh_peer import faults
from tests.support.chronicle import Chronicle, fetched, held
from tests.support.system import System, open_system

DEATHS = (
    # (point, the passing of it at which the learner dies)
    ("step.assigned", 8),  # no checkpoint yet: nodes are on versions that nobody can make again
    ("audit.recomputed", 2),
    # What was done for the first steps is there still, so these lives are over before a node has found the learner:
    ("publish.encoded", 1),  # at the start, which publishes what it has gone back to
    ("version.reserved", 2),
    ("publish.payload_durable", 2),
    ("publish.manifest_durable", 3),
    ("version.durable", 2),
    ("step.trained", 2),
    ("step.checkpointed", 1),
    ("step.final", 1),
    ("lease.committed", 3),
    ("receipt.committed", 3),
)
FIRST_SAVED = DEATHS.index(("step.checkpointed", 1))
"""From this life on there is a checkpoint after every step; before, there is none that anybody reaches."""
RARELY, ALWAYS = "training.checkpoint_every=9", "training.checkpoint_every=1"
DAEMON_POINTS = {
    point for point in faults.POINTS if point.startswith(("step.", "lease.", "receipt.", "version.", "audit."))
} | {"publish.encoded", "publish.payload_durable", "publish.manifest_durable"}
STEPS = 20
PATIENCE_S = 150.0
"""Of one life; a quiet machine needs five seconds."""
SETTINGS = ("leases.min_duration_s=2", "leases.max_duration_s=5", RARELY, "training.lr=3e-4")


def test_every_point_of_the_daemon_is_died_at() -> None:
    assert {point for point, _ in DEATHS} == DAEMON_POINTS


@pytest.mark.timeout(1200)
async def test_a_learner_that_dies_anywhere_loses_nothing(tmp_path: Path) -> None:
    first, *rest = DEATHS
    with open_system(tmp_path, *SETTINGS, steps=STEPS, faults=_fault(first)) as system:
        chronicle = Chronicle(system)
        nodes = [await system.add_node(name) for name in ("north", "south")]
        for number, (point, following) in enumerate(zip(DEATHS, [*rest, None], strict=True), start=1):
            assert await system.learner.wait(PATIENCE_S) == -signal.SIGKILL
            assert f"the fault point {point[0]} fires" in system.learner.log.splitlines()[-1]
            chronicle.look()
            await _no_node_knows_more(system, chronicle)
            if number == FIRST_SAVED:
                system.learner.command = [ALWAYS if word == RARELY else word for word in system.learner.command]
            system.learner.start(faults=_fault(following) if following else "")
        assert await system.learner.wait(PATIENCE_S) == 0
        chronicle.conclude(steps=STEPS)
        for node in nodes:
            assert await node.wait(30) == 0
        moved_on = [_patched_away_from_a_lost_version(chronicle, node.log) for node in nodes]
        assert any(moved_on)
        assert "Traceback" not in system.learner.log + "".join(node.log for node in nodes)


def _fault(death: tuple[str, int]) -> str:
    return f"{death[0]}:{death[1]}"


async def _no_node_knows_more(system: System, chronicle: Chronicle) -> None:
    """Every receipt that a node has got is in the ledger of the dead learner."""
    for name, node in system.nodes.items():
        status = await system.until_node(name, lambda _: True)
        assert node.is_alive
        assert status.accepted <= chronicle.accepted_of(status.peer), f"{name} has receipts that the ledger lost"


def _patched_away_from_a_lost_version(chronicle: Chronicle, log: str) -> bool:
    """True when the node held a version that was lost and fetched patches to go on; images are fetched only to join."""
    image_bytes = chronicle.system.summary()["full_bytes"]
    (first, *later) = fetched(log)
    assert first[1] >= image_bytes
    assert all(size < image_bytes for _, size in later)
    versions = held(log)
    assert versions == sorted(versions), "a node went back"
    return any(
        before in chronicle.orphaned and any(before < version <= after for version, _ in later)
        for before, after in pairwise(versions)
    )
