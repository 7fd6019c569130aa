"""The plan before a download: what an engine needs, and what is free."""

from __future__ import annotations

from rollmesh_node import memory
from rollmesh_protocol import limits
from rollmesh_protocol.layout import Layout, TensorSpec


def test_a_gpu_engine_needs_no_host_memory_for_the_weights() -> None:
    layout = Layout(tensors=(TensorSpec(name="w", dtype="bf16", shape=(1024, 1024)),))
    on_cpu, on_gpu = (memory.engine_bytes(layout, on_cpu=on_cpu) for on_cpu in (True, False))
    assert on_cpu - on_gpu == 2 * limits.MIB
