"""One run of the lab: a learner and N nodes on shaped links, one version announced, and what became of it.

The links are not limited while the nodes join, fetch the base version and take a first small patch (which loads the
codec); then they are, and the version that is measured is announced. All times are one machine's clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import trio

from rollmesh_peer.control import ask_control
from rollmesh_peer.folders import control_sockets
from rollmesh_protocol.errors import LinkLost
from rollmesh_protocol.status import NodeStatus, StatusRequest
from tests.lab import processes
from tests.lab.bounds import MBIT, draw_links, least_seconds, least_seconds_alone
from tests.lab.network import MTU, Link, Network, has_firewall, open_network
from tests.lab.processes import LabProcess, NodeLog

BASE_VERSION, WARM_VERSION, MEASURED_VERSION = 1, 2, 3
JOINING_AT_ONCE = 4
"""Daemons that start at one time: importing Python modules is what two cores are slowest at."""
START_S = 60.0
"""For one daemon to join."""
SETTLE_S = 30.0
"""For nodes to find their neighbours; they ask the learner every ten seconds."""
WANTED_NEIGHBOURS = 8
LOOK_S = 0.2
CORES = len(os.sched_getaffinity(0))
BUSY_SHARE, LATE_MS = 0.9, 5.0
"""Of all cores, and of the delay line: from here on it is this machine that is measured, not the network."""
MOST_TIMES_BOUND = 5.0
"""A run is given up after so many times its bound, and a minute."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is run. Rates in Mb/s, sizes in MB (10^6 bytes)."""

    name: str
    nodes: int
    megabytes: float
    down: float
    up: tuple[float, float]
    learner_up: float
    learner_down: float = 100.0
    learner_only: bool = False
    """Peers switched off: one to all."""
    killed_share: float = 0.0
    """So many of the nodes are killed half-way through the bound."""
    corrupters: int = 0
    firewalled_share: float = 0.0
    """So many of the nodes take no connections."""
    factor: float = 1.25
    """The target is so many times the bound ..."""
    slack_s: float = 1.0
    """... and this; 0 for both: only reported."""
    delay_s: float = 0.020
    mtu: int = MTU
    chunk_kib: int = 256
    seed: int = 7

    @property
    def source(self) -> Link:
        return Link(up=self.learner_up * MBIT, down=self.learner_down * MBIT)

    @property
    def links(self) -> list[Link]:
        """Of the nodes; node i is host i + 1."""
        return draw_links(self.nodes, down=self.down * MBIT, up=(self.up[0] * MBIT, self.up[1] * MBIT), seed=self.seed)

    @property
    def killed(self) -> frozenset[int]:
        """Hosts, spread over the drawn uplinks."""
        count = round(self.killed_share * self.nodes) or bool(self.killed_share)
        return frozenset(1 + (index * self.nodes) // max(1, count) for index in range(count))

    @property
    def firewalled(self) -> frozenset[int]:
        """Hosts: every other one for a half."""
        count = round(self.firewalled_share * self.nodes)
        return frozenset(1 + (index * self.nodes) // max(1, count) for index in range(count))


@dataclass(kw_only=True)
class NodeFigures:
    """What one node saw of the measured version. Seconds since its announcement; None: never."""

    host: int
    up_mbit: float
    heard_s: float | None = None
    fetched_s: float | None = None
    held_s: float | None = None
    from_learner: int = 0
    from_peers: int = 0
    served: int = 0
    sent: int = 0
    """Bytes on its uplink, headers and control included."""
    segments: int = 0
    resent_segments: int = 0
    """TCP segments that were sent a second time: lost in a queue that was full, or thought to be."""
    neighbours: int = 0
    fate: str = ""
    """"killed", "firewalled", or nothing special."""
    remarks: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Outcome:
    """What came of a scenario."""

    scenario: Scenario
    payload_bytes: int = 0
    bound_s: float = 0.0
    nodes: list[NodeFigures] = field(default_factory=list)
    learner_served: int = 0
    wall_s: float = 0.0
    lab_cpu_s: dict[str, float] = field(default_factory=dict)
    """Seconds of a core, by kind of process."""
    machine_cpu_s: float = 0.0
    memory_bytes: int = 0
    line: dict[str, float] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    curve: list[dict[str, object]] = field(default_factory=list)
    """Bytes sent and received by each host, about once a second."""
    noise_sent: int = 0
    trouble: str = ""

    @property
    def survivors(self) -> list[NodeFigures]:
        return [node for node in self.nodes if node.fate != "killed"]

    @property
    def target_s(self) -> float:
        return self.scenario.factor * self.bound_s + self.scenario.slack_s

    @property
    def times(self) -> list[float]:
        """When the survivors had the whole payload, in order."""
        return sorted(node.fetched_s for node in self.survivors if node.fetched_s is not None)

    @property
    def last_s(self) -> float | None:
        return self.times[-1] if self.is_complete else None

    @property
    def most_s(self) -> float | None:
        """When 90 % of the survivors had it."""
        needed = -(-9 * len(self.survivors) // 10)
        return self.times[needed - 1] if 0 < needed <= len(self.times) else None

    @property
    def is_complete(self) -> bool:
        return bool(self.survivors) and all(
            node.fetched_s is not None and node.held_s is not None for node in self.survivors
        )

    @property
    def sent_bytes(self) -> int:
        """Chunks that left anybody's seeder; what exceeds the bytes that were kept was sent in vain."""
        return self.learner_served + sum(node.served for node in self.nodes)

    @property
    def misses(self) -> list[str]:
        """What is not as it should be, one sentence each."""
        what = f"{self.scenario.name}, {self.scenario.nodes} nodes"
        if self.trouble:
            return [f"{what}: {self.trouble}"]
        if not self.is_complete:
            without = [node.host for node in self.survivors if node.held_s is None]
            return [f"{what}: nodes {without} never held the version"]
        last_s = self.last_s or 0.0
        if self.scenario.factor and last_s > self.target_s:
            return [f"{what}: {last_s:.1f} s to the last node, the target is {self.target_s:.1f} s"]
        return []

    @property
    def is_disturbed(self) -> bool:
        """True when the cores were what limited: the times are then no word about the network or the swarm."""
        is_busy = self.machine_cpu_s > BUSY_SHARE * CORES * max(self.wall_s, 1e-9)
        return is_busy or self.line.get("mean_late_ms", 0.0) > LATE_MS

    def row(self) -> dict[str, object]:
        """For the table and the JSON line."""
        from_peers = sum(node.from_peers for node in self.survivors)
        fetched = from_peers + sum(node.from_learner for node in self.survivors)
        wall_s = max(self.wall_s, 1e-9)
        held = [node.held_s for node in self.survivors if node.held_s is not None]
        return {
            "scenario": self.scenario.name,
            "nodes": self.scenario.nodes,
            "megabytes": round(self.payload_bytes / 1e6, 2),
            "bound_s": round(self.bound_s, 2),
            "target_s": round(self.target_s, 2) if self.scenario.factor else None,
            "s_to_90_percent": rounded(self.most_s),
            "s_to_last": rounded(self.last_s),
            "s_to_last_held": rounded(max(held)) if self.is_complete else None,
            "times_bound": rounded(self.last_s / self.bound_s) if self.last_s and self.bound_s else None,
            "from_peers": round(from_peers / max(1, fetched), 3),
            "learner_sent_payloads": round(self.learner_served / max(1, self.payload_bytes), 2),
            "sent_over_needed": round(self.sent_bytes / max(1, fetched), 3),
            "resent_segments": round(
                sum(node.resent_segments for node in self.nodes) / max(1, sum(node.segments for node in self.nodes)), 3
            ),
            "finished": len(self.times),
            "alive": len(self.survivors),
            "cpu_lab": round(sum(self.lab_cpu_s.values()) / (CORES * wall_s), 3),
            "cpu_machine": round(self.machine_cpu_s / (CORES * wall_s), 3),
            "cpu_s": {kind: round(used, 1) for kind, used in self.lab_cpu_s.items()},
            "memory_gb": round(self.memory_bytes / 1e9, 2),
            "line_late_ms": round(self.line.get("mean_late_ms", 0.0), 2),
            "cores_were_the_limit": self.is_disturbed,
            "misses": self.misses,
        }

    def write(self, path: Path) -> None:
        """Everything, for whoever asks why."""
        plain = {"row": self.row(), **asdict(self)}
        path.write_text(json.dumps(plain, indent=1, default=list))


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


@dataclass
class Lab:
    """A run while it goes on."""

    scenario: Scenario
    network: Network
    folder: Path
    say: Callable[[str], None]
    learner: LabProcess | None = None
    nodes: list[LabProcess] = field(default_factory=list)
    others: list[LabProcess] = field(default_factory=list)
    logs: dict[int, NodeLog] = field(default_factory=dict)

    # --- the learner -------------------------------------------------------------------------------------------------
    async def start_learner(self) -> str:
        """Start it; the join line."""
        command = [sys.executable, "-m", "tests.lab.learner", str(self.folder / "learner"), self.network.address(0)]
        command += [f"{self.scenario.megabytes:g}", str(self.scenario.chunk_kib)]
        self.learner = processes.start(
            "learner", command, namespace=self.network.namespace(0), host=0, log_path=self.folder / "learner.log",
            environ={"ROLLMESH_HOME": str(self.folder)}, is_spoken_to=True,
        )  # fmt: skip
        return str((await self._hear(self.learner, 120))["join"])

    async def tell(self, deadline_s: float = 120, **order: object) -> dict:
        """One order to the learner, and its answer."""
        assert self.learner is not None
        assert self.learner.process.stdin is not None
        self.learner.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.learner.process.stdin.flush()
        return await self._hear(self.learner, deadline_s)

    async def _hear(self, process: LabProcess, deadline_s: float) -> dict:
        stdout = process.process.stdout
        assert stdout is not None
        line = b""
        with trio.move_on_after(deadline_s):
            line = await trio.to_thread.run_sync(stdout.readline, abandon_on_cancel=True)
        if not line:
            raise LabFailed(f"the {process.name} says nothing:\n{process.tail()}")
        return json.loads(line)

    # --- the nodes ---------------------------------------------------------------------------------------------------
    async def start_nodes(self, join: str) -> None:
        """Start them, a few at a time, until all have joined."""
        waiting = list(range(1, self.scenario.nodes + 1))
        with self._within(START_S + 5 * self.scenario.nodes, "not all nodes joined"):
            while waiting or self._joining():
                while waiting and self._joining() < JOINING_AT_ONCE:
                    self._start_node(waiting.pop(0), join)
                await self._look()

    def _joining(self) -> int:
        return sum(1 for log in self.logs.values() if log.joined is None)

    def _start_node(self, host: int, join: str) -> None:
        scenario, home = self.scenario, self.folder / f"node{host}"
        home.mkdir()
        is_deaf = host in scenario.firewalled and not has_firewall()
        listen = [] if is_deaf else [f"/ip4/{self.network.address(host)}/tcp/4001"]
        settings = [
            "node.role=seed", f"node.name=node-{host}", f"network.listen={json.dumps(listen)}",
            'weights.ram_folder=""', "log.format=json", "log.level=debug",
            *(["network.learner_only=true"] if scenario.learner_only else []),
        ]  # fmt: skip
        log_path = self.folder / f"node{host}.log"
        node = processes.start(
            f"node {host}", processes.node_command(join, settings), namespace=self.network.namespace(host), host=host,
            log_path=log_path, environ={"ROLLMESH_HOME": str(home)},
        )  # fmt: skip
        self.nodes.append(node)
        self.logs[host] = NodeLog(log_path)

    async def start_corrupters(self, join: str) -> None:
        """They join last, and connect to everybody."""
        for number in range(self.scenario.corrupters):
            host = self.scenario.nodes + 1 + number
            process = processes.start(
                f"corrupter {number}",
                [sys.executable, "-m", "tests.lab.hostile", join, self.network.address(host)],
                namespace=self.network.namespace(host), host=host, log_path=self.folder / f"corrupter{number}.log",
                environ={}, is_spoken_to=True,
            )  # fmt: skip
            self.others.append(process)
            found = await self._hear(process, START_S)
            self.say(f"a corrupter has {found['neighbours']} neighbours")

    async def status(self, host: int) -> NodeStatus | None:
        """A node's own word; None from one that does not answer."""
        for path in control_sockets(environ={"ROLLMESH_HOME": str(self.folder / f"node{host}")}):
            with contextlib.suppress(LinkLost):
                return (await ask_control(path, StatusRequest(page=0))).node
        return None

    async def statuses(self) -> dict[int, NodeStatus]:
        """Of all that are alive."""
        found = {node.host: await self.status(node.host) for node in self.nodes if node.is_alive}
        return {host: status for host, status in found.items() if status is not None}

    async def until_held(self, version: int, *, deadline_s: float) -> None:
        """Until every node that was not killed holds the version."""
        with self._within(deadline_s, f"not all nodes hold version {version}"):
            while any(version not in self.logs[node.host].held for node in self.nodes if not node.is_killed):
                await self._look()

    async def settle(self) -> None:
        """Until the nodes have the neighbours that they want, or have had time enough to find them."""
        wanted = min(WANTED_NEIGHBOURS, self.scenario.nodes - 1)
        with trio.move_on_after(SETTLE_S):
            while not self.scenario.learner_only:
                counts = [status.neighbours for status in (await self.statuses()).values()]
                if counts and min(counts) >= wanted:
                    break
                await trio.sleep(1)

    async def _look(self) -> None:
        """Read all logs; a node that ended by itself ends the run."""
        await trio.sleep(LOOK_S)
        for log in self.logs.values():
            log.read()
        for process in (self.learner, *self.nodes, *self.others):
            if process is not None and not process.is_killed and not process.is_alive:
                raise LabFailed(f"{process.name} ended by itself:\n{process.tail()}")

    @contextlib.contextmanager
    def _within(self, deadline_s: float, otherwise: str) -> Iterator[None]:
        with trio.move_on_after(deadline_s) as scope:
            yield
        if scope.cancelled_caught:
            behind = [node for node in self.nodes if node.is_alive][:1]
            raise LabFailed(f"{otherwise} after {deadline_s:.0f} s\n" + "".join(node.tail(5) for node in behind))

    # --- the measurement ---------------------------------------------------------------------------------------------
    async def measure(self, outcome: Outcome) -> None:
        """Announce the version that was prepared and watch it arrive."""
        scenario, version = self.scenario, MEASURED_VERSION
        before = await self.statuses()
        served = int((await self.tell(do="figures"))["bytes_served"])
        sent = self.network.counters()
        segments = {node.host: processes.sent_segments(node.process.pid) for node in self.nodes}
        cpu = processes.lab_cpu_seconds(), processes.machine_cpu_seconds()
        announced = float((await self.tell(do="announce"))["at"])
        deadline = announced + MOST_TIMES_BOUND * outcome.bound_s + 60
        looked_at = 0.0
        while time.time() < deadline and not self._is_over(version):
            now_s = time.time() - announced
            if now_s >= outcome.bound_s / 2:
                self._kill_some()
            if now_s - looked_at >= 1:
                looked_at = now_s
                outcome.curve.append({"s": round(now_s, 2), "bytes": self.network.counters()})
            await self._look()
        outcome.wall_s = time.time() - announced
        outcome.lab_cpu_s = {kind: used - cpu[0][kind] for kind, used in processes.lab_cpu_seconds().items()}
        outcome.machine_cpu_s = processes.machine_cpu_seconds() - cpu[1]
        outcome.memory_bytes = processes.lab_memory_bytes()
        outcome.learner_served = int((await self.tell(do="figures"))["bytes_served"]) - served
        outcome.dropped = self.network.dropped()
        after, counters = await self.statuses(), self.network.counters()
        for node, link in zip(self.nodes, scenario.links, strict=True):
            host, log = node.host, self.logs[node.host]
            figures = NodeFigures(host=host, up_mbit=round(link.up / MBIT, 1), sent=counters[host][0] - sent[host][0])
            figures.fate = "killed" if node.is_killed else "firewalled" if host in scenario.firewalled else ""
            for name, times in (("heard_s", log.heard), ("fetched_s", log.fetched), ("held_s", log.held)):
                if version in times:
                    setattr(figures, name, round(times[version] - announced, 2))
            if not node.is_killed:
                all_now, again_now = processes.sent_segments(node.process.pid)
                figures.segments = all_now - segments[host][0]
                figures.resent_segments = again_now - segments[host][1]
            if host in before and host in after:
                figures.from_learner = after[host].bytes_from_learner - before[host].bytes_from_learner
                figures.from_peers = after[host].bytes_from_peers - before[host].bytes_from_peers
                figures.served = after[host].bytes_served - before[host].bytes_served
                figures.neighbours = before[host].neighbours
            figures.remarks = [
                f"{float(str(said['time'])) - announced:.1f} s: {said['event']}"
                for said in log.remarks
                if float(str(said["time"])) >= announced
            ]
            outcome.nodes.append(figures)

    def _is_over(self, version: int) -> bool:
        return all(version in self.logs[node.host].held for node in self.nodes if not node.is_killed) and (
            not self.scenario.killed_share or any(node.is_killed for node in self.nodes)
        )

    def _kill_some(self) -> None:
        for node in self.nodes:
            if node.host in self.scenario.killed and not node.is_killed:
                node.kill()

    def end(self) -> None:
        """Kill everything that still runs."""
        for process in (*self.nodes, *self.others, self.learner):
            if process is not None and process.is_alive:
                process.kill()


class LabFailed(Exception):
    """A run that came to nothing, and why."""


async def run_scenario(scenario: Scenario, *, folder: Path, say: Callable[[str], None] = lambda words: None) -> Outcome:
    """Run it in ``folder`` (empty, best in memory). A run that fails is an outcome with ``trouble``."""
    outcome = Outcome(scenario=scenario)
    with open_network(
        1 + scenario.nodes + scenario.corrupters,
        delay_s=scenario.delay_s,
        mtu=scenario.mtu,
        firewalled=scenario.firewalled,
    ) as network:
        lab = Lab(scenario, network, folder, say)
        try:
            await _run(lab, outcome)
        except LabFailed as failure:
            outcome.trouble = str(failure)
        finally:
            lab.end()
    outcome.line = network.line_figures
    return outcome


async def _run(lab: Lab, outcome: Outcome) -> None:
    scenario = lab.scenario
    started = time.monotonic()

    def say(words: str) -> None:
        lab.say(f"{scenario.name}, {scenario.nodes} nodes: {time.monotonic() - started:5.1f} s  {words}")

    join = await lab.start_learner()
    await lab.start_nodes(join)
    say("all nodes have joined")
    await lab.until_held(BASE_VERSION, deadline_s=60 + 4 * scenario.nodes + scenario.megabytes * scenario.nodes / 4)
    say("all hold the base version")
    await lab.tell(do="prepare", share=0.0001)
    await lab.tell(do="announce")
    await lab.until_held(WARM_VERSION, deadline_s=60 + 6 * scenario.nodes)
    await lab.settle()
    await lab.start_corrupters(join)
    prepared = await lab.tell(do="prepare", share=1.0)
    outcome.payload_bytes = int(prepared["payload_bytes"])
    least = least_seconds_alone if scenario.learner_only else least_seconds
    outcome.bound_s = least(outcome.payload_bytes, source=scenario.source, links=scenario.links)
    for host, link in enumerate([scenario.source, *scenario.links]):
        lab.network.shape(host, link)
    for process in lab.others:
        lab.network.shape(process.host, Link(up=scenario.down * MBIT, down=scenario.down * MBIT))
    await trio.sleep(2)
    say(f"a version of {outcome.payload_bytes / 1e6:.1f} MB is announced; T* is {outcome.bound_s:.1f} s")
    await lab.measure(outcome)
    say("done" if outcome.last_s is None else f"the last node has it after {outcome.last_s:.1f} s")
