"""The lab's network: a namespace for each host, all on one bridge in a namespace of its own, every link shaped.

Host 0 is the learner. A host's uplink is limited where its packets leave it, its downlink where the bridge hands them
over, by ``tc tbf`` with a queue of a few tens of milliseconds. Latency comes from netem where the kernel has it, else
from :mod:`tests.lab.delay_line`. Each host has an address block of its own, as homes do.

Invariant: nothing outside the namespaces is touched, and they are gone when the block is left. Their names carry
the pid and the start time of their owner, so that a lab sweeps away what a killed one left, and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.delay_line import DEVICE
from tests.lab.processes import DIES_WITH_PARENT

PREFIX = "rmlab"
MTU = 4500
"""Bytes of a packet. Real ones have 1500, but each costs the delay line, the kernel and the receiving daemon some tens
of microseconds, of two cores for all. Much larger ones do not fit the queue of a slow uplink: it would hold too few
for TCP, or hold them for too long."""
QUEUE_S = 0.1
"""What a link's queue holds: enough for TCP to fill the link, little enough for its delay to stay below the path's."""
LEAST_QUEUE_PACKETS = 6
BURST_S = 0.004
"""What may leave at once; the kernel's timers are finer than that."""
CONGESTION = ("cubic", "reno")
"""The first that the kernel allows in a namespace. Volunteers' systems use cubic, whatever this machine does; on paths
as short as these reno behaves like it."""
MOST_HOSTS = 250


@dataclass(frozen=True, kw_only=True)
class Link:
    """A host's connection, in bits a second."""

    up: float
    down: float


def why_not() -> str:
    """Why there can be no lab on this machine; empty when there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a thing of Linux"
    if os.geteuid() != 0:
        return "network namespaces and traffic control need root"
    if not all(map(shutil.which, ("ip", "tc", "setpriv"))):
        return "ip, tc and setpriv (the packages iproute2 and util-linux) are not installed"
    name = f"{own_prefix()}-try"
    try:
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", "p0", "type", "veth", "peer", "name", "p1")
            _ip("-n", name, "link", "add", "br0", "type", "bridge")
            _tc(name, "qdisc", "add", "dev", "p0", "root", "tbf", "rate", "1mbit", "burst", "4k", "limit", "30k")
        finally:
            _ip("netns", "del", name)
    except LabError as error:
        return str(error)
    if not (has_netem() or Path("/dev/net/tun").exists()):
        return "the kernel has neither netem nor TUN devices for the latency"
    return ""


class LabError(Exception):
    """The network cannot be made, in the words of the tool that failed."""


@dataclass
class Network:
    """Made by :func:`open_network`. Hosts are numbers, the learner's is 0."""

    num_hosts: int
    delay_s: float
    prefix: str
    mtu: int = MTU
    line: subprocess.Popen[bytes] | None = field(default=None)
    line_figures: dict[str, float] = field(default_factory=dict)

    def namespace(self, host: int) -> str:
        return f"{self.prefix}-h{host}"

    @property
    def hub(self) -> str:
        """The bridge's namespace."""
        return f"{self.prefix}-hub"

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.{host}.2"

    def shape(self, host: int, link: Link) -> None:
        """Limit a host's link in both directions, from now on."""
        for namespace, device, rate in (
            (self.namespace(host), "eth0", link.up),
            (self.hub, f"p{host}", link.down),
        ):
            bytes_per_s = rate / 8
            limit = int(max(LEAST_QUEUE_PACKETS * self.mtu, QUEUE_S * bytes_per_s))
            burst = int(max(2 * (self.mtu + 14), BURST_S * bytes_per_s))
            tbf = ("tbf", "rate", f"{int(rate)}bit", "burst", f"{burst}b", "limit", f"{limit + burst}b")
            if device == "eth0" and self.delay_s and has_netem():
                delay = f"{1e3 * self.delay_s:g}ms"
                netem = ("netem", "delay", delay, "limit", "10000")
                _tc(namespace, "qdisc", "replace", "dev", device, "root", "handle", "1:", *netem)
                _tc(namespace, "qdisc", "replace", "dev", device, "parent", "1:1", "handle", "10:", *tbf)
            else:
                _tc(namespace, "qdisc", "replace", "dev", device, "root", *tbf)

    def counters(self) -> dict[int, tuple[int, int]]:
        """Bytes that each host has sent and received so far, as the bridge sees them."""
        links = json.loads(_ip("-n", self.hub, "-s", "-j", "link", "show"))
        return {
            int(link["ifname"][1:]): (link["stats64"]["rx"]["bytes"], link["stats64"]["tx"]["bytes"])
            for link in links
            if re.fullmatch(r"p\d+", link["ifname"])
        }

    def dropped(self) -> dict[int, int]:
        """Packets that found a host's uplink queue full."""
        return {
            host: sum(qdisc.get("drops", 0) for qdisc in json.loads(_tc(self.namespace(host), "-s", "-j", "qdisc")))
            for host in range(self.num_hosts)
        }


@contextlib.contextmanager
def open_network(
    num_hosts: int, *, delay_s: float = 0.020, mtu: int = MTU, firewalled: frozenset[int] = frozenset()
) -> Iterator[Network]:
    """A network of so many hosts, with links that are not limited yet; ``delay_s`` is one way.

    Hosts in ``firewalled`` take no connections (with netem instead of the delay line they take them; see
    :func:`has_firewall`).

    Raises:
        LabError: a tool failed.
    """
    assert num_hosts <= MOST_HOSTS
    sweep()
    network = Network(num_hosts, delay_s, own_prefix(), mtu)
    try:
        _make(network)
        if delay_s and not has_netem():
            _slow_down(network, firewalled)
        yield network
    finally:
        _unmake(network)


