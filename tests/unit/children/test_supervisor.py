"""The supervisor's decisions on a virtual clock, over children that are made up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
import trio
import trio.testing

from rollmesh_peer.children.process import Child, ChildSpec
from rollmesh_peer.children.supervisor import HEALTHY_S, Supervisor, restart_delay_s
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed, UsageError


class FakeChild:
    """What a supervisor needs of a child; dies when told to."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.is_open = True
        self._dead = trio.Event()

    @property
    def is_alive(self) -> bool:
        return self.is_open and not self._dead.is_set()

    def die(self) -> None:
        self._dead.set()

    async def wait_dead(self) -> ChildFailed:
        await self._dead.wait()
        return ChildFailed(f"child {self.pid} was killed", code="child.died")


class Theatre:
    """Opens fake children and remembers when."""

    def __init__(self, prepare: Callable[[FakeChild], Awaitable[None]] | None = None) -> None:
        self.children: list[FakeChild] = []
        self.opened_at: list[float] = []
        self.open_error: ChildFailed | None = None
        self.most_at_once = 0
        self._prepare_with = prepare
        self.supervisor = Supervisor(
            ChildSpec(name="engine", argv=("none",)), self._prepare, opener=self._open, jitter=lambda: 1.0
        )

    @property
    def living(self) -> int:
        return sum(child.is_open for child in self.children)

    async def _prepare(self, child: Child) -> None:
        if self._prepare_with is not None:
            await self._prepare_with(cast(FakeChild, child))

    @asynccontextmanager
    async def _open(self, spec: ChildSpec) -> AsyncIterator[Child]:
        self.opened_at.append(trio.current_time())
        if self.open_error is not None:
            raise self.open_error
        child = FakeChild(100 + len(self.children))
        self.children.append(child)
        self.most_at_once = max(self.most_at_once, self.living)
        try:
            yield cast(Child, child)
        finally:
            child.is_open = False


@pytest.fixture
def clock(autojump_clock: trio.testing.MockClock) -> trio.testing.MockClock:
    return autojump_clock


def test_delays_double_up_to_the_limit_and_jitter_halves_them() -> None:
    assert restart_delay_s(0, 0.5) == 0.0
    longest = [restart_delay_s(failures, 1.0) for failures in range(1, 40)]
    assert longest[:4] == [limits.BACKOFF_FIRST_S * factor for factor in (1, 2, 4, 8)]
    assert longest == sorted(longest)
    assert longest[-1] == limits.BACKOFF_MOST_S
    for failures in range(1, 40):
        assert restart_delay_s(failures, 0.0) == restart_delay_s(failures, 1.0) / 2
    assert restart_delay_s(10**6, 1.0) == limits.BACKOFF_MOST_S


