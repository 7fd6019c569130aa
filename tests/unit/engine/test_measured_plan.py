"""The memory plan in the engine's process: measured, bounded by the owner, and made before anything is loaded."""

from __future__ import annotations

import json

import pytest

from rollmesh_node.engine import measured_plan
from rollmesh_node.engine.host import Host
from rollmesh_node.engine.measured_plan import plan_here
from rollmesh_node.gpus import Gpu
from rollmesh_peer.models.loader import layout_of_config
from rollmesh_protocol.errors import HostError, Refused
from rollmesh_protocol.layout import Layout, TensorSpec
from rollmesh_protocol.limits import GIB

CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 16,
    "num_key_value_heads": 4, "vocab_size": 32_000,
}  # fmt: skip
LAYOUT = Layout(tensors=(TensorSpec(name="w", dtype="bf16", shape=(1024, 1024, 512)),))  # 1 GiB


def test_rows_follow_what_is_free_and_what_the_owner_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_plan, "free_bytes", lambda: 8 * GIB)
    body = {"device": "cpu", "max_rows": 64, "columns": 4096}
    full = plan_here(body, config=CONFIG, layout=LAYOUT)
    assert full is not None and full.rows == 64
    less = plan_here(body | {"memory_gb": 2.0}, config=CONFIG, layout=LAYOUT)
    assert less is not None and 1 <= less.rows < 64 and less.free_bytes == 2 * GIB
    with pytest.raises(HostError, match=r"1\.0 GB for the weights .* 1\.2 GB are free for it on cpu"):
        plan_here(body | {"memory_gb": 1.2}, config=CONFIG, layout=LAYOUT)
    assert plan_here(body, config={"model_type": "odd"}, layout=LAYOUT) is None


def test_the_gpu_with_the_least_counts_where_several_share_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu(index: int, free_gb: int) -> Gpu:
        return Gpu(index=index, uuid="", name="x", memory_bytes=24 * GIB, free_bytes=free_gb * GIB, capability=(9, 0))

    monkeypatch.setattr(measured_plan, "find_gpus", lambda: (gpu(0, 1), gpu(1, 20), gpu(2, 6)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    body = {"device": "cuda", "gpus": [1, 2], "memory_share": 0.5}
    plan = plan_here(body, config=CONFIG, layout=LAYOUT)
    assert plan is not None and plan.free_bytes == 6 * GIB
    one = plan_here(body | {"gpus": [1]}, config=CONFIG, layout=LAYOUT)
    assert one is not None and one.free_bytes == 12 * GIB  # the owner's share of 24


def test_the_host_refuses_before_it_makes_a_backend() -> None:
    host = Host(backend="transformers", script={})
    config = CONFIG | {"intermediate_size": 2048, "max_position_embeddings": 512}
    layout = layout_of_config(config)
    body = {"config_json": json.dumps(config), "layout": layout.encode(), "image": "/nowhere", "device": "cpu"}
    with pytest.raises(Refused, match="other tensors than the layout"):
        host.load(body | {"layout": LAYOUT.encode()})
    with pytest.raises(HostError, match="out of memory: the engine needs"):
        host.load(body | {"memory_gb": 0.5})
    assert host.stats({}) == {}
