"""What the node daemon costs while it idles: import time, memory, and no torch."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

from tests.integration.nodes import start_node

pytestmark = pytest.mark.timeout(300)

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWSyk9G7d4Ay8rE64h4nKeVMQHQbcA97hchmuMmXruPXT4"
MOST_BYTES = 150 * 10**6
MOST_IMPORT_S = 2.0

PROBE = """
import sys, time
started = time.process_time()
import rollmesh_node.daemon
took = time.process_time() - started
heavy = {"torch", "transformers", "safetensors", "vllm", "reasoning_gym"} & set(sys.modules)
print(took, *sorted(heavy))
"""


def test_importing_the_daemon_is_quick_and_loads_no_torch() -> None:
    best = 1e9
    for _ in range(3):
        words = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=True, text=True).stdout.split()
        assert words[1:] == []
        best = min(best, float(words[0]))
    assert best < MOST_IMPORT_S


async def test_an_idle_daemon_is_small(tmp_path: Path) -> None:
    with start_node(tmp_path / "home", NOBODY) as node:
        await node.until(lambda status: status.waiting_for != "")
        await trio.sleep(1)
        lines = Path(f"/proc/{node.process.pid}/status").read_text().splitlines()
        resident = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
        assert resident < MOST_BYTES, f"{resident / 1e6:.0f} MB"
        assert time.monotonic()