async def test_use_waits_for_a_prepared_child(clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    async def slow(child: FakeChild) -> None:
        await trio.sleep(5)

    theatre = Theatre(slow)
    assert theatre.supervisor.state == "not started"
    nursery.start_soon(theatre.supervisor.run)
    await trio.sleep(1)
    assert theatre.supervisor.state == "preparing, pid 100"
    assert theatre.supervisor.child is None
    async with theatre.supervisor.use() as child:
        assert trio.current_time() == 5
        assert child.pid == 100
        assert theatre.supervisor.state == "running, pid 100"


async def test_use_says_what_it_waited_for(clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    theatre = Theatre()
    theatre.open_error = ChildFailed("the engine process cannot be started: no such file")
    nursery.start_soon(theatre.supervisor.run)
    with pytest.raises(ChildFailed, match=r"no engine process within 100 s: restarting in \d+ s: .*no such file"):
        async with theatre.supervisor.use(deadline_s=100):
            pass
    # 0.25 + 0.5 + 1 + 2 + 4 + 8 + 16 + 30 + 30 s: neither a storm nor a sleep
    assert len(theatre.opened_at) == 10
    gaps = [after - before for before, after in zip(theatre.opened_at, theatre.opened_at[1:], strict=False)]
    assert gaps == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30][: len(gaps)] or gaps[-1] == 30


async def test_a_dead_child_is_not_handed_out(clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    theatre = Theatre()
    nursery.start_soon(theatre.supervisor.run)
    async with theatre.supervisor.use() as first:
        theatre.children[0].die()
        async with theatre.supervisor.use() as second:
            assert second is not first
    assert theatre.supervisor.restarts == 1
    assert theatre.most_at_once == 1


async def test_a_child_that_has_done_its_work_is_started_again_soon(
    clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    theatre = Theatre()
    nursery.start_soon(theatre.supervisor.run)
    for number in range(8):
        async with theatre.supervisor.use():
            theatre.supervisor.prove()
            theatre.children[number].die()
            await trio.testing.wait_all_tasks_blocked()
    gaps = [after - before for before, after in zip(theatre.opened_at, theatre.opened_at[1:], strict=False)]
    assert gaps == [limits.BACKOFF_FIRST_S] * 7


async def test_a_healthy_life_resets_the_delay(clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    theatre = Theatre()
    nursery.start_soon(theatre.supervisor.run)
    for number in range(6):  # crashes at once, again and again
        async with theatre.supervisor.use():
            theatre.children[number].die()
            await trio.testing.wait_all_tasks_blocked()
    async with theatre.supervisor.use():
        await trio.sleep(HEALTHY_S)
        died_at = trio.current_time()
        theatre.children[6].die()
    async with theatre.supervisor.use():
        assert trio.current_time() - died_at == limits.BACKOFF_FIRST_S


async def test_failing_preparation_backs_off(clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    async def refuse(child: FakeChild) -> None:
        if trio.current_time() < 3:
            raise ChildFailed("no model yet")

    theatre = Theatre(refuse)
    nursery.start_soon(theatre.supervisor.run)
    await trio.sleep(2.5)
    assert theatre.supervisor.state.endswith("no model yet")
    async with theatre.supervisor.use():
        assert 3 <= trio.current_time() < 10
    assert theatre.living == 1


async def test_stop_returns_when_the_child_is_gone(clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    theatre = Theatre()
    await theatre.supervisor.stop()  # before it runs: nothing to wait for
    nursery.start_soon(theatre.supervisor.run)
    await trio.sleep(1)
    assert (theatre.children, theatre.supervisor.state) == ([], "stopped")
    theatre.supervisor.start()
    async with theatre.supervisor.use():
        await theatre.supervisor.stop()
        assert theatre.living == 0
    await trio.sleep(1000)
    assert (len(theatre.children), theatre.supervisor.state) == (1, "stopped")
    theatre.supervisor.start()
    async with theatre.supervisor.use() as child:
        assert child.pid == 101
    assert theatre.supervisor.restarts == 0


async def test_stop_during_a_long_back_off_is_immediate_and_start_forgets_it(
    clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    theatre = Theatre()
    theatre.open_error = ChildFailed("busy")
    nursery.start_soon(theatre.supervisor.run)
    await trio.sleep(100)
    before = trio.current_time()
    await theatre.supervisor.stop()
    assert trio.current_time() == before
    theatre.open_error = None
    theatre.supervisor.start()
    async with theatre.supervisor.use():
        assert trio.current_time() == before


async def test_stop_and_start_before_the_child_is_gone(clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    theatre = Theatre()
    nursery.start_soon(theatre.supervisor.run)
    async with theatre.supervisor.use():
        nursery.start_soon(theatre.supervisor.stop)
        await trio.testing.wait_all_tasks_blocked()
        theatre.supervisor.start()
    async with theatre.supervisor.use() as child:
        assert child.pid == 101


async def test_stop_after_the_end_of_run_does_not_hang(clock: trio.testing.MockClock) -> None:
    theatre = Theatre()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(theatre.supervisor.run)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert theatre.living == 0
    assert theatre.supervisor.state == "ended"
    await theatre.supervisor.stop()


async def test_a_bug_in_prepare_comes_out(clock: trio.testing.MockClock) -> None:
    async def wrong(child: FakeChild) -> None:
        raise ZeroDivisionError

    with pytest.RaisesGroup(ZeroDivisionError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Theatre(wrong).supervisor.run)


async def test_a_living_child_that_refuses_to_begin_ends_the_wait(
    clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    async def refuse(child: FakeChild) -> None:
        await trio.sleep(2)
        raise UsageError("there is no environment 'adition'")

    theatre = Theatre(refuse)
    nursery.start_soon(theatre.supervisor.run)
    with pytest.raises(UsageError, match="adition"):
        await theatre.supervisor.wait_accepted()
    assert trio.current_time() == 2


async def test_a_child_that_dies_at_the_beginning_is_waited_for(
    clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    async def die_twice(child: FakeChild) -> None:
        if child.pid < 102:
            child.die()
            raise await child.wait_dead()

    theatre = Theatre(die_twice)
    nursery.start_soon(theatre.supervisor.run)
    await theatre.supervisor.wait_accepted()
    assert theatre.supervisor.child is not None
    assert theatre.supervisor.child.pid == 102


async def test_a_child_that_never_begins_is_not_waited_for_for_ever(
    clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    theatre = Theatre()
    theatre.open_error = ChildFailed("the engine process cannot be started: no such file")
    nursery.start_soon(theatre.supervisor.run)
    with pytest.raises(ChildFailed, match=r"no engine process within 50 s: .*no such file"):
        await theatre.supervisor.wait_accepted(deadline_s=50)
