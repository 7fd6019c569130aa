"""Processes of the demo: their words go to a file, and they are gone when they were stopped."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import trio

from rollmesh_learner.demo import processes
from rollmesh_learner.demo.processes import Member, start, stop
from rollmesh_protocol.errors import HostError

POLITE = "import signal, sys; print('at work', flush=True); signal.sigwait([signal.SIGINT]); print('bye'); sys.exit(3)"
STUBBORN = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print('at work', flush=True)
signal.sigwait([signal.SIGINT]); print('no', flush=True)
signal.sigwait([signal.SIGINT]); print('well', flush=True)
"""


async def begin(tmp_path, program: str, name: str = "node-a") -> Member:
    member = await start(
        name, [sys.executable, "-c", program], log=tmp_path / f"{name}.log", environment={"PATH": os.environ["PATH"]}
    )
    with trio.fail_after(30):
        while "at work" not in member.log.read_text():
            await trio.sleep(0.02)
    return member


async def test_it_ends_politely_and_its_words_are_kept(tmp_path) -> None:
    program = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]);" + POLITE
    member = await begin(tmp_path, program)
    assert member.status is None and member.fate == "is running"
    with trio.fail_after(30):
        await stop([member], patience_s=20, hurry=trio.Event())
    assert member.status == 3 and member.fate == "ended with status 3"
    assert member.last_lines(1) == ["bye"] and member.last_lines(9) == ["at work", "bye"]


async def test_hurry_ends_the_patience_and_sends_the_second_signal(tmp_path) -> None:
    member = await begin(tmp_path, STUBBORN)
    hurry = trio.Event()

    async def hurry_once_refused() -> None:
        while "no" not in member.log.read_text():
            await trio.sleep(0.02)
        hurry.set()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hurry_once_refused)
            await stop([member], patience_s=3600, hurry=hurry)
    assert member.status == 0 and member.last_lines(3) == ["at work", "no", "well"]


async def test_one_that_hears_nothing_is_killed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(processes, "AT_ONCE_S", 0.1)
    deaf = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [2]); print('at work', flush=True); signal.pause()"
    member = await begin(tmp_path, deaf)
    with trio.fail_after(30):
        await stop([member], patience_s=0.1, hurry=trio.Event())
    assert member.status == -signal.SIGKILL and member.fate == "was ended by SIGKILL"


async def test_what_ended_already_is_no_trouble(tmp_path) -> None:
    member = await begin(tmp_path, "print('at work')")
    await member.process.wait()
    await stop([member], patience_s=10, hurry=trio.Event())
    assert member.status == 0


async def test_it_is_in_a_session_of_its_own(tmp_path) -> None:
    member = await begin(tmp_path, "import os; print(os.getpid() == os.getsid(0)); print('at work')")
    assert member.last_lines(2)[0] == "True"
    await member.process.wait()


async def test_a_program_that_is_not_there_is_told(tmp_path) -> None:
    with pytest.raises(HostError, match="node-a cannot be started"):
        await start("node-a", [str(tmp_path / "none")], log=tmp_path / "log", environment={})
