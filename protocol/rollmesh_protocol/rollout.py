"""What a node sends back for a lease, and the checks that need nothing but the lease and the run card (layer L3).

``check_result`` is the only way from a :class:`Result` to :class:`Rollout` values. It is pure, so a node can run it on
its own work before sending it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from pydantic import Field

from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.lease import DIGEST_BYTES, LEASE_ID_BYTES, LOGPROB_DTYPE, TOKEN_DTYPE, Lease
from rollmesh_protocol.record import Record

Finish = Literal["stop", "length"]
MAX_FINGERPRINT_CHARS: Final = 200


class Segment(Record):
    """A run of tokens generated under one root, from ``first_token`` on."""

    first_token: int = Field(ge=0, lt=limits.MAX_NEW_TOKENS)
    root: bytes = Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)


class SampleResult(Record):
    """One completion as the node reports it. The reward is not among it: the learner computes that itself."""

    index: int = Field(ge=0, lt=limits.MAX_SAMPLES_PER_GROUP)
    tokens: bytes = Field(max_length=4 * limits.MAX_NEW_TOKENS)
    """Little-endian uint32 token ids, the final end-of-sequence token included."""
    logprobs: bytes = Field(max_length=4 * limits.MAX_NEW_TOKENS)
    """Little-endian float32, of each token under softmax(logits), before the noise."""
    finish: Finish
    segments: tuple[Segment, ...] = Field(min_length=1, max_length=limits.MAX_SEGMENTS)


class Result(Record):
    """A node's whole answer to one lease; signed as one body."""

    lease_id: bytes = Field(min_length=LEASE_ID_BYTES, max_length=LEASE_ID_BYTES)
    samples: tuple[SampleResult, ...] = Field(min_length=1, max_length=limits.MAX_SAMPLES_PER_GROUP)
    engine: str = Field(max_length=MAX_FINGERPRINT_CHARS)
    """Backend, its version, dtype and device, for display and calibration; never trusted."""
    generate_s: float = Field(ge=0, le=limits.MAX_LEASE_S)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One completion that passed the checks of this module.

    ``tokens`` is uint32[n] and ``logprobs`` float32[n], n >= 1.
    """

    lease: Lease
    index: int
    seed: int
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: Finish


def check_result(result: Result, lease: Lease, *, vocabulary: int, stop_tokens: frozenset[int]) -> tuple[Rollout, ...]:
    """The rollouts of ``result``, one for each leased sample, in the lease's order.

    Raises:
        Refused: with the ``result.*`` code of the first thing that is wrong.
    """
    by_index = {sample.index: sample for sample in result.samples}
    leased = {sample.index: sample.seed for sample in lease.samples}
    if len(by_index) != len(result.samples) or by_index.keys() != leased.keys():
        raise Refused("result.samples", f"samples {sorted(by_index)[:8]}, leased {sorted(leased)[:8]}")
    return tuple(
        _check_sample(by_index[index], lease, seed=seed, vocabulary=vocabulary, stop_tokens=stop_tokens)
        for index, seed in leased.items()
    )


def _check_sample(
    sample: SampleResult, lease: Lease, *, seed: int, vocabulary: int, stop_tokens: frozenset[int]
) -> Rollout:
    if len(sample.tokens) % TOKEN_DTYPE.itemsize or len(sample.logprobs) % LOGPROB_DTYPE.itemsize:
        raise Refused("result.schema", "tokens and log-probabilities take four bytes each")
    tokens = np.frombuffer(sample.tokens, TOKEN_DTYPE)
    logprobs = np.frombuffer(sample.logprobs, LOGPROB_DTYPE)
    if len(tokens) != len(logprobs):
        raise Refused("result.schema", f"{len(tokens)} tokens and {len(logprobs)} log-probabilities")
    if not 1 <= len(tokens) <= lease.max_new_tokens:
        raise Refused("result.length", f"{len(tokens)} tokens, where 1 to {lease.max_new_tokens} were leased")
    if int(tokens.max()) >= vocabulary:
        raise Refused("result.tokens", f"token id {int(tokens.max())} in a vocabulary of {vocabulary}")
    if not bool(np.all(np.isfinite(logprobs))) or float(logprobs.max()) > limits.LOGPROB_SLACK:
        raise Refused("result.logprob")
    stops = np.isin(tokens, np.fromiter(stop_tokens, TOKEN_DTYPE, len(stop_tokens)))
    if bool(stops[:-1].any()):
        raise Refused("result.finish", "tokens after the end of the sequence")
    if bool(stops[-1]) != (sample.finish == "stop"):
        raise Refused("result.finish", f"finish reason {sample.finish!r} with last token {int(tokens[-1])}")
    if sample.finish == "length" and len(tokens) != lease.max_new_tokens:
        raise Refused("result.finish", f"stopped for length after {len(tokens)} of {lease.max_new_tokens} tokens")
    if sample.segments != (Segment(first_token=0, root=lease.root),):
        # Leases of this protocol version order no swap in the middle of a rollout.
        raise Refused("result.root")
    return Rollout(lease=lease, index=sample.index, seed=seed, tokens=tokens, logprobs=logprobs, finish=sample.finish)
