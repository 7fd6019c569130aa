"""What the overseer makes of an engine's life, on a virtual clock, over children that are made up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing

from rollmesh_node import oom
from rollmesh_node.overseer import Overseer
from rollmesh_node.progress import COLD_S, HUNG_S
from rollmesh_peer.children.launch import ChildSpec
from rollmesh_peer.children.process import Child
from rollmesh_protocol.errors import ChildFailed, HostError


class FakeChild:
    """Dies when told to, or when it is killed."""

    pid = 2**22 + 1

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.killed_at: float | None = None
        self._why = ""
        self._dead = trio.Event()

    def kill(self, how: str, *, code: str) -> None:
        self.killed_at = trio.current_time()
        self.die(how, returncode=-signal.SIGKILL)

    def die(self, why: str, *, returncode: int) -> None:
        self._why, self.returncode = why, returncode
        self._dead.set()

    async def wait_dead(self) -> ChildFailed:
        await self._dead.wait()
        return ChildFailed(f"the engine process (pid 7) {self._why}")


class Kernel:
    """Counts kills."""

    def __init__(self) -> None:
        self.kills = {"vmstat": 3}

    def __call__(self) -> dict[str, int]:
        return dict(self.kills)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    fake = Kernel()
    monkeypatch.setattr(oom, "kernel_kills", fake)
    return fake


async def attend(overseer: Overseer, child: FakeChild, story) -> str:
    """Run ``story`` beside the overseer; the words at the child's end."""
    told = []
    async with trio.open_nursery() as nursery:

        async def attended() -> None:
            told.append(await overseer.attend(cast(Child, child)))

        nursery.start_soon(attended)
        await trio.testing.wait_all_tasks_blocked()
        await story()
    return told[0]


async def test_a_hung_engine_is_ended_and_a_slow_one_is_not(autojump_clock, kernel) -> None:
    overseer, child = Overseer(device="none", max_rows=8), FakeChild()

    async def story() -> None:
        overseer.progress.given(trio.current_time())
        await trio.sleep(COLD_S - 10)  # compiles
        for tokens in range(1, 40):  # a token every 100 s: as slow as can be
            overseer.progress.heard(trio.current_time(), in_flight=2, tokens=tokens, steps=tokens)
            await trio.sleep(100)
        overseer.progress.heard(trio.current_time(), in_flight=0, tokens=50, steps=50)
        await trio.sleep(10 * COLD_S)  # idle
        assert child.killed_at is None
        overseer.progress.given(trio.current_time())
        stuck_at = trio.current_time()
        while child.killed_at is None:
            overseer.progress.heard(trio.current_time(), in_flight=1, tokens=50, steps=50)
            await trio.sleep(1)
        assert HUNG_S <= child.killed_at - stuck_at <= 5 * 100 + 5

    words = await attend(overseer, child, story)
    assert "hung: no progress for 500 s" in words
    assert overseer.rows == 8


async def test_a_kill_by_the_kernel_is_told_and_halves_the_rows(autojump_clock, kernel) -> None:
    overseer = Overseer(device="none", max_rows=8)
    for rows in (4, 2, 1, 1):
        child = FakeChild()

        async def story(child=child) -> None:
            kernel.kills["vmstat"] += 1
            child.die("was killed (out of memory?)", returncode=-signal.SIGKILL)

        words = await attend(overseer, child, story)
        assert words.startswith("out of memory: the kernel killed the engine")
        assert f"started for {rows} rollouts" in words
        assert overseer.rows == rows


async def test_a_kill_from_outside_is_not_called_out_of_memory(autojump_clock, kernel) -> None:
    overseer, child = Overseer(device="none", max_rows=8), FakeChild()

    async def story() -> None:
        child.die("was killed (out of memory?)", returncode=-signal.SIGKILL)

    words = await attend(overseer, child, story)
    assert "out of memory" not in words and "from outside" in words
    assert overseer.rows == 8


async def test_an_allocators_words_halve_the_rows_and_a_refused_plan_does_not(autojump_clock, kernel) -> None:
    overseer = Overseer(device="cuda", max_rows=8)
    for error, rows in (
        (ChildFailed("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"), 4),
        (HostError("out of memory: the engine needs 15.0 GB for the weights"), 4),
    ):
        child = FakeChild()

        async def story(child=child, error=error) -> None:
            overseer.failed(error)
            child.die(f"could not load the weights: {error.detail}", returncode=-signal.SIGKILL)

        words = await attend(overseer, child, story)
        assert "out of memory" in words.lower()
        assert overseer.rows == rows


async def test_what_the_engine_prints_is_kept_and_its_place_is_told(autojump_clock, kernel, tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    overseer, child = Overseer(device="none", max_rows=8, log=path), FakeChild()
    hear = overseer.listening(ChildSpec(name="engine", argv=("x",))).hear
    assert hear is not None

    async def story() -> None:
        hear("RuntimeError: it broke")
        child.die("ended with status 1", returncode=1)

    words = await attend(overseer, child, story)
    assert str(path) in words
    text = path.read_text()
    assert "the engine starts" in text and "RuntimeError: it broke" in text and "ended with status 1" in text


def test_an_engine_on_the_wrong_device_is_refused() -> None:
    lost = Overseer(device="cuda", max_rows=1)
    lost.check_device({"device": "cuda:0"})
    with pytest.raises(ChildFailed, match="the GPU is lost: the engine runs on cpu"):
        lost.check_device({"device": "cpu"})
    with pytest.raises(ChildFailed, match="the GPU is lost"):
        lost.check_device({})
    Overseer(device="cpu", max_rows=1).check_device({"device": "cpu"})
    Overseer(device="none", max_rows=1).check_device({})
