"""A hostile learner: whatever it asks, the node refuses in words, generates nothing for it, and stays within bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh_node.introduction import CARD, run_place
from rollmesh_node.joining import read_card
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.layout import Layout, TensorSpec
from rollmesh_protocol.messages import Standing, Wait
from rollmesh_protocol.verdicts.drift import DriftTest
from rollmesh_protocol.verdicts.judging import Judging
from tests.integration.nodes import open_learner, start_node, wait_for
from tests.unit.node.cards import LEARNER, RUN, STRANGER, make_card

pytestmark = pytest.mark.timeout(300)

REMOTE_CODE = json.dumps({"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "evil.Model"}}).encode()
HUGE = Layout(tensors=tuple(TensorSpec(name=f"w{i}", dtype="f32", shape=(1 << 16, 1 << 14)) for i in range(64)))


@pytest.mark.parametrize(
    ("card", "code", "words"),
    [
        (make_card(prompt_tokens=32_768), "card.limits", "32,768 tokens in a prompt; this node takes 1,000"),
        (make_card(new_tokens=2_000), "card.limits", "limits.completion_tokens"),
        (make_card(layout=HUGE), "card.limits", "256.00 GiB of weights to download; this node takes 100.00 GiB"),
        (make_card(config=REMOTE_CODE), "card.model", "auto_map"),
        (make_card(config=b"not json"), "card.model", "not JSON"),
    ],
    ids=["prompt", "completion", "size", "remote code", "no config"],
)
async def test_a_card_that_asks_too_much_is_refused_before_anything_is_fetched(tmp_path, card, code, words) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        sealed = seal(card.encode(), run=card.run, kind="card", identity=LEARNER).encode()
        learner.script.card_bytes = sealed
        settings = ("limits.prompt_tokens=1000", "limits.completion_tokens=1000")
        with start_node(tmp_path / "home", learner.mesh.addresses[0], settings=settings) as node:
            assert await node.wait() == 1
            assert words in node.log and f"({code})" in node.log
            assert "Traceback" not in node.log
            assert learner.heard.requests == [] and not list((tmp_path / "home").glob("node/runs/*/edges"))


async def test_a_card_that_somebody_else_signed_is_refused(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        card = make_card()
        learner.script.card_bytes = seal(card.encode(), run=RUN, kind="card", identity=STRANGER).encode()
        with start_node(tmp_path / "home", learner.mesh.addresses[0]) as node:
            assert await node.wait() == 1
            assert "(envelope.key)" in node.log and "Traceback" not in node.log


async def test_a_run_never_changes_its_card_not_even_over_a_restart(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        with start_node(tmp_path / "home", learner.mesh.addresses[0]) as node:
            await wait_for(learner, lambda seen: seen.heard.accepted)
        other = make_card(new_tokens=31)
        learner.script.card_bytes = seal(other.encode(), run=RUN, kind="card", identity=LEARNER).encode()
        with start_node(tmp_path / "home", learner.mesh.addresses[0]) as node:
            assert await node.wait() == 1
            assert "another card for the run" in node.log


async def test_a_learner_that_was_calibrated_is_followed_over_a_restart(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        with start_node(tmp_path / "home", learner.mesh.addresses[0]):
            await wait_for(learner, lambda seen: seen.heard.accepted)
        card = make_card(checks=Judging(drift=DriftTest(clip=0.3, reference=0.005, exponent=4.0)).as_checks)
        learner.script.card_bytes = seal(card.encode(), run=RUN, kind="card", identity=LEARNER).encode()
        before = len(learner.heard.accepted)
        with start_node(tmp_path / "home", learner.mesh.addresses[0]) as node:
            place = run_place(node.folder, learner=LEARNER.peer, run=RUN) / CARD
            # What lay in the spool may be accepted before the new card is written down.
            await wait_for(learner, lambda seen: len(seen.heard.accepted) > before and read_card(place) == card)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ({"lease_signer": STRANGER}, "envelope.key"),
        ({"alter_lease": lambda lease: lease.model_copy(update={"node": STRANGER.peer})}, "lease.other_node"),
        ({"prompt": b"\5\0\0\0" * 32_768}, "lease.limits"),
        ({"max_new_tokens": 32_768}, "lease.limits"),
        ({"samples": 256}, "lease.limits"),
        ({"alter_lease": lambda lease: lease.model_copy(update={"duration_s": 1e12})}, "request.invalid"),
        ({"duration_s": 1e-9}, "lease.limits"),
    ],
    ids=["forged", "another node's", "huge prompt", "endless completion", "too many samples", "no end", "no time"],
)
async def test_leases_that_are_not_obeyed(tmp_path, script, code) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        learner.script = replace(learner.script, **script)
        with start_node(tmp_path / "home", learner.mesh.addresses[0]) as node:
            await node.until_logged(f"code={code}", times=3)
            asked = len([request for request in learner.heard.requests if request.groups])
            assert learner.heard.submitted == [] and asked < 30
            learner.script = replace(
                learner.script, lease_signer=None, alter_lease=lambda lease: lease, prompt=b"\5\0\0\0",
                max_new_tokens=8, samples=4, duration_s=60.0,
            )  # fmt: skip
            await wait_for(learner, lambda seen: seen.heard.accepted)  # an honest learner is served again


async def test_a_quarantined_node_generates_nothing_and_says_why(tmp_path: Path) -> None:
    async with open_learner(tmp_path / "learner") as learner:
        with start_node(tmp_path / "home", learner.mesh.addresses[0]) as node:
            await wait_for(learner, lambda seen: seen.heard.accepted)
            learner.script.standing = Standing(
                state="quarantined", accepted=1, rejected=1, audited=1, reason="result.sampling"
            )
            learner.script.wait = Wait(seconds=0.1, why="no")
            status = await node.until(lambda status: "out of the run (result.sampling)" in status.waiting_for)
            assert status.standing is not None and status.standing.state == "quarantined"
            assert node.process.poll() is None
