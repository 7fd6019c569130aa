"""What a node sends back for a lease, and the checks that need nothing but the lease and the run card (layer L3).

``check_result`` is the only way from a :class:`Result` to :class:`Rollout` values. It is pure, so a node can run it on
its own work before sending it.

Under ``drain`` a completion is one segment, of the lease's root. Under ``recompute`` a node that takes newer weights
cuts what it has begun back to a multiple of ``limits.SEGMENT_TOKENS``, prefills that anew and draws on, so that every
token is recomputable under the root of its segment. A node could choose its answer by choosing its swaps; hence:

- segments begin at token 0 and then at ascending multiples of ``SEGMENT_TOKENS`` below the number of tokens;
- their roots are those of the lease's version and of later ones, in the order of publication, each version once at
  most. The first may be a later one: what was begun under the lease's own was cut to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from pydantic import Field

from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.lease import DIGEST_BYTES, LEASE_ID_BYTES, LOGPROB_DTYPE, TOKEN_DTYPE, Lease
from rollmesh_protocol.record import Record

Finish = Literal["stop", "length"]
MAX_FINGERPRINT_CHARS: Final = 200
Swap = tuple[int, bytes]
"""(version, root) that a node could have taken."""


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

    ``tokens`` is uint32[n] and ``logprobs`` float32[n], n >= 1. ``segments`` begin at token 0 and ascend below n.
    """

    lease: Lease
    index: int
    seed: int
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: Finish
    segments: tuple[Segment, ...]


def kept_tokens(drawn: int) -> int:
    """How many of the tokens drawn so far a swap leaves in place: the last multiple of ``SEGMENT_TOKENS``."""
    return drawn - drawn % limits.SEGMENT_TOKENS


def check_result(
    result: Result, lease: Lease, *, vocabulary: int, stop_tokens: frozenset[int], swaps: Sequence[Swap] = ()
) -> tuple[Rollout, ...]:
    """The rollouts of ``result``, one for each leased sample, in the lease's order.

    ``swaps`` are the versions that were published since the lease's (a learner's record) or that were loaded since (a
    node's), ascending; they matter only where the lease says ``recompute``.

    Raises:
        Refused: with the ``result.*`` code of the first thing that is wrong.
    """
    by_index = {sample.index: sample for sample in result.samples}
    leased = {sample.index: sample.seed for sample in lease.samples}
    if len(by_index) != len(result.samples) or by_index.keys() != leased.keys():
        raise Refused("result.samples", f"samples {sorted(by_index)[:8]}, leased {sorted(leased)[:8]}")
    return tuple(
        _check_sample(by_index[index], lease, seed=seed, vocabulary=vocabulary, stop_tokens=stop_tokens, swaps=swaps)
        for index, seed in leased.items()
    )


def _check_sample(
    sample: SampleResult,
    lease: Lease,
    *,
    seed: int,
    vocabulary: int,
    stop_tokens: frozenset[int],
    swaps: Sequence[Swap],
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
    _check_segments(sample.segments, lease, tokens=len(tokens), swaps=swaps)
    return Rollout(
        lease=lease,
        index=sample.index,
        seed=seed,
        tokens=tokens,
        logprobs=logprobs,
        finish=sample.finish,
        segments=sample.segments,
    )


def _check_segments(segments: Sequence[Segment], lease: Lease, *, tokens: int, swaps: Sequence[Swap]) -> None:
    """Hold the segments of a completion of so many ``tokens`` against what ``lease`` allows.

    ``swaps`` ascend by version; those that are not newer than the lease's version are passed over. A root that was
    published more than once counts as the earliest version that fits.

    Raises:
        Refused: ``result.root`` for weights that the lease does not allow, or not in this order; ``result.schema`` for
            a boundary that no swap leaves.
    """
    if lease.swap_mode == "drain":
        if tuple(segments) != (Segment(first_token=0, root=lease.root),):
            raise Refused("result.root")
        return
    firsts = [segment.first_token for segment in segments]
    if not firsts or firsts[0] != 0 or any(first % limits.SEGMENT_TOKENS for first in firsts):
        raise Refused(
            "result.schema", f"weights changed at tokens {firsts[:8]}, not at multiples of {limits.SEGMENT_TOKENS}"
        )
    if any(later <= first for first, later in pairwise([*firsts, tokens])):
        raise Refused("result.schema", f"segments that begin at {firsts[:8]} of {tokens} tokens")
    allowed = iter([lease.root, *(root for version, root in swaps if version > lease.version)])
    for place, segment in enumerate(segments):
        if segment.root not in allowed:  # takes from the iterator: each version is used once, and none goes back
            raise Refused("result.root", f"segment {place} names weights that do not follow from the lease's")