def has_firewall() -> bool:
    """True where :func:`open_network` can keep connections out; elsewhere such hosts should listen on nothing."""
    return not has_netem()


@functools.cache
def has_netem() -> bool:
    """True where the kernel can delay packets by itself."""
    name = f"{own_prefix()}-netem"
    try:
        _ip("netns", "add", name)
    except LabError:
        return False
    try:
        _tc(name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except LabError:
        return False
    else:
        return True
    finally:
        _ip("netns", "del", name)


def sweep() -> None:
    """Remove what labs that are gone left behind: their processes, and their namespaces."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0] if line else ""
        if is_abandoned(name):
            _remove(name)


def is_abandoned(name: str) -> bool:
    """True for a name of ours (see :func:`own_prefix`) whose owner is gone."""
    owner = re.match(rf"{PREFIX}-(\d+)-(\d+)-", name)
    return owner is not None and started(int(owner[1])) != owner[2]


# --- making and unmaking ---------------------------------------------------------------------------------------------
def _make(network: Network) -> None:
    _ip("netns", "add", network.hub)
    congestion = next(filter(functools.partial(_is_allowed, network.hub), CONGESTION))
    _ip_batch(
        network.hub, ["link set lo up", "link add br0 type bridge stp_state 0", f"link set br0 mtu {network.mtu} up"]
    )
    for host in range(network.num_hosts):
        name = network.namespace(host)
        _ip("netns", "add", name)
        _ip_batch(
            network.hub,
            [
                f"link add p{host} type veth peer name eth0 netns {name}",
                f"link set p{host} mtu {network.mtu} master br0 up",
            ],
        )
        _ip_batch(
            name,
            [
                "link set lo up",
                f"addr add {network.address(host)}/16 dev eth0",
                f"link set eth0 mtu {network.mtu} up",
            ],
        )
        _sysctl(
            name,
            {
                "net/ipv4/tcp_congestion_control": congestion,
                "net/ipv4/tcp_no_metrics_save": "1",
                "net/ipv4/ip_forward": "1",
                "net/ipv4/conf/all/rp_filter": "0",
                "net/ipv4/conf/eth0/rp_filter": "0",
            },
        )


def _is_allowed(namespace: str, congestion: str) -> bool:
    try:
        _sysctl(namespace, {"net/ipv4/tcp_congestion_control": congestion})
    except LabError:
        return False
    return True


def _slow_down(network: Network, firewalled: frozenset[int]) -> None:
    """Send what the hosts send through the delay line first."""
    command = [*DIES_WITH_PARENT, sys.executable, "-m", "tests.lab.delay_line", f"{network.delay_s:g}"]
    command += [network.namespace(host) for host in range(network.num_hosts)]
    command += [f"!{network.address(host)}" for host in sorted(firewalled)]
    network.line = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert network.line.stdout is not None
    if network.line.stdout.readline().strip() != b"ready":
        raise LabError("the delay line did not start")
    for host in range(network.num_hosts):
        name = network.namespace(host)
        _sysctl(name, {f"net/ipv4/conf/{DEVICE}/rp_filter": "0", f"net/ipv4/conf/{DEVICE}/accept_local": "1"})
        _ip_batch(
            name,
            [
                f"link set {DEVICE} mtu {network.mtu} txqueuelen 2000 up",
                f"route add 10.77.0.0/16 dev {DEVICE} src {network.address(host)} table 100",
                "rule add pref 100 iif lo lookup 100",  # what comes out of the line finds its way in the main table
            ],
        )


def _unmake(network: Network) -> None:
    """Remove everything, whatever state it is in."""
    line = network.line
    if line is not None:
        line.terminate()
        try:
            told, _ = line.communicate(timeout=5)
            network.line_figures = json.loads(told)
        except (subprocess.TimeoutExpired, ValueError):
            line.kill()
            line.wait()
    for found in _ip("netns", "list").splitlines():
        if found.startswith(f"{network.prefix}-"):
            _remove(found.split()[0])


def _remove(name: str) -> None:
    """A namespace, and the processes in it: they are ours, nobody else knows its name."""
    with contextlib.suppress(LabError):
        for _ in range(50):
            pids = [int(word) for word in _ip("netns", "pids", name).split()]
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
    with contextlib.suppress(LabError):
        _ip("netns", "del", name)


# --- tools -----------------------------------------------------------------------------------------------------------
def own_prefix() -> str:
    """How the names of everything that this process makes begin."""
    return f"{PREFIX}-{os.getpid()}-{started(os.getpid())}"


def started(pid: int) -> str:
    """When a process started, in ticks since boot, which with the pid names it for good; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _ip(*words: str, stdin: str | None = None) -> str:
    return _run("ip", *words, stdin=stdin)


def _ip_batch(namespace: str, commands: list[str]) -> None:
    _run("ip", "-n", namespace, "-batch", "-", stdin="\n".join(commands) + "\n")


def _tc(namespace: str, *words: str) -> str:
    return _run("tc", "-n", namespace, *words)


def _sysctl(namespace: str, values: dict[str, str]) -> None:
    script = "\n".join(f"echo {value} > /proc/sys/{name}" for name, value in values.items())
    _run("ip", "netns", "exec", namespace, "sh", "-e", "-c", script)


def _run(*command: str, stdin: str | None = None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        why = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()[0]
        raise LabError(f"{shlex.join(command)}: {why}".replace("\n", "; "))
    return done.stdout
