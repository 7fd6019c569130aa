"""What importing costs: no daemon, config or command line loads torch, and none costs much more than libp2p alone."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

MOST_LIBP2P = 3.0
"""Computing time, as a multiple of what libp2p alone takes on this machine just now (a daemon has 2)."""
MAX_MODULES = 1800
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
    "modules": len(sys.modules),
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
    assert cost["modules"] < MAX_MODULES
    assert cost["memory_mb"] < MAX_MEMORY_MB


@pytest.mark.parametrize("daemon", ["rollmesh_learner.coordinator", "rollmesh_node.daemon"])
def test_a_daemon_starts_not_much_later_than_libp2p(daemon):
    """In one run, the least of three each: a machine that is busy with something else slows both down."""
    yardstick, cost = (min(cost_of(name)["seconds"] for _ in range(3)) for name in ("libp2p.abc", daemon))
    assert cost < MOST_LIBP2P * yardstick


def test_the_command_line_alone_is_feather_light():
    loaded = cost_of("rollmesh_peer.command")["loaded"]
    assert {"trio", "libp2p", "pydantic", "numpy", "rollmesh_node", "rollmesh_learner"}.isdisjoint(loaded)


def test_the_pure_part_brings_no_event_loop_network_or_torch():
    import rollmesh_protocol
    from tests.contracts.modules import modules_below

    compiled = ("rollmesh_protocol.patch.", "rollmesh_protocol.compiled")  # heavy; only child processes import them
    modules = [name for name in modules_below(rollmesh_protocol) if not name.startswith(compiled)]
    assert len(modules) > 5
    loaded = cost_of(*modules)["loaded"]
    assert {"rollmesh_peer", "trio", "asyncio", "libp2p", "multiaddr", "sqlite3", *HEAVY}.isdisjoint(loaded)


def test_the_measure_sees_what_is_heavy():
    assert "matplotlib" in cost_of("matplotlib")["loaded"]
