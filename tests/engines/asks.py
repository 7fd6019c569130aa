"""Requests for the conformance suite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmesh_node.engine.backend import GroupRequest, SampleRequest
from tests.unit.engine.requests import group, random_groups

__all__ = ["begun_from", "group", "random_groups"]

STOP = [65, 70, 80, 90, 100, 110, 120, 130]


def begun_from(request: GroupRequest, begun: Sequence[np.ndarray]) -> GroupRequest:
    """The request again, each of its samples begun with these tokens."""
    samples = tuple(
        SampleRequest(index=sample.index, seed=sample.seed, begun=np.asarray(tokens, dtype=np.uint32))
        for sample, tokens in zip(request.samples, begun, strict=True)
    )
    return GroupRequest(
        key=request.key,
        prompt=request.prompt,
        samples=samples,
        max_new_tokens=request.max_new_tokens,
        stop=request.stop,
    )
