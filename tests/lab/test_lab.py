"""The lab itself: its links are what they say, a small broadcast arrives, and nothing is left of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import network
from tests.lab.bounds import least_seconds, least_seconds_alone
from tests.lab.network import Link, open_network
from tests.lab.scenario import Scenario, run_scenario

REASON = network.why_not()
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=f"no network lab here: {REASON}")

TAKE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 5000)); print("up", flush=True)
stream = listener.accept()[0]; total, began = 0, None
while piece := stream.recv(1 << 16):
    began = began or time.monotonic(); total += len(piece)
print(total * 8 / (time.monotonic() - began))
"""
GIVE = """
import socket, sys, time
began = time.monotonic(); stream = socket.create_connection((sys.argv[1], 5000), timeout=3)
print(time.monotonic() - began, flush=True)
for _ in range(int(sys.argv[2]) >> 16): stream.sendall(bytes(1 << 16))
"""


def inside(lab, host: int, program: str, *arguments: object) -> subprocess.Popen:
    command = ["ip", "netns", "exec", lab.namespace(host), sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ours() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"{network.PREFIX}-{os.getpid()}-")]


def test_the_bound_is_the_tightest_of_three():
    source = Link(up=60.0, down=60.0)
    homes = [Link(up=10.0, down=20.0)] * 4
    assert least_seconds(10.0, source=source, links=homes) == 80 / 20  # one downlink
    assert least_seconds(10.0, source=source, links=homes * 4) == 16 * 80 / (60 + 160)  # all uplinks
    assert least_seconds(10.0, source=Link(up=2.0, down=2.0), links=homes) == 80 / 2  # the source
    assert least_seconds_alone(10.0, source=source, links=homes * 4) == 16 * 80 / 60


@needs_namespaces
def test_links_have_the_rate_and_the_round_trip_that_was_asked_for():
    with open_network(3, delay_s=0.020, firewalled=frozenset({2})) as lab:
        for host in range(3):
            lab.shape(host, Link(up=8e6, down=20e6))
        take = inside(lab, 1, TAKE, lab.address(1))
        assert take.stdout.readline() == "up\n"
        give = inside(lab, 0, GIVE, lab.address(1), 3_000_000)
        round_trip_s = float(give.communicate(timeout=20)[0])
        rate = float(take.communicate(timeout=20)[0])
        assert 0.040 <= round_trip_s < 0.150  # an ARP exchange, and a machine that is busy
        assert 0.75 * 8e6 < rate < 1.02 * 8e6
        if network.has_firewall():
            refused = inside(lab, 0, GIVE, lab.address(2), 1)
            assert "timed out" in refused.communicate(timeout=20)[1]
    assert ours() == []


@needs_namespaces
def test_what_a_killed_lab_left_is_swept_away():
    program = "import os, signal; from tests.lab.network import open_network; lab = open_network(2); lab.__enter__()"
    killed = subprocess.run([sys.executable, "-c", f"{program}; os.kill(os.getpid(), signal.SIGKILL)"], check=False)
    assert killed.returncode < 0
    network.sweep()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    owners = [line.split("-")[1:3] for line in listed.splitlines() if line.startswith(f"{network.PREFIX}-")]
    assert all(network.started(int(pid)) == began for pid, began in owners)


@needs_namespaces
@pytest.mark.slow
async def test_two_nodes_get_a_version_over_slow_links(tmp_path: Path):
    plan = Scenario(
        name="smoke", nodes=2, megabytes=1.0, down=8.0, up=(4.0, 8.0), learner_up=8.0, chunk_kib=64, factor=0.0
    )
    outcome = await run_scenario(plan, folder=tmp_path)
    print(json.dumps(outcome.row(), indent=1))
    assert outcome.misses == []
    assert outcome.is_complete
    assert all(node.from_learner + node.from_peers == outcome.payload_bytes for node in outcome.nodes)
    assert outcome.last_s >= outcome.bound_s  # else the links were not slow
    assert ours() == []
