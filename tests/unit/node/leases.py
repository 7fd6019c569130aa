"""Leases for the tests of a node, with as little as possible to say about each."""

from __future__ import annotations

import itertools

import numpy as np

from rollmesh_protocol.lease import Lease, LeasedSample

_serial = itertools.count(1)


def root_of(version: int) -> bytes:
    """A root for each version number."""
    return version.to_bytes(32, "big")


def make_lease(
    *,
    version: int = 1,
    samples: int = 4,
    duration_s: float = 600.0,
    node: str = "node",
    group: int | None = None,
    prompt_tokens: int = 3,
    max_new_tokens: int = 8,
    swap_mode: str = "drain",
) -> Lease:
    """A lease with a new id."""
    serial = next(_serial)
    return Lease(
        lease_id=serial.to_bytes(16, "big"),
        node=node,
        group=serial if group is None else group,
        samples=tuple(LeasedSample(index=index, seed=1000 * serial + index) for index in range(samples)),
        version=version,
        step=version,
        root=root_of(version),
        prompt=np.arange(1, prompt_tokens + 1, dtype="<u4").tobytes(),
        max_new_tokens=max_new_tokens,
        temperature=1.0,
        duration_s=duration_s,
        swap_mode=swap_mode,  # type: ignore[arg-type]
    )
