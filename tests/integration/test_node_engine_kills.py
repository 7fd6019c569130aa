"""Engines that are killed at random moments, one or several of them: nothing is wrong, lost or done twice."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from pathlib import Path

import pytest
import trio

from rollmesh_node.engine.backend import GroupRequest, SampleRequest, Weights
from rollmesh_node.engine.scripted_backend import ScriptedBackend
from rollmesh_peer.testing.fake_learner import FakeLearner
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.rollout import Result
from rollmesh_protocol.status import NodeStatus
from tests.integration.nodes import PATIENCE_S, NodeProcess, is_running, open_learner, start_node, wait_for
from tests.unit.node.cards import LAYOUT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

KILLS = 20
RUNNING = re.compile(r"running, pid (\d+)")


def honest_tokens(learner: FakeLearner, lease: Lease, image: Path) -> dict[int, bytes]:
    """What the scripted engine makes of a lease, undisturbed: by sample index."""
    engine = ScriptedBackend()
    engine.load(Weights(config=json.loads(learner.card.model.config), layout=LAYOUT, image=image))
    engine.add(
        [
            GroupRequest(
                key=0,
                prompt=lease.prompt_ids,
                samples=tuple(SampleRequest(index=sample.index, seed=sample.seed) for sample in lease.samples),
                max_new_tokens=lease.max_new_tokens,
                stop=frozenset(learner.card.stop_tokens),
            )
        ]
    )
    made = {}
    while engine.in_flight:
        made |= {done.index: done.tokens.astype("<u4").tobytes() for done in engine.step()}
    return made


def check_everything(learner: FakeLearner, image: Path) -> None:
    """No wrong, lost or duplicated rollout."""
    heard = learner.heard
    returned = {lease_id for lease_id, _ in heard.returned}
    assert learner.open == set(), "leases that were neither answered nor given back"
    assert not returned & set(heard.accepted), "given back and answered, too"
    assert len(heard.accepted) == len(set(heard.accepted))
    sealed: dict[bytes, bytes] = {}
    for lease_id, envelope in heard.submitted:
        assert sealed.setdefault(lease_id, envelope) == envelope, "two answers to one lease"
    assert set(sealed) == set(heard.accepted), "a result was refused"
    for lease_id, envelope in sealed.items():
        lease = learner.leases[lease_id]
        body = Envelope.decode(envelope, limit=limits.RESULT_BYTES).open(
            run=learner.card.run, kind="result", signer=lease.node
        )
        result = Result.decode(body, limit=limits.RESULT_BYTES)
        expected = honest_tokens(learner, lease, image)
        assert {sample.index: sample.tokens for sample in result.samples} == expected


def pids_of(status: NodeStatus) -> list[int]:
    """The engines that run by the node's own word, which may be a second old."""
    return [int(pid) for pid in RUNNING.findall(status.engine) if is_running(int(pid))]


async def running(node: NodeProcess, *, engines: int) -> list[int]:
    """The pids of the node's engines, once all of them are there."""
    return pids_of(await node.until(lambda status: len(pids_of(status)) == engines))


async def kill_one(node: NodeProcess, *, engines: int, chance: random.Random) -> None:
    """Kill one of the node's engines after a random while: it is loading, generating or idle."""
    victim = chance.choice(await running(node, engines=engines))
    await trio.sleep(chance.uniform(0.0, 0.6))
    os.kill(victim, signal.SIGKILL)
    with trio.fail_after(PATIENCE_S):
        while is_running(victim):
            await trio.sleep(0.02)


@pytest.mark.parametrize("engines", [1, 2])
async def test_engines_killed_at_random_moments(tmp_path: Path, engines: int) -> None:
    chance = random.Random(engines)
    settings = (f"engine.gpus={list(range(engines))}",) if engines > 1 else ()
    image = tmp_path / "image"
    image.write_bytes(b"any")
    async with open_learner(tmp_path / "learner") as learner:
        script = {"rollout_s": 0.03}
        with start_node(tmp_path / "home", learner.mesh.addresses[0], script=script, settings=settings) as node:
            await wait_for(learner, lambda seen: len(seen.heard.accepted) >= 2)
            for _ in range(KILLS):
                before = len(learner.heard.accepted)
                await kill_one(node, engines=engines, chance=chance)
                await wait_for(learner, lambda seen, before=before: len(seen.heard.accepted) > before)
            assert sorted(await running(node, engines=engines)) == sorted(node.engine_pids())
            node.signal(signal.SIGTERM)
            assert await node.wait() == 0
            lost = [code for _, code in learner.heard.returned if code == "node.engine"]
            assert len(lost) >= KILLS // 2, "the kills hit no work"
            logs = sorted((node.folder).glob("engine*.log"))
            assert len(logs) == engines and "the engine starts" in logs[0].read_text()
        check_everything(learner, image)
