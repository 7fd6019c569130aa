"""How fast a broadcast can be at all, and the links that the lab draws for its hosts."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.lab.network import Link

MBIT = 1e6


def least_seconds(num_bytes: float, *, source: Link, links: Sequence[Link]) -> float:
    """T*: no way of passing ``num_bytes`` from ``source`` to everybody in ``links`` is faster.

    The source sends every byte once; the slowest downlink takes every byte; and all that is received was sent by
    somebody. Headers of packets are not counted: they are part of what a protocol costs.
    """
    bits = 8 * num_bytes
    uplinks = source.up + sum(link.up for link in links)
    return max(bits / source.up, bits / min(link.down for link in links), len(links) * bits / uplinks)


def least_seconds_alone(num_bytes: float, *, source: Link, links: Sequence[Link]) -> float:
    """The same when only the source sends."""
    bits = 8 * num_bytes
    return max(len(links) * bits / source.up, bits / min(link.down for link in links))


def draw_links(count: int, *, down: float, up: tuple[float, float], seed: int) -> list[Link]:
    """Links of homes: one downlink for all, and an uplink for each, evenly drawn."""
    chance = Random(seed)
    return [Link(up=chance.uniform(*up), down=down) for _ in range(count)]
