"""What is remembered of margins: it survives a restart, its alarms have consequences, and no class loosens a limit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from rollmesh_learner.audit.margin_book import (
    CLASS_EVERY,
    MarginBook,
    Remembered,
    class_of,
    load_remembered,
    read_margins,
)
from rollmesh_learner.members.nodes import Node
from rollmesh_learner.members.standing import Record
from rollmesh_learner.records.ledger import open_ledger
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.messages import MAJOR, EngineInfo, Hello
from rollmesh_protocol.verdicts.drift import DriftTest
from rollmesh_protocol.verdicts.margins import Thresholds, count_margins

DRIFT = DriftTest(clip=0.3, reference=0.005, exponent=4.0)
LIMITS = Thresholds(low_margin=0.6, high_margin=0.8, any_margin=2.0)
HONEST = np.zeros(200, dtype=np.float32)
HONEST[:4] = 0.05
DRIFTED = np.full(20, 0.25, dtype=np.float32)
"""4.9 nats beyond the reference: the first one alarms by itself."""


def node(peer: str, *, device: str = "gpu", block: str = "") -> Node:
    engine = EngineInfo(backend="transformers", dtype="bfloat16", device=device)
    hello = Hello(
        majors=(MAJOR,), software="test", name=peer, role="worker", engine=engine, addresses=(), invite=None
    )  # fmt: skip
    return Node(peer, hello, Record(), last_seen=0.0, block=block)


def book(known: dict[str, Remembered] | None = None) -> MarginBook:
    return MarginBook(DRIFT, thresholds=LIMITS, longest=64, known=known)


async def reopened(before: MarginBook, folder: Path, *peers: str) -> MarginBook:
    """The book of a learner that was started again."""
    path = folder / "ledger.sqlite"
    async with open_ledger(path) as ledger:
        await ledger.commit(*(before.statement(peer) for peer in peers))
    async with open_ledger(path) as ledger:
        return book(await load_remembered(ledger))


def test_the_first_alarm_is_soft_and_the_second_hard() -> None:
    memory = book()
    assert memory.add("a", HONEST, node=node("a")) == ("pass", "")
    verdict, why = memory.add("a", DRIFTED, node=node("a"))
    assert verdict == "soft"
    assert "over 20 audited tokens" in why
    assert memory.add("a", HONEST, node=node("a"))[0] == "pass"
    assert memory.add("b", DRIFTED, node=node("b"))[0] == "soft", "every node has its own"
    assert memory.add("a", DRIFTED, node=node("a"))[0] == "hard"


@pytest.mark.parametrize("after", [1, 5])
async def test_a_restart_forgives_nothing(folder: Path, after: int) -> None:
    """A node whose drift shows after some rollouts is found at the same one, whenever the learner is restarted."""
    small = np.full(10, 0.05, dtype=np.float32)
    needed = math.ceil(DRIFT.alarm / (DRIFT.exponent * (0.05 - DRIFT.reference) * len(small)))
    memory = book()
    for number in range(1, needed):
        assert memory.add("a", small, node=node("a"))[0] == "pass"
        if number == after:
            memory = await reopened(memory, folder, "a")
    assert memory.add("a", small, node=node("a"))[0] == "soft"
    memory = await reopened(memory, folder, "a")
    assert memory.add("a", DRIFTED, node=node("a"))[0] == "hard"


async def test_a_class_is_learned_from_three_blocks_and_kept_over_a_restart(folder: Path) -> None:
    calm = np.zeros(1000, dtype=np.float32)
    calm[:20] = 0.02
    memory = book()
    for number in range(CLASS_EVERY):
        for peer in "abc":
            memory.add(peer, calm, node=node(peer, block=peer))
        if number == 0:
            assert memory.limits_of(node("new")) == LIMITS
    learned = memory.limits_of(node("new"))
    assert learned.any_margin < LIMITS.any_margin
    assert learned.low_margin < LIMITS.low_margin
    assert memory.limits_of(node("new", device="another")) == LIMITS
    assert memory.limits_of(None) == LIMITS
    again = await reopened(memory, folder, *"abc")
    assert again.limits_of(node("new")) == learned


def test_nodes_of_one_block_teach_nothing() -> None:
    memory = book()
    calm = np.zeros(1000, dtype=np.float32)
    for _ in range(CLASS_EVERY):
        for peer in "abc":
            memory.add(peer, calm, node=node(peer, block="10.0.0.0/24"))
    assert memory.limits_of(node("new")) == LIMITS


def test_another_declared_engine_begins_its_counts_anew_but_keeps_its_score() -> None:
    memory = book()
    half = np.full(14, 0.25, dtype=np.float32)
    assert memory.add("a", half, node=node("a"))[0] == "pass"
    assert memory.add("a", half, node=node("a", device="another"))[0] == "soft"
    kept = memory._nodes["a"]
    assert sum(kept.counts) == len(half)
    assert kept.kind == class_of(node("a", device="another").hello.engine)
    assert Remembered.decode(kept.encode()) == kept


def test_figures_count_by_the_limits_of_the_node() -> None:
    margins = read_margins(np.array([0, 0.7, 0.9, 2.5], dtype="<f4").tobytes(), tokens=4)
    found = count_margins(margins, LIMITS)
    assert (found.tokens, found.over_low, found.over_high, found.over_any, found.largest) == (4, 3, 2, 1, 2.5)
    with pytest.raises(ChildFailed, match="do not fit"):
        read_margins(bytes(8), tokens=4)
