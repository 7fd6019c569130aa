"""Real child processes over real pipes: what a daemon sees when a child works, dies, hangs or babbles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from rollmesh_peer.children import process as process_module
from rollmesh_peer.children.failure import CLOSED, DIED, KILLED, LATE, START
from rollmesh_peer.children.frames import GARBAGE
from rollmesh_peer.children.process import Child, ChildSpec, open_child
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed, Refused, UsageError

PROGRAM = """
import os, signal, sys, threading, time
from rollmesh_peer.children.child import run_child, take_pipes
take_pipes()
print("a library prints while it is imported")
os.write(1, b"and another one writes to descriptor 1\\n")
from rollmesh_protocol.errors import Refused, UsageError

def count(body):
    try:
        for i in range(body["to"]):
            time.sleep(body.get("pause_s", 0))
            print("noise", i)
            yield {"i": i}
    finally:
        open(body["mark"], "w").write("closed") if "mark" in body else None

def refuse(body):
    raise Refused("lease.expired", "too late")

def misuse(body):
    raise UsageError("no such model")

def fail(body):
    raise ValueError("bad\\nanswer")

def die(body):
    print("about to die", file=sys.stderr, flush=True)
    os.kill(os.getpid(), body["signal"])
    time.sleep(60)

def leave(body):
    sys.exit(body["status"])

def hang(body):
    time.sleep(600)

def grandchild(body):
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    return {"pid": pid}

def babble(body):
    os.write(take_pipes()._outgoing, bytes(body["bytes"]))
    time.sleep(600)

def talk(body, notes):
    yield {"begun": True}
    while not notes.is_cancelled:
        for verb, said in notes.take(wait_s=body.get("wait_s", 0.2)):
            if verb == "stop":
                return
            yield {"verb": verb, "said": said}
        if body.get("ticks"):
            yield {}

def deaf(body, notes):
    time.sleep(body["for_s"])
    yield from ({"verb": verb} for verb, _ in notes.take())

