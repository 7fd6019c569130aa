"""How versions spread: counted over those who are here, told once, and never more than the last few."""

from __future__ import annotations

import logging

import pytest

from rollmesh_learner.publishing.spread import SpreadBook


class World:
    def __init__(self) -> None:
        self.online = {"a": "node-a", "b": "node-b"}
        self.served = 0
        self.book = SpreadBook(online=lambda: self.online, served_bytes=lambda: self.served)


@pytest.fixture
def world() -> World:
    return World()


def test_nobody_holds_a_new_version_yet(world: World) -> None:
    world.book.published(5, num_bytes=100, now=10)
    (found,) = world.book.status(now=12)
    assert (found.version, found.age_s, found.holding, found.online) == (5, 2, 0, 2)
    assert (found.most_s, found.last_s) == (None, None)


def test_times_bytes_and_the_slowest_and_one_line_when_all_hold_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world.book.published(5, num_bytes=100, now=10)
    world.served = 120
    world.book.heard("a", version=5, now=13)
    assert not caplog.records
    world.served = 150
    world.book.heard("b", version=6, now=17)  # what is newer counts as well
    (found,) = world.book.status(now=20)
    assert (found.holding, found.most_s, found.last_s, found.bytes_from_learner) == (2, 7, 7, 150)
    assert found.slowest == ("node-b", "node-a")
    assert [record.message for record in caplog.records] == ["version spread"]
    world.book.heard("b", version=6, now=18)
    world.book.published(6, num_bytes=100, now=20)
    assert len(caplog.records) == 1


def test_a_version_that_is_overtaken_is_told_as_far_as_it_came(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world.book.published(5, num_bytes=100, now=10)
    world.book.heard("a", version=5, now=13)
    world.book.published(6, num_bytes=100, now=20)
    assert len(caplog.records) == 1
    newest, before = world.book.status(now=21)
    assert (newest.version, before.version) == (6, 5)
    assert before.slowest[0] == "node-b"
    world.book.published(7, num_bytes=100, now=22)
    assert [found.version for found in world.book.status(now=22)] == [7, 6]


def test_who_is_gone_does_not_count(world: World) -> None:
    world.book.published(5, num_bytes=100, now=10)
    world.book.heard("a", version=5, now=13)
    del world.online["b"]
    (found,) = world.book.status(now=14)
    assert (found.holding, found.online, found.last_s) == (1, 1, 3)
    world.online.clear()
    (found,) = world.book.status(now=14)
    assert (found.holding, found.online, found.last_s) == (0, 0, None)
