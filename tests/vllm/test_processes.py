"""vLLM's own processes: they are in the child's process group, they print nothing on its pipe, and none outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollmesh_node.engine.backend import Weights
from rollmesh_node.engine.vllm_backend import VllmBackend
from tests.vllm.needs import NEEDS_VLLM
from tests.vllm.test_types import Tiny, groups

pytestmark = [NEEDS_VLLM, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def run(folder: str) -> None:
    """Be an engine child with a model loaded: take the pipe away from descriptor 1, say so there, then wait."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    tiny = Tiny(Path(folder), "llama")
    backend = VllmBackend(threads=1, max_rows=4, device="cpu", cache_bytes=64 << 20, enforce_eager=True)
    backend.load(Weights(config=tiny.config, layout=tiny.layout, image=tiny.images[0]))
    backend.add(groups(lengths=[10], samples=4, most=900))
    os.write(pipe, b"ready\n")
    signal.pause()


@pytest.fixture
def child(tmp_path):
    code = f"from tests.vllm.test_processes import run\nif __name__ == '__main__':\n    run({str(tmp_path)!r})\n"
    script = tmp_path / "child.py"
    script.write_text(code)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH")))),
    }
    started = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, start_new_session=True, env=environment
    )
    assert started.stdout is not None
    assert started.stdout.readline() == b"ready\n", "nothing but our own word came down the pipe"
    yield started
    if started.poll() is None:
        os.killpg(started.pid, signal.SIGKILL)
    started.stdout.close()
    started.wait()


def test_the_processes_are_in_the_group_and_end_with_a_child_that_is_killed_alone(child):
    below = psutil.Process(child.pid).children(recursive=True)
    assert len(below) >= 2, "the scheduler and a worker"
    assert {os.getpgid(process.pid) for process in below} == {child.pid}
    child.kill()
    child.wait()
    started = time.monotonic()
    gone, left = psutil.wait_procs(below, timeout=60)
    print(f"\n{len(gone)} processes ended {time.monotonic() - started:.2f} s after their child")
    assert left == []
    assert child.stdout.read() == b""
