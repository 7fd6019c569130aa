"""What goes wrong around a node, and what it makes of it: engine, learner, key, join line."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.integration.nodes import LEARNER, is_running, open_learner, start_node, wait_for
from tests.unit.node.cards import make_card

pytestmark = pytest.mark.timeout(300)

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWSyk9G7d4Ay8rE64h4nKeVMQHQbcA97hchmuMmXruPXT4"


async def test_a_killed_engine_gives_its_leases_back_and_comes_again(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        with start_node(tmp_path / "home", learner.mesh.addresses[0], script={"rollout_s": 0.3}) as node:
            await wait_for(learner, lambda seen: seen.heard.accepted and len(seen.open) >= 2)
            (engine,) = node.engine_pids()
            os.kill(engine, signal.SIGKILL)
            await wait_for(learner, lambda seen: any(code == "node.engine" for _, code in seen.heard.returned))
            before = len(learner.heard.accepted)
            await wait_for(learner, lambda seen: len(seen.heard.accepted) > before + 1)
            assert not is_running(engine) and len(node.engine_pids()) == 1
            assert node.process.poll() is None


async def test_an_engine_that_fails_at_its_work_is_started_again(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        with start_node(tmp_path / "home", learner.mesh.addresses[0], script={"fail_after": 10}) as node:
            await wait_for(learner, lambda seen: len(seen.heard.accepted) >= 4)
            await wait_for(learner, lambda seen: any(code == "node.engine" for _, code in seen.heard.returned))
            assert "the scripted engine fails here" in node.log


async def test_results_that_would_be_refused_are_not_sent(tmp_path: Path) -> None:
    card = make_card(vocabulary=20)  # the scripted engine writes tokens up to 100
    async with open_learner(tmp_path / "learner", card=card) as learner:
        learner.script.max_new_tokens = 32
        with start_node(tmp_path / "home", learner.mesh.addresses[0]) as node:
            await wait_for(learner, lambda seen: len(seen.heard.returned) >= 8)
            await node.until_logged("code=result.tokens")
            assert {code for _, code in learner.heard.returned} == {"node.engine"}
            assert learner.heard.submitted == []
            await node.until(lambda status: status.uptime_s > 8)
            assert len([request for request in learner.heard.requests if request.groups]) < 40


async def test_a_node_outlives_its_learner_and_says_what_it_waits_for(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as first:
        learner = await first.enter_async_context(open_learner(tmp_path / "learner"))
        address = learner.mesh.addresses[0]
        port = int(address.split("/")[4])
        with start_node(tmp_path / "home", address, script={"rollout_s": 0.05}) as node:
            await wait_for(learner, lambda seen: len(seen.heard.accepted) >= 2)
            await first.aclose()
            status = await node.until(lambda status: not status.learner_connected and status.waiting_for)
            assert "learner" in status.waiting_for
            async with open_learner(tmp_path / "again", port=port, identity=LEARNER) as back:
                await wait_for(back, lambda seen: seen.heard.hellos and len(seen.heard.accepted) >= 2)
                await node.until(lambda status: status.learner_connected)


async def test_a_second_daemon_with_the_same_key_says_so(tmp_path: Path) -> None:
    with start_node(tmp_path / "home", NOBODY) as first:
        await first.status()
        with start_node(tmp_path / "home", NOBODY) as second:
            assert await second.wait() == 1
            assert "another rollmesh daemon already uses this key" in second.log
            assert second.log.count("\n") == 1
        assert first.process.poll() is None


async def test_garbage_for_a_join_line_is_one_sentence(tmp_path: Path) -> None:
    for line in ("garbage", "/ip4/1.2.3.4/tcp/99999/p2p/x", "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWshort", "\x1b[2J" * 50):
        with start_node(tmp_path / "home", line) as node:
            assert await node.wait() == 2
            assert node.log.startswith("rollmesh: ") and "Traceback" not in node.log
            assert "\x1b" not in node.log


async def test_a_busy_port_is_one_sentence(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        address = learner.mesh.addresses[0].partition("/p2p/")[0]
        settings = (f'network.listen=["{address}"]',)
        with start_node(tmp_path / "home", learner.mesh.addresses[0], settings=settings) as node:
            assert await node.wait() == 1
            assert "Traceback" not in node.log and "use" in node.log


async def test_status_on_this_machine_and_from_outside(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        with start_node(tmp_path / "home", learner.mesh.addresses[0]) as node:
            await node.until(lambda status: status.accepted > 0)
            home = {**os.environ, "ROLLMESH_HOME": str(tmp_path / "home")}
            local = await _status(home)
            assert local.returncode == 0 and "connected" in local.stdout and "accepted" in local.stdout
            remote = await _status(home, "--join", learner.mesh.addresses[0], "--json")
            assert remote.returncode == 0 and '"name": "test"' in remote.stdout
    nobody = await _status({**os.environ, "ROLLMESH_HOME": str(tmp_path / "empty")})
    assert nobody.returncode == 1 and "no rollmesh node or learner" in nobody.stderr
    gone = await _status(home, "--join", NOBODY)
    assert gone.returncode == 1 and "does not answer" in gone.stderr and "Traceback" not in gone.stderr


async def test_watching_goes_on_until_ctrl_c(tmp_path: Path) -> None:
    with start_node(tmp_path / "home", NOBODY) as node:
        await node.status()
        environ = {**os.environ, "ROLLMESH_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "rollmesh_peer.command", "status", "--watch", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as watching:  # noqa: ASYNC220
            assert watching.stdout is not None
            read_line = partial(trio.to_thread.run_sync, watching.stdout.readline)
            with trio.fail_after(30):
                while "does not answer" not in json.loads(await read_line())["node"]["waiting_for"]:
                    pass  # until the node has tried
                await read_line()
            node.process.kill()
            with trio.fail_after(30):
                while b'"error"' not in await read_line():
                    pass  # it goes on asking, and says that nobody answers
            watching.send_signal(signal.SIGINT)
            assert await trio.to_thread.run_sync(watching.wait) == 0


async def test_watching_ends_without_a_word_when_nobody_reads(tmp_path: Path) -> None:
    with start_node(tmp_path / "home", NOBODY) as node:
        await node.status()
        environ = {**os.environ, "ROLLMESH_HOME": str(tmp_path / "home")}
        watch = f"{shlex.quote(sys.executable)} -m rollmesh_peer.command status --watch --json"
        with trio.fail_after(30):
            done = await trio.run_process(
                ["bash", "-c", f"{watch} | head -n 1; exit $PIPESTATUS"], env=environ, capture_stderr=True, check=False
            )
    assert done.returncode == 141 and done.stderr == b"", done.stderr.decode()


async def _status(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    with trio.fail_after(60):
        done = await trio.run_process(
            [sys.executable, "-m", "rollmesh_peer.command", "status", *words],
            capture_stdout=True, capture_stderr=True, check=False, env=environ,
        )  # fmt: skip
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
