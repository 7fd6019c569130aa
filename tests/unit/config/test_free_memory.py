"""What is free: by the machine and by the container, whichever has fewer."""

from __future__ import annotations

from rollmesh_peer import free_memory
from rollmesh_protocol import limits


def test_the_container_counts_as_well_as_the_machine(tmp_path, monkeypatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:   64 kB\n")
    monkeypatch.setattr(free_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "_CGROUP", tmp_path)
    assert free_memory.free_bytes() == 64 * limits.KIB
    (tmp_path / "memory.max").write_text("50000\n")
    (tmp_path / "memory.current").write_text("40000\n")
    assert free_memory.free_bytes() == 10_000
    (tmp_path / "memory.stat").write_text("anon 30000\ninactive_file 5000\nactive_file 5000\n")
    assert free_memory.free_bytes() == 15_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory.free_bytes() == 64 * limits.KIB
    (tmp_path / "meminfo").unlink()
    assert free_memory.free_bytes() is None
