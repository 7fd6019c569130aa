"""Latency without netem: one process that holds every packet of the lab's peers for the one-way delay.

``python -m tests.lab.delay_line DELAY_S NAMESPACE...``, with ``!ADDRESS`` for peers behind a firewall. In each
namespace it opens a TUN device, through which the namespace's routes send what its processes send; it gives each packet
back to the same namespace when its time has come, and the kernel forwards it to the shaped link. So the delay lies
before the uplink, TCP sees a path and not a device, and a queue that overflows drops packets as a home router does.

A peer behind a firewall takes no connections: packets that would open one to it are dropped here.

One line on stdout when all devices are there. At SIGTERM a JSON object says how many packets passed and how late they
were: the lab's figures mean something only while that is a few milliseconds.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque

DEVICE = "slow0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_LARGEST = 65_536
_BATCH = 64
"""Packets read from one device before the others get their turn."""
_TCP, _SYN, _ACK = 6, 0x02, 0x10


def open_device(namespace: str) -> int:
    """A non-blocking TUN device in a network namespace; this process stays in that namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as handle:  # noqa: PTH123 - a handle, not a file
        if libc.setns(handle.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def opens_connection(packet: bytes) -> bool:
    """True for the first packet of a TCP connection (IPv4)."""
    header = 4 * (packet[0] & 15)
    return packet[9] == _TCP and packet[header + 13] & (_SYN | _ACK) == _SYN


class DelayLine:
    """The packets under way, in the order in which they came: the delay is the same for all."""

    def __init__(self, devices: list[int], *, delay_s: float, firewalled: frozenset[bytes]) -> None:
        self._delay_s = delay_s
        self._firewalled = firewalled
        self._under_way: deque[tuple[float, int, bytes]] = deque()
        self._poller = select.epoll()
        for device in devices:
            self._poller.register(device, select.EPOLLIN)
        self.is_open = True
        self.num_packets = self.num_bytes = self.num_refused = self.num_lost = 0
        self.late_s = self.latest_s = 0.0

    def run(self) -> None:
        """Pass packets on until :attr:`is_open` is cleared."""
        clock = time.monotonic
        while self.is_open:
            wait_s = 0.5 if not self._under_way else max(0.0, self._under_way[0][0] - clock())
            for device, _ in self._poller.poll(wait_s):
                self._take(device)
            self._give(clock())

    def _take(self, device: int) -> None:
        for _ in range(_BATCH):
            try:
                packet = os.read(device, _LARGEST)
            except BlockingIOError:
                return
            if packet[16:20] in self._firewalled and opens_connection(packet):
                self.num_refused += 1
                continue
            self._under_way.append((time.monotonic() + self._delay_s, device, packet))

    def _give(self, now: float) -> None:
        under_way = self._under_way
        while under_way and under_way[0][0] <= now:
            due, device, packet = under_way.popleft()
            try:
                os.write(device, packet)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.EIO):
                    raise
                self.num_lost += 1
            self.num_packets += 1
            self.num_bytes += len(packet)
            self.late_s += now - due
            self.latest_s = max(self.latest_s, now - due)

    def figures(self) -> dict[str, float]:
        """What passed, and how late."""
        return {
            "packets": self.num_packets,
            "bytes": self.num_bytes,
            "refused": self.num_refused,
            "lost": self.num_lost,
            "mean_late_ms": 1e3 * self.late_s / max(1, self.num_packets),
            "latest_ms": 1e3 * self.latest_s,
            "cpu_s": time.process_time(),
        }


def main(delay_s: float, names: list[str]) -> None:
    firewalled = frozenset(socket.inet_aton(name[1:]) for name in names if name.startswith("!"))
    devices = [open_device(name) for name in names if not name.startswith("!")]
    line = DelayLine(devices, delay_s=delay_s, firewalled=firewalled)

    def stop(*_: object) -> None:
        line.is_open = False

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the lab, which ends this one last
    os.nice(-15)  # a packet that waits for a core would be a slower network
    print("ready", flush=True)
    line.run()
    print(json.dumps(line.figures()), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
