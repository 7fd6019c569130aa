"""From the rollouts of a lease to a result on disk: put together, checked, signed, and in the spool.

The invariant: what leaves here has passed :func:`~rollmesh_protocol.rollout.check_result`, is signed, and survives a
crash. Not here: who sends it (``submitting``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import trio

from rollmesh_node.engine.segments import Completion
from rollmesh_node.journal import Journal
from rollmesh_node.spool import Spool
from rollmesh_peer.faults import fault_point
from rollmesh_peer.logging_setup import event
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.errors import HostError, Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import RunCard
from rollmesh_protocol.rollout import Result, SampleResult, Segment, check_result

_log = logging.getLogger(__name__)


class ResultDesk:
    """Makes the results of one run."""

    def __init__(self, card: RunCard, *, identity: Identity, spool: Spool, journal: Journal) -> None:
        self._card = card
        self._stop = frozenset(card.stop_tokens)
        self._identity = identity
        self._spool = spool
        self._journal = journal

    async def finish(self, lease: Lease, rollouts: Mapping[int, Completion], *, engine: str, took_s: float) -> bool:
        """Keep the result of a lease whose samples are all there, by index; False when it is not fit to be sent."""
        result = Result(
            lease_id=lease.lease_id,
            samples=tuple(sample_result(rollouts[sample.index]) for sample in lease.samples),
            engine=engine,
            generate_s=min(took_s, limits.MAX_LEASE_S),
        )
        if _is_of_one_root(result, lease):  # a selfcheck knows no other
            self._journal.made(lease, result)
        try:
            self._check(result, lease)
            body = result.encode()
            if len(body) > limits.RESULT_BYTES:
                raise Refused("request.too_large", f"a result of {len(body)} bytes")
            sealed = seal(body, run=self._card.run, kind="result", identity=self._identity).encode()
            await trio.to_thread.run_sync(self._spool.put, lease.lease_id, sealed)
            fault_point("node.result_durable")
        except (Refused, HostError) as error:
            event(_log, "a result is not fit to be sent", level=logging.ERROR, code=error.code, why=error.detail)
            self._journal.answered(lease.lease_id, code=error.code, detail=error.detail, by="node")
            return False
        return True

    def _check(self, result: Result, lease: Lease) -> None:
        """Hold a result against its lease, as the learner will. Raises ``Refused``."""
        if lease.swap_mode == "recompute":  # its segments are the host's own account; everything else is checked
            whole = (Segment(first_token=0, root=lease.root),)
            samples = tuple(sample.model_copy(update={"segments": whole}) for sample in result.samples)
            result = result.model_copy(update={"samples": samples})
        check_result(result, lease, vocabulary=self._card.vocabulary, stop_tokens=self._stop)


def _is_of_one_root(result: Result, lease: Lease) -> bool:
    return all(sample.segments == (Segment(first_token=0, root=lease.root),) for sample in result.samples)


def sample_result(done: Completion) -> SampleResult:
    """What is reported of one rollout of the engine."""
    return SampleResult(
        index=done.index,
        tokens=done.tokens.astype("<u4").tobytes(),
        logprobs=done.logprobs.astype("<f4").tobytes(),
        finish=done.finish,
        segments=tuple(Segment(first_token=span.first_token, root=span.root) for span in done.segments),
    )
