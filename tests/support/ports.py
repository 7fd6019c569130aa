"""Ports that a test names beforehand, because somebody who starts again must be found under the same number.

Not from the range that the kernel draws from for port 0: between the probe and the use, or while the one that listened
is down, any other test of this machine could be given the number.
"""

from __future__ import annotations

import random
import socket

_RANDOM = random.SystemRandom()
RANGE = (10_000, 30_000)


def free_port() -> int:
    """A port of loopback that was free a moment ago."""
    for _ in range(1000):
        port = _RANDOM.randrange(*RANGE)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port within {RANGE}")