run_child({
    "echo": lambda body: body, "count": count, "refuse": refuse, "misuse": misuse, "fail": fail, "die": die,
    "leave": leave, "hang": hang, "grandchild": grandchild, "babble": babble, "wrong": lambda body: 5,
    "group": lambda body: {"pid": os.getpid(), "group": os.getpgrp(), "session": os.getsid(0),
                           "environment": dict(os.environ), "nice": os.nice(0)},
    "memory": lambda body: {"bytes": len(bytearray(body["bytes"]))},
    "nothing": lambda body: iter(()),
    "empty": lambda body: iter([{}, {}]),
}, talks={"talk": talk, "deaf": deaf})
"""


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., ChildSpec]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def make(**changes: object) -> ChildSpec:
        fields: dict[str, object] = {"name": "test", "argv": (sys.executable, str(program)), "start_deadline_s": 20.0}
        return ChildSpec(**(fields | changes))  # type: ignore[arg-type]

    return make


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def until_gone(pid: int) -> None:
    with trio.fail_after(5):
        while is_running(pid):
            await trio.sleep(0.01)


async def test_calls_answer_and_printing_does_not_tear_frames(spec: Callable[..., ChildSpec]) -> None:
    async with open_child(spec()) as child:
        assert await child.call("echo", {"a": [1, None, b"\xff", "x"]}, deadline_s=5) == {"a": [1, None, b"\xff", "x"]}
        async with child.stream("count", {"to": 3}, item_deadline_s=5) as items:
            assert [item["i"] async for item in items] == [0, 1, 2]
        async with child.stream("nothing", {}, item_deadline_s=5) as items:
            assert [item async for item in items] == []
        async with child.stream("empty", {}, item_deadline_s=5) as items:
            assert [item async for item in items] == [{}, {}]
        pid = child.pid
    assert not is_running(pid)
    assert any("a library prints" in line for line in child.last_words)
    assert any("descriptor 1" in line for line in child.last_words)


async def test_child_has_its_own_session_and_only_the_given_environment(
    spec: Callable[..., ChildSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "do not pass on")
    async with open_child(spec(environment={"ROLLMESH_X": "1"}, nice=3)) as child:
        seen = await child.call("group", {}, deadline_s=5)
    assert seen["pid"] == seen["group"] == seen["session"] == child.pid
    environment = seen["environment"]
    assert isinstance(environment, dict)
    assert environment.pop("ROLLMESH_X") == "1"
    assert set(environment) <= {"LC_CTYPE"}  # Python's own coercion of the C locale
    assert seen["nice"] == os.getpriority(os.PRIO_PROCESS, 0) + 3


async def test_errors_keep_their_place_in_the_tree(spec: Callable[..., ChildSpec]) -> None:
    async with open_child(spec()) as child:
        with pytest.raises(Refused, match="too late") as refused:
            await child.call("refuse", {}, deadline_s=5)
        assert refused.value.code == "lease.expired"
        with pytest.raises(UsageError, match="no such model"):
            await child.call("misuse", {}, deadline_s=5)
        with pytest.raises(ChildFailed, match="ValueError: bad answer") as failed:
            await child.call("fail", {}, deadline_s=5)
        assert failed.value.code == "child.failed"
        with pytest.raises(ChildFailed, match="no verb 'unheard'"):
            await child.call("unheard", {}, deadline_s=5)
        with pytest.raises(ChildFailed, match="returned a int"):
            await child.call("wrong", {}, deadline_s=5)
        with pytest.raises(ChildFailed, match="msgpack"):
            await child.call("echo", {"a": object()}, deadline_s=5)
        assert await child.call("echo", {"still": "there"}, deadline_s=5) == {"still": "there"}


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "was killed (out of memory?)"),
        (signal.SIGSEGV, "crashed by signal 11"),
        (signal.SIGTERM, "was ended by signal 15"),
    ],
)
async def test_death_fails_every_waiting_call_at_once(
    spec: Callable[..., ChildSpec], number: signal.Signals, words: str
) -> None:
    failures: list[ChildFailed] = []

    async def wait(child: Child) -> None:
        try:
            await child.call("echo", {}, deadline_s=60)
        except ChildFailed as error:
            failures.append(error)

    async with open_child(spec()) as child:
        start = time.monotonic()
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(wait, child)
            with pytest.raises(ChildFailed) as died:
                await child.call("die", {"signal": int(number)}, deadline_s=60)
        assert time.monotonic() - start < 3
        assert words in died.value.detail
        assert died.value.code == DIED
        assert "its last words" in died.value.detail
        assert "about to die" in child.last_words
        assert child.returncode == -number
        assert not child.is_alive
        with pytest.raises(ChildFailed):
            await child.call("echo", {}, deadline_s=60)
    # Those whose turn came before "die" was sent were answered; nobody hangs.
    assert all(words in failure.detail for failure in failures)


async def test_waiting_calls_are_served_in_order(spec: Callable[..., ChildSpec]) -> None:
    order: list[int] = []

    async def one(child: Child, number: int) -> None:
        await child.call("echo", {}, deadline_s=10)
        order.append(number)

    async with open_child(spec()) as child:
        async with child.stream("count", {"to": 1}, item_deadline_s=5) as items, trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(one, child, number)
                await trio.testing.wait_all_tasks_blocked()
            assert order == []
            assert [item async for item in items] == [{"i": 0}]
        assert order == list(range(10))


async def test_exit_status_is_told(spec: Callable[..., ChildSpec]) -> None:
    async with open_child(spec()) as child:
        with pytest.raises(ChildFailed, match="ended with status 7"):
            await child.call("leave", {"status": 7}, deadline_s=10)


async def test_hang_is_killed_at_its_deadline(spec: Callable[..., ChildSpec]) -> None:
    async with open_child(spec()) as child:
        with pytest.raises(ChildFailed, match=r"did not answer 'hang' within 0\.2 s") as late:
            await child.call("hang", {}, deadline_s=0.2)
        assert late.value.code == LATE
        with trio.fail_after(5):
            assert (await child.wait_dead()).code == LATE


async def test_stopped_process_is_killed_at_its_deadline(spec: Callable[..., ChildSpec]) -> None:
    async with open_child(spec()) as child:
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(ChildFailed) as late:
            await child.call("echo", {"bytes": bytes(10_000_000)}, deadline_s=0.3)
        assert late.value.code == LATE
        await until_gone(child.pid)


@pytest.mark.parametrize("garbage", [b"\xff" * 64, b"Hello, world\n" * 9, b"\0\0\0\x01\xc0", b"\0\0\0\0"])
async def test_garbage_on_the_pipe_kills_the_child(spec: Callable[..., ChildSpec], garbage: bytes) -> None:
    async with open_child(spec()) as child:
        with pytest.raises(ChildFailed, match="nonsense") as failed:
            await child.call("babble", {"bytes": garbage}, deadline_s=20)
        assert failed.value.code == GARBAGE
        await until_gone(child.pid)


async def test_answer_to_a_call_that_nobody_made_kills_the_child(spec: Callable[..., ChildSpec]) -> None:
    from rollmesh_peer.children import frames

    stray = frames.pack(frames.RESULT, 999, {"body": {}})
    async with open_child(spec()) as child:
        with pytest.raises(ChildFailed, match="nobody made"):
            await child.call("babble", {"bytes": stray}, deadline_s=20)


async def test_big_frames_and_the_limit(spec: Callable[..., ChildSpec]) -> None:
    async with open_child(spec()) as child:
        payload = os.urandom(64 * 1024) * 512  # 32 MiB
        answer = await child.call("echo", {"payload": payload}, deadline_s=60)
        assert answer["payload"] == payload
        with pytest.raises(ChildFailed, match="larger than"):
            await child.call("echo", {"payload": bytes(256 * 1024 * 1024)}, deadline_s=60)
        assert await child.call("echo", {"ok": True}, deadline_s=5) == {"ok": True}


async def test_leaving_a_stream_early_cancels_it_and_frees_the_turn(
    spec: Callable[..., ChildSpec], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    async with open_child(spec()) as child:
        body = {"to": 10**9, "mark": str(mark)}
        async with child.stream("count", body, item_deadline_s=5) as items:
            async for item in items:
                if item["i"] == 5:
                    break
        assert await child.call("echo", {"next": 1}, deadline_s=5) == {"next": 1}
        assert mark.read_text() == "closed"


async def test_caller_that_gives_up_does_not_confuse_the_next(spec: Callable[..., ChildSpec]) -> None:
    async with open_child(spec()) as child:
        with trio.move_on_after(0.05):
            async with child.stream("count", {"to": 3, "pause_s": 0.2}, item_deadline_s=5) as items:
                async for _ in items:
                    raise AssertionError("no item comes so early")
        assert await child.call("echo", {"mine": 1}, deadline_s=5) == {"mine": 1}


async def test_cancelled_call_that_never_ends_is_killed(spec: Callable[..., ChildSpec]) -> None:
    async with open_child(spec()) as child:
        with trio.move_on_after(0.05):
            await child.call("hang", {}, deadline_s=0.3)
        with pytest.raises(ChildFailed, match="cancelled call 'hang'"):
            await child.call("echo", {}, deadline_s=5)


async def test_slow_reader_stops_the_child_instead_of_filling_memory(spec: Callable[..., ChildSpec]) -> None:
    async with (
        open_child(spec()) as child,
        child.stream("count", {"to": 100_000}, item_deadline_s=20) as items,
    ):
        first = await anext(items)
        assert first == {"i": 0}
        await trio.sleep(0.3)
        # 64 KiB of pipe and one read of 256 KiB hold well under 20,000 frames of some 30 bytes.
        numbers = [int(line.split()[1]) for line in child.last_words if line.startswith("noise")]
        assert numbers and max(numbers) < 20_000


async def test_a_call_is_spoken_to_while_it_streams(spec: Callable[..., ChildSpec]) -> None:
    async with open_child(spec()) as child:
        async with child.stream("talk", {"wait_s": 60.0}, item_deadline_s=5) as items:
            items.tell("first", {"a": [1, b"x"]})  # before anything has come: it waits for the call
            assert await anext(items) == {"begun": True}
            assert await anext(items) == {"verb": "first", "said": {"a": [1, b"x"]}}
            for number in range(100):
                items.tell("more", {"n": number})
            assert [(await anext(items))["said"] for _ in range(100)] == [{"n": number} for number in range(100)]
            items.tell("stop", {})
            assert [item async for item in items] == []
            assert [item async for item in items] == []  # an end stays an end
            items.tell("late", {})  # to a call that has ended: lost
        async with child.stream("talk", {"wait_s": 60.0}, item_deadline_s=5) as items:
            items.tell("stop", {})
            assert [item async for item in items] == [{"begun": True}]  # no note of the call before


async def test_notes_do_not_reach_another_call(spec: Callable[..., ChildSpec]) -> None:
    async with open_child(spec()) as child:
        async with child.stream("talk", {}, item_deadline_s=5) as items:
            items.tell("stop", {})
            for _ in range(50):
                items.tell("late", {})
            assert [item async for item in items] == [{"begun": True}]
        async with child.stream("deaf", {"for_s": 0}, item_deadline_s=5) as items:
            assert [item async for item in items] == []


async def test_leaving_a_talk_wakes_it(spec: Callable[..., ChildSpec]) -> None:
    async with open_child(spec()) as child:
        async with child.stream("talk", {"wait_s": 60.0}, item_deadline_s=5) as items:
            assert await anext(items) == {"begun": True}
        assert await child.call("echo", {"next": 1}, deadline_s=5) == {"next": 1}  # long before its minute is over


async def test_notes_that_nobody_takes_are_an_error_on_both_sides(
    spec: Callable[..., ChildSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_child(spec()) as child, child.stream("deaf", {"for_s": 60}, item_deadline_s=10) as items:
        for _ in range(limits.CHILD_NOTES):
            items.tell("more", {})
        await trio.testing.wait_all_tasks_blocked()
        items.tell("more", {})
        with pytest.raises(ChildFailed, match="have not been taken"):
            await anext(items)
    monkeypatch.setattr(limits, "CHILD_NOTES", 8)
    async with open_child(spec()) as child:
        os.kill(child.pid, signal.SIGSTOP)
        async with child.stream("deaf", {"for_s": 0}, item_deadline_s=0.3) as items:
            with pytest.raises(ChildFailed, match="does not read what it is told"):
                for _ in range(100):
                    items.tell("more", {"bytes": bytes(100_000)})
            child.kill()
        await child.wait_dead()
        items.tell("more", {})  # a dead child is told by the items, not here


async def test_kill_and_close_take_grandchildren_along(spec: Callable[..., ChildSpec]) -> None:
    for how in ("kill", "close", "die"):
        async with open_child(spec()) as child:
            answer = await child.call("grandchild", {}, deadline_s=5)
            pid = answer["pid"]
            assert isinstance(pid, int)
            assert is_running(pid)
            if how == "kill":
                child.kill()
                assert (await child.wait_dead()).code == KILLED
            elif how == "die":
                with pytest.raises(ChildFailed):
                    await child.call("die", {"signal": 9}, deadline_s=5)
        await until_gone(pid)
    assert child.failure().code in (CLOSED, DIED)


async def test_start_failures_are_told(spec: Callable[..., ChildSpec], tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match="cannot be started") as missing:
        async with open_child(spec(argv=(str(tmp_path / "missing"),))):
            pass
    assert missing.value.code == START
    with pytest.raises(ChildFailed, match=r"(?s)ended with status 1.*No module named 'no_such_thing'"):
        async with open_child(spec(argv=(sys.executable, "-c", "import no_such_thing"))):
            pass
    with pytest.raises(ChildFailed, match=r"not ready within 0\.3 s") as slow:
        async with open_child(spec(argv=(sys.executable, "-c", "import time; time.sleep(60)"), start_deadline_s=0.3)):
            pass
    assert slow.value.code == START
    with pytest.raises(ChildFailed, match="nonsense"):
        async with open_child(spec(argv=(sys.executable, "-c", "print('hello' * 100)"))):
            pass


async def test_exceptions_of_the_block_come_out_bare_and_the_child_is_gone(spec: Callable[..., ChildSpec]) -> None:
    with pytest.raises(KeyError):
        async with open_child(spec()) as child:
            raise KeyError("mine")
    assert not is_running(child.pid)
    with trio.move_on_after(0.5) as scope:
        async with open_child(spec()) as child:
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert not is_running(child.pid)


async def test_closing_is_quick(spec: Callable[..., ChildSpec]) -> None:
    async with open_child(spec()) as child:
        with trio.move_on_after(0.05):
            await child.call("hang", {}, deadline_s=600)
        start = time.monotonic()
    assert time.monotonic() - start < process_module.CLOSE_GRACE_S


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prlimit is a Linux call")
async def test_memory_limit_is_the_childs(spec: Callable[..., ChildSpec]) -> None:
    async with open_child(spec(memory_limit_bytes=256 * 1024 * 1024)) as child:
        assert (await child.call("memory", {"bytes": 10**7}, deadline_s=20))["bytes"] == 10**7
        with pytest.raises(ChildFailed, match="MemoryError"):
            await child.call("memory", {"bytes": 10**9}, deadline_s=20)


DAEMON = """
import sys, trio
from rollmesh_peer.children.process import ChildSpec, open_child
async def main():
    async with open_child(ChildSpec(name="test", argv=(sys.executable, sys.argv[1]))) as child:
        try:
            print(child.pid, flush=True)
            await trio.sleep_forever()
        except BaseException:
            with trio.CancelScope(shield=True):
                answer = await child.call("echo", {"alive": True}, deadline_s=5)
                print(answer, flush=True)
            raise
trio.run(main)
"""


@pytest.fixture
def daemon(tmp_path: Path, spec: Callable[..., ChildSpec]) -> subprocess.Popen[str]:
    script = tmp_path / "daemon.py"
    script.write_text(textwrap.dedent(DAEMON))
    argv = [sys.executable, str(script), spec().argv[1]]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_child_dies_with_a_daemon_that_was_killed(daemon: subprocess.Popen[str]) -> None:
    assert daemon.stdout is not None
    pid = int(daemon.stdout.readline())
    assert is_running(pid)
    daemon.kill()
    daemon.communicate(timeout=10)
    end = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(pid)


def test_ctrl_c_in_the_terminal_is_the_daemons_alone(daemon: subprocess.Popen[str]) -> None:
    assert daemon.stdout is not None
    pid = int(daemon.stdout.readline())
    os.killpg(daemon.pid, signal.SIGINT)
    out, err = daemon.communicate(timeout=10)
    assert "{'alive': True}" in out, err  # the child was still there to answer while the daemon closed in order
    assert not is_running(pid)
