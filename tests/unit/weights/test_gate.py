"""The gate in front of the working copy: readers together, a writer alone, nobody for ever."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from rollmesh_peer.weights.gate import Gate
from rollmesh_protocol.errors import HostError


async def test_readers_share_and_a_writer_waits_for_them(autojump_clock: MockClock) -> None:
    gate = Gate("the weights")
    order: list[str] = []

    async def read(name: str, seconds: float) -> None:
        async with gate.reading(deadline_s=100):
            order.append(f"{name} in")
            await trio.sleep(seconds)
            order.append(f"{name} out")

    async def write() -> None:
        async with gate.writing(deadline_s=100):
            order.append("writer in")
            await trio.sleep(1)
            order.append("writer out")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, "first", 3)
        await wait_all_tasks_blocked()
        nursery.start_soon(read, "second", 1)
        await wait_all_tasks_blocked()
        nursery.start_soon(write)
        await wait_all_tasks_blocked()
        nursery.start_soon(read, "late", 1)  # goes behind the writer that waits
    assert order == [
        "first in", "second in", "second out", "first out", "writer in", "writer out", "late in", "late out",
    ]  # fmt: skip


async def test_a_writer_gives_up_in_time_and_lets_readers_in(autojump_clock: MockClock) -> None:
    gate = Gate("the weights")
    async with trio.open_nursery() as nursery, gate.reading(deadline_s=1):

        async def late_reader() -> None:
            async with gate.reading(deadline_s=100):
                pass

        with pytest.raises(HostError, match="the weights are still being read after 5 s"):
            async with gate.writing(deadline_s=5):
                pytest.fail("let in beside a reader")
        nursery.start_soon(late_reader)


async def test_a_reader_gives_up_in_time(autojump_clock: MockClock) -> None:
    gate = Gate("the weights")
    async with gate.writing(deadline_s=1):
        with pytest.raises(HostError, match="still being changed"):
            async with gate.reading(deadline_s=2):
                pytest.fail("let in beside a writer")


async def test_a_writer_that_is_cancelled_while_it_waits_blocks_nobody(autojump_clock: MockClock) -> None:
    gate = Gate("the weights")
    async with gate.reading(deadline_s=1):
        with trio.move_on_after(1):
            async with gate.writing(deadline_s=100):
                pytest.fail("let in beside a reader")
        async with gate.reading(deadline_s=0):
            pass
    async with gate.writing(deadline_s=0):
        pass


async def test_writers_go_one_at_a_time(autojump_clock: MockClock) -> None:
    gate = Gate("the weights")
    inside = 0

    async def write() -> None:
        nonlocal inside
        async with gate.writing(deadline_s=100):
            inside += 1
            assert inside == 1
            await trio.sleep(1)
            inside -= 1

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(write)
    assert trio.current_time() - 5 >= 0
