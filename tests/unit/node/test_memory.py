"""The plan before a download: what an engine needs, and what is free."""

from __future__ import annotations

from rollmesh_node import memory
from rollmesh_protocol import limits
from rollmesh_protocol.layout import Layout, TensorSpec


def test_a_gpu_engine_needs_no_host_memory_for_the_weights() -> None:
    layout = Layout(tensors=(TensorSpec(name="w", dtype="bf16", shape=(1024, 1024)),))
    on_cpu, on_gpu = (memory.engine_bytes(layout, on_cpu=on_cpu) for on_cpu in (True, False))
    assert on_cpu - on_gpu == 2 * limits.MIB


def test_the_container_counts_as_well_as_the_machine(tmp_path, monkeypatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:   64 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.free_bytes() == 64 * limits.KIB
    (tmp_path / "memory.max").write_text("50000\n")
    (tmp_path / "memory.current").write_text("40000\n")
    assert memory.free_bytes() == 10_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes() == 64 * limits.KIB
    (tmp_path / "meminfo").unlink()
    assert memory.free_bytes() is None
