"""A node whose engine is fed without a pause while the weights change ten times: every token has the right weights."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from rollmesh_node.engine.backend import GroupRequest, SampleRequest, Weights
from rollmesh_node.engine.scripted_backend import Script, ScriptedBackend
from rollmesh_peer.testing.fake_learner import FakeLearner
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.rollout import Result, SampleResult
from tests.integration.nodes import image_of, open_learner, start_node, wait_for
from tests.unit.node.cards import LAYOUT, make_card

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHANGES = 10
SCRIPT = {"stop_chance": 0.003, "heeds_weights": True}
PACE = {"token_s": 0.001}
NEW_TOKENS = 400
SAMPLES = 2


@dataclass
class Judge:
    """Draws again what a node has sent, under the weights that it names."""

    folder: Path
    config: dict[str, object]
    engines: dict[bytes, ScriptedBackend] = field(default_factory=dict)

    def know(self, root: bytes, image: bytes) -> None:
        path = self.folder / root.hex()
        path.write_bytes(image)
        engine = self.engines[root] = ScriptedBackend(Script(**SCRIPT))  # type: ignore[arg-type]
        engine.load(Weights(config=self.config, layout=LAYOUT, image=path))

    def redraw(self, lease: Lease, sample: SampleResult, stop: frozenset[int]) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of a sample, each segment drawn under its own root behind the tokens before it."""
        seed = next(one.seed for one in lease.samples if one.index == sample.index)
        sent = np.frombuffer(sample.tokens, "<u4")
        tokens, logprobs = [], []
        ends = [*(segment.first_token for segment in sample.segments[1:]), len(sent)]
        for segment, end in zip(sample.segments, ends, strict=True):
            engine = self.engines[segment.root]
            begun = SampleRequest(index=0, seed=seed, begun=sent[: segment.first_token])
            engine.add(
                [
                    GroupRequest(
                        key=0, prompt=lease.prompt_ids, samples=(begun,), max_new_tokens=lease.max_new_tokens, stop=stop
                    )
                ]
            )
            (rollout,) = engine.step()
            count = end - segment.first_token
            tokens += rollout.tokens[:count].tolist()
            logprobs += rollout.logprobs[:count].tolist()
        return tokens, logprobs


def results_of(learner: FakeLearner) -> dict[bytes, Result]:
    return {
        lease_id: Result.decode(Envelope.decode(raw, limit=limits.RESULT_BYTES).body, limit=limits.RESULT_BYTES)
        for lease_id, raw in learner.heard.submitted
    }


def uses(result: Result, root: bytes) -> bool:
    return any(segment.root == root for sample in result.samples for segment in sample.segments)


@pytest.mark.parametrize("modes", [("drain",), ("recompute",), ("drain", "recompute")])
async def test_ten_changes_of_weights_lose_nothing_and_mislabel_nothing(tmp_path: Path, modes: tuple[str, ...]) -> None:
    card = make_card(new_tokens=NEW_TOKENS, swap_modes=("drain", "recompute"))
    judge = Judge(tmp_path, {"vocab_size": 100})
    async with open_learner(tmp_path / "learner", card=card) as learner:
        learner.script.max_new_tokens, learner.script.samples = NEW_TOKENS, SAMPLES
        learner.script.alter_lease = lambda lease: lease.model_copy(
            update={"swap_mode": modes[lease.group % len(modes)]}
        )
        judge.know(learner.head.root, image_of(1))
        with start_node(tmp_path / "home", learner.mesh.addresses[0], script=SCRIPT | PACE) as node:
            for version in range(2, CHANGES + 2):
                root = learner.head.root
                await wait_for(learner, lambda seen, root=root: any(uses(r, root) for r in results_of(seen).values()))
                await learner.publish(image_of(version))
                judge.know(learner.head.root, image_of(version))
            await wait_for(learner, lambda seen: any(uses(r, seen.head.root) for r in results_of(seen).values()))
            status = await node.until(lambda status: status.tokens_per_s > 0)
            assert status.version_held == CHANGES + 1
            node.signal(signal.SIGTERM)
            assert await node.wait() == 0
            assert "Traceback" not in node.log
        results = results_of(learner)
        assert len(learner.heard.submitted) == len(results)
        returned = [lease_id for lease_id, _ in learner.heard.returned]
        assert len(set(returned)) == len(returned)
        assert results.keys() | set(returned) == learner.leases.keys() and not results.keys() & set(returned)
        assert {code for _, code in learner.heard.returned} <= {"node.weights", "node.stopping"}
        longest = 0
        for lease_id, result in results.items():
            lease = learner.leases[lease_id]
            for sample in result.samples:
                tokens, logprobs = judge.redraw(lease, sample, frozenset(card.stop_tokens))
                assert tokens == np.frombuffer(sample.tokens, "<u4").tolist()
                assert logprobs == np.frombuffer(sample.logprobs, "<f4").tolist()
                starts = [segment.first_token for segment in sample.segments]
                assert all(start % limits.SEGMENT_TOKENS == 0 for start in starts)
                if lease.swap_mode == "drain":
                    assert [segment.root for segment in sample.segments] == [lease.root]
                longest = max(longest, len(starts))
        assert (longest > 1) == (modes == ("recompute",)) or len(modes) > 1
