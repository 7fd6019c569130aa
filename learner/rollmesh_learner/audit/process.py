"""The auditor's process: ``python -m rollmesh_learner.audit.process``. Two verbs over one ``Recomputer``.

    open   {config_json: str|bytes, layout: map|bytes, threads: int?, device: str?} -> {}
    audit  {image: str, rollouts: [{key, prompt, tokens, logprobs, seed, first: int?}]}
           -> {rollouts: [{key, tokens, exact, margins, exact_logprobs, logprob_gap_median, logprob_gap_largest}],
               load_s, audit_s}

``prompt`` and ``tokens`` are little-endian uint32, log-probabilities and margins little-endian float32; answers stand
in the order of the question. ``first`` is the place of the first of ``tokens`` in its completion (0), where ``prompt``
ends with the tokens before it. The image of a root is loaded once for all questions about it that follow each other.

Invariant: the pipe's descriptors are taken before any library that prints is imported. Not here: any decision.
"""

from __future__ import annotations

import os

from rollmesh_peer.children.child import run_child, take_pipes

if __name__ == "__main__":
    take_pipes()
    # Read when torch loads its OpenMP: threads that wait must not spin (on busy cores that was 20 times slower).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import time
from pathlib import Path
from typing import cast

import numpy as np

from rollmesh_learner.audit.recompute import Case, Outcome, Recomputer, set_threads
from rollmesh_peer.models.margins import Claim
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.layout import Layout

Body = dict[str, object]


class Process:
    """The state between calls: the opened recomputer."""

    def __init__(self) -> None:
        self._recomputer: Recomputer | None = None

    def open(self, body: Body) -> Body:
        """Build the model; see the module."""
        threads, device = body.get("threads") or 0, str(body.get("device") or "auto")
        if not isinstance(threads, int):
            raise _wrong("threads")
        set_threads(threads)
        config = body.get("config_json")
        if not isinstance(config, str | bytes):
            raise _wrong("config_json")
        self._recomputer = Recomputer(json.loads(config), layout=_layout(body.get("layout")), device=device)
        return {}

    def audit(self, body: Body) -> Body:
        """Recompute some rollouts of one root; see the module."""
        if self._recomputer is None:
            raise ChildFailed("the auditor was not opened", code="audit.closed")
        rollouts = body.get("rollouts")
        if not isinstance(rollouts, list) or not rollouts:
            raise _wrong("rollouts")
        cases = [_case(rollout) for rollout in rollouts]
        started = time.perf_counter()
        self._recomputer.load(Path(str(body.get("image"))))
        loaded = time.perf_counter()
        outcomes = self._recomputer.audit(cases)
        return {
            "rollouts": [_body(rollout["key"], outcome) for rollout, outcome in zip(rollouts, outcomes, strict=True)],
            "load_s": loaded - started,
            "audit_s": time.perf_counter() - loaded,
        }


def _layout(value: object) -> Layout:
    if isinstance(value, bytes):
        return Layout.decode(value, limit=limits.CARD_BYTES)
    if not isinstance(value, dict) or not isinstance(value.get("tensors"), list | tuple):
        raise _wrong("layout")
    return Layout.read({"tensors": tuple({**spec, "shape": tuple(spec["shape"])} for spec in value["tensors"])})


def _case(value: object) -> Case:
    if not isinstance(value, dict):
        raise _wrong("rollouts")
    prompt, tokens, logprobs = (value.get(name) for name in ("prompt", "tokens", "logprobs"))
    seed, first = value.get("seed"), value.get("first") or 0
    if not all(isinstance(part, bytes) and len(part) % 4 == 0 for part in (prompt, tokens, logprobs)):
        raise _wrong("prompt, tokens or logprobs")
    if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise _wrong("seed")
    if not isinstance(first, int) or not 0 <= first < limits.MAX_NEW_TOKENS:
        raise _wrong("first")
    return Case(
        claim=Claim(
            prompt=np.frombuffer(cast(bytes, prompt), dtype="<u4"),
            completion=np.frombuffer(cast(bytes, tokens), dtype="<u4"),
            seed=seed,
            first=first,
        ),
        logprobs=np.frombuffer(cast(bytes, logprobs), dtype="<f4"),
    )


def _body(key: object, outcome: Outcome) -> Body:
    return {
        "key": key,
        "tokens": outcome.tokens,
        "exact": outcome.exact,
        "margins": outcome.margins.astype("<f4").tobytes(),
        "exact_logprobs": outcome.exact_logprobs.astype("<f4").tobytes(),
        "logprob_gap_median": outcome.logprob_gap_median,
        "logprob_gap_largest": outcome.logprob_gap_largest,
    }


def _wrong(what: str) -> ChildFailed:
    return ChildFailed(f"the auditor's pipe carried a wrong value: {what}", code="child.request")


if __name__ == "__main__":
    process = Process()
    run_child({"open": process.open, "audit": process.audit})
