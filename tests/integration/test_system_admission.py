"""Who may join, over the wire: listed nodes, invited nodes, and a run that is full. Real learner, real nodes.

Nodes that are to be let in are seeds here, which need no engine: admission does not look at what a node does.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import trio

from rollmesh_peer.keys import create_key, load_key
from rollmesh_peer.mesh.join import JoinLine
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.messages import Invite, Pass
from tests.support.attacker import Attacker, open_attacker
from tests.support.system import Daemon, System, open_system

pytestmark = pytest.mark.timeout(400)
SEED = "node.role=seed"


async def told_no(attacker: Attacker, **hello: object) -> Refused:
    with pytest.raises(Refused) as refused:
        await attacker.hello(**hello)
    return refused.value


async def seed_node(system: System, name: str, *, line: str = "", start: bool = True) -> Daemon:
    """A node process that joins over ``line``, by default the line that the learner prints."""
    node = await system.add_node(name, SEED, start=False)
    if line:
        node.command[node.command.index("--join") + 1] = line
    if start:
        node.start()
    return node


# --- a list, and its length ------------------------------------------------------------------------------------------
async def test_a_list_lets_in_whom_it_names_and_a_full_run_nobody(tmp_path: Path) -> None:
    listed, second = Identity(secrets.token_bytes(32)), tmp_path / "second" / "node" / "key"
    create_key(second)
    allow = f'["{listed.peer}", "{load_key(second).peer}"]'
    settings = ("admission.mode=allowlist", f"admission.allow={allow}", "network.max_nodes=1")
    with open_system(tmp_path, *settings, steps=1000) as system:
        join = await system.join_line()
        stranger = await seed_node(system, "stranger")
        assert await stranger.wait() == 1
        assert "(node.allowlist)" in stranger.log and "Traceback" not in stranger.log
        assert "this run takes listed nodes only" in stranger.log and "rollmesh node id" in stranger.log

        async with open_attacker(join, hello=False) as one:
            assert (await told_no(one)).code == "node.allowlist"
            assert one.peer in (await told_no(one)).detail, "the sentence names whom the operator must list"

        async with open_attacker(join, identity=listed) as first, trio.open_nursery() as nursery:
            nursery.start_soon(_live, first)
            waiting = await seed_node(system, "second")
            await waiting.until_logged("code=run.full")
            assert waiting.is_alive, "a full run is waited for"
            await first.hello()  # who is in may introduce itself again
            nursery.cancel_scope.cancel()
        await waiting.until_logged("joined")
        async with open_attacker(join, identity=listed, hello=False) as late:
            assert (await told_no(late)).code == "run.full"
        assert system.learner.is_alive and "Traceback" not in system.learner.log


async def _live(member: Attacker) -> None:
    """Signs of life: whoever is silent for long loses its place."""
    while True:
        await member.request_work(0)
        await trio.sleep(3)


# --- invitations -----------------------------------------------------------------------------------------------------
def invited(system: System, address: str) -> str:
    """The line that ``rollmesh learner invite`` prints, while the learner runs."""
    done = subprocess.run(
        [sys.executable, "-m", "rollmesh_peer.command", "learner", "invite", str(system.folder / "run.toml"), address],
        capture_output=True, text=True, timeout=100, check=True, env={**os.environ, **system.learner.environ},
    )  # fmt: skip
    return done.stdout.strip()


async def test_an_invitation_lets_one_node_in_and_in_again(tmp_path: Path) -> None:
    with open_system(tmp_path, "admission.mode=invite", steps=1000) as system:
        address = await system.join_line()
        line = await trio.to_thread.run_sync(invited, system, address)
        assert line.startswith(address + ",invite:")

        guest = await seed_node(system, "guest", line=line)
        await guest.until_logged("joined")
        bare = await seed_node(system, "bare")
        assert await bare.wait() == 1
        assert "(node.invite)" in bare.log and "the join line has no invitation" in bare.log
        assert "ask the operator for a new join line" in bare.log and "Traceback" not in bare.log

        guest.kill()
        await guest.wait()
        guest.start()
        await guest.until_logged("joined", times=2)
        async with open_attacker(line, hello=False) as second:
            refused = await told_no(second)
            assert refused.code == "node.invite" and "used by another node already" in refused.detail

        await _forged(system, address)
        await _one_invitation_at_the_same_moment(await trio.to_thread.run_sync(invited, system, address))

        system.learner.kill()
        await system.learner.wait()
        system.learner.start()
        await guest.until_logged("linked to the learner", times=3)
        async with open_attacker(line, hello=False) as second:
            refused = await told_no(second)
            assert refused.code == "node.invite", "an invitation stays used when the learner starts again"
        await system.until_run(lambda run: any(peer.name == "guest" and peer.connected for peer in run.peers))
        assert "Traceback" not in system.learner.log


async def _forged(system: System, address: str) -> None:
    """Signed by somebody else, for another run, as something else, or not an envelope at all."""
    learner = load_key(system.run_folder / "learner.key")
    run = (system.run_folder / "run.id").read_text()
    body = Invite(token=secrets.token_bytes(16)).encode()
    async with open_attacker(address, hello=False) as forger:
        other_pass = Pass(peer=forger.peer, issued_version=0).encode()
        for what, invite in {
            "another key": seal(body, run=run, kind="invite", identity=forger.identity).encode(),
            "another run": seal(body, run="another", kind="invite", identity=learner).encode(),
            "another kind": seal(other_pass, run=run, kind="pass", identity=learner).encode(),
            "another body": seal(other_pass, run=run, kind="invite", identity=learner).encode(),
            "noise": secrets.token_bytes(200),
            "nothing": b"",
        }.items():
            refused = await told_no(forger, invite=invite)
            assert refused.code == "node.invite", what
            assert "the invitation is not good" in refused.detail, what


async def _one_invitation_at_the_same_moment(line: str) -> None:
    """Eight nodes say hello with one fresh invitation at once: one is let in."""
    codes: Counter[str] = Counter()
    ready, go = [], trio.Event()

    async def join() -> None:
        async with open_attacker(line, hello=False) as one:
            ready.append(one)
            await go.wait()
            try:
                await one.hello()
                codes["let in"] += 1
            except Refused as refused:
                codes[refused.code] += 1

    assert JoinLine.parse(line).invite is not None
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(join)
        while len(ready) < 8:
            await trio.sleep(0.01)
        go.set()
    assert codes == {"let in": 1, "node.invite": 7}
