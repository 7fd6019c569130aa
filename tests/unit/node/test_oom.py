"""Out of memory: recognised by the kernel's counters or by the words, and answered with fewer rows."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rollmesh_node.oom import RESTORE_S, RowBudget, Watch, is_out_of_memory, kernel_kills


@pytest.mark.parametrize(
    ("words", "is_oom"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...", True),
        ("RuntimeError: CUDA error: out of memory", True),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate", True),
        ("ValueError: No available memory for the cache blocks. Try increasing gpu_memory_utilization", True),
        ("OSError: [Errno 12] Cannot allocate memory", True),
        ("the engine process (pid 4) was killed (out of memory?)", False),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("the engine process (pid 4) hung: no progress for 120 s", False),
    ],
)
def test_words(words: str, is_oom: bool) -> None:
    assert is_out_of_memory(words) is is_oom


def test_the_kernels_counters(tmp_path: Path) -> None:
    events, vmstat = tmp_path / "memory.events", tmp_path / "vmstat"
    assert kernel_kills((events, vmstat)) == {}
    events.write_text("low 0\noom 4\noom_kill 3\noom_group_kill 1\n")
    vmstat.write_text("nr_free_pages 1\noom_kill 7\n")
    assert kernel_kills((events, vmstat)) == {str(events): 3, str(vmstat): 7}


def test_a_kill_is_out_of_memory_only_where_the_kernel_says_so() -> None:
    watch = Watch(kills={"a": 3, "b": 7})
    watch.look(os.getpid())
    assert watch.resident_bytes > 1 << 20
    killed = -int(signal.SIGKILL)
    words = watch.verdict(returncode=killed, words="was killed (out of memory?)", kills={"a": 3, "b": 8})
    assert words.startswith("out of memory: the kernel killed the engine; when last seen it held ")
    assert words.endswith("were free")
    assert watch.verdict(returncode=killed, words="was killed (out of memory?)", kills={"a": 3, "b": 7}) == ""
    assert watch.verdict(returncode=killed, words="was killed", kills={"new": 5}) == ""
    assert watch.verdict(returncode=1, words="ended with status 1", kills={"a": 4}) == ""
    assert watch.verdict(returncode=1, words="CUDA out of memory", kills={}) == "out of memory"
    last = watch.resident_bytes
    watch.look(2**22 + 1)  # no such process: the last look stays
    assert watch.resident_bytes == last


def test_rows_are_halved_and_come_back_slowly() -> None:
    budget = RowBudget(48)
    assert budget.rows(1e6) == 48
    now = 1e6
    assert [budget.ran_out(now + second) for second in range(7)] == [24, 12, 6, 3, 1, 1, 1]
    now += 6
    assert budget.rows(now + RESTORE_S - 1) == 1
    assert [budget.rows(now + times * RESTORE_S) for times in range(1, 8)] == [2, 4, 8, 16, 32, 48, 48]
    assert budget.ran_out(now + 3.5 * RESTORE_S) == 4
    assert budget.rows(now + 1e12) == 48
