"""What importing costs: no daemon, config or command line loads torch, and each starts within two seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

MAX_IMPORT_S = 2.0
"""Of computing, not on the clock: this machine may be busy with something else."""
MAX_MEMORY_MB = 150
HEAVY = {"torch", "transformers", "numba", "vllm", "matplotlib", "reasoning_gym", "tokenizers", "gguf"}
"""Each costs a daemon tens or hundreds of megabytes; they belong in child processes."""

COMMANDS = {entry.name: entry.value for entry in metadata.entry_points(group="rollmesh.commands")}
LIGHT = sorted(
    {
        "rollmesh_peer.command",
        "rollmesh_peer.config",
        "rollmesh_peer.mesh",
        "rollmesh_peer.weights",
        "rollmesh_peer.children",
        "rollmesh_node.config",
        "rollmesh_node.daemon",
        "rollmesh_node.selfcheck.check",
        "rollmesh_node.selfcheck.report",
        "rollmesh_learner.config",
        "rollmesh_learner.coordinator",
        *COMMANDS.values(),
    }
)

PROGRAM = """
import importlib, json, pathlib, re, sys, time
started = time.process_time()
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({
    "seconds": time.process_time() - started,
    "memory_mb": int(re.search(r"VmRSS:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) / 1024,
    "loaded": sorted({name.partition(".")[0] for name in sys.modules}),
}))
"""


def cost_of(*modules):
    command = [sys.executable, "-c", PROGRAM, *modules]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


@pytest.mark.parametrize("module", LIGHT)
def test_it_is_light(module):
    cost = cost_of(module)
    assert HEAVY.isdisjoint(cost["loaded"])
    assert cost["seconds"] < MAX_IMPORT_S
    assert cost["memory_mb"] < MAX_MEMORY_MB


def test_the_command_line_alone_is_feather_light():
    loaded = cost_of("rollmesh_peer.command")["loaded"]
    assert {"trio", "libp2p", "pydantic", "numpy", "rollmesh_node", "rollmesh_learner"}.isdisjoint(loaded)


def test_the_pure_part_brings_no_event_loop_network_or_torch():
    import rollmesh_protocol
    from tests.contracts.modules import modules_below

    codec = "rollmesh_protocol.patch."  # its compiler is heavy; only the weights worker may import it
    modules = [name for name in modules_below(rollmesh_protocol) if not name.startswith(codec)]
    assert len(modules) > 5
    loaded = cost_of(*modules)["loaded"]
    assert {"rollmesh_peer", "trio", "asyncio", "libp2p", "multiaddr", "sqlite3", *HEAVY}.isdisjoint(loaded)


def test_the_measure_sees_what_is_heavy():
    assert "matplotlib" in cost_of("matplotlib")["loaded"]
