"""What a node tells of itself: built from the live parts when somebody asks, at most once a second.

Parts appear as the node comes up; a report says what it can. The one invariant: ``waiting_for`` is never empty unless
the node generates (or, as a seed, has the newest weights).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import trio

from rollmesh_node.generator import Generator
from rollmesh_node.joining import Membership
from rollmesh_node.pausing import OwnersPause
from rollmesh_node.submitting import Submitter
from rollmesh_node.uplink import Uplink
from rollmesh_node.weights import NodeWeights
from rollmesh_node.workforce import Workforce
from rollmesh_protocol import limits
from rollmesh_protocol.messages import Standing
from rollmesh_protocol.status import NodeStatus, StatusAnswer, StatusRequest


@dataclass(kw_only=True)
class NodeReport:
    """The parts of a node, as far as it has come."""

    peer: str
    name: str
    software: str
    learner: str
    doing: str = "starting"
    """What the node does before it works; empty once it does."""
    uplink: Uplink | None = None
    membership: Membership | None = None
    weights: NodeWeights | None = None
    generators: tuple[Generator, ...] = ()
    worker: Workforce | None = None
    submitter: Submitter | None = None
    run: str = ""
    pause: OwnersPause | None = None
    started: float = field(default_factory=trio.current_time)
    _kept: StatusAnswer | None = None
    _kept_at: float = 0.0

    def answer(self, request: StatusRequest) -> StatusAnswer:
        """The status, for the control socket."""
        del request
        if self._kept is not None and self._kept.node is not None and self._kept.node.pause != self._pause:
            self._kept = None  # the owner waits for it
        now = trio.current_time()
        if self._kept is None or now - self._kept_at >= limits.STATUS_EVERY_S:
            self._kept, self._kept_at = StatusAnswer(run=None, node=self._build(now)), now
        return self._kept

    async def serve(self, peer: str, request: bytes) -> bytes:
        """The status, for anyone who asks over the mesh."""
        del peer
        return self.answer(StatusRequest.decode(request, limit=limits.SMALL_BYTES)).encode()

    @property
    def waiting_for(self) -> str:
        """One sentence on what keeps the node from working."""
        if self.uplink is not None and (lost := self.uplink.waiting_for) and self.worker is None:
            return lost
        if self.doing:
            return self.doing
        if self.worker is not None:
            work = self.worker.waiting_for
            fetching = self.weights.follower.waiting_for if self.weights is not None else ""
            return f"weights: {fetching}" if work == "weights" and fetching else work
        return self.weights.follower.waiting_for if self.weights is not None else "starting"

    def _build(self, now: float) -> NodeStatus:
        weights, worker, submitter = self.weights, self.worker, self.submitter
        progress = weights.swarm.progress if weights is not None else None
        tally = submitter.tally if submitter is not None else None
        last = tally.last_accepted_at if tally is not None else None
        return NodeStatus(
            peer=self.peer,
            name=self.name,
            software=self.software,
            run=self.run,
            learner=self.learner,
            learner_connected=self.uplink is not None and self.uplink.is_linked,
            head=self.uplink.head if self.uplink is not None else None,
            version_held=weights.keeper.version if weights is not None else 0,
            root_held=weights.keeper.root if weights is not None else None,
            engine=self._engine(),
            tokens_per_s=worker.tokens_per_s if worker is not None else 0.0,
            leases_open=worker.leases_open if worker is not None else 0,
            standing=self._standing(),
            accepted=tally.accepted if tally is not None else 0,
            rejected=tally.rejected if tally is not None else 0,
            last_accepted_s=None if last is None else now - last,
            last_refusal=tally.last_refusal if tally is not None else "",
            bytes_from_learner=progress.bytes_from_learner if progress is not None else 0,
            bytes_from_peers=progress.bytes_from_peers if progress is not None else 0,
            chunks_from_learner=progress.chunks_from_learner if progress is not None else 0,
            chunks_from_peers=progress.chunks_from_peers if progress is not None else 0,
            bytes_served=weights.seeder.bytes_served if weights is not None else 0,
            neighbours=len(weights.neighbourhood.peers()) if weights is not None else 0,
            waiting_for=self.waiting_for[: limits.MAX_TEXT_CHARS],
            uptime_s=max(0.0, now - self.started),
            engine_why="; ".join(dict.fromkeys(generator.why for generator in self.generators))[
                : limits.MAX_TEXT_CHARS
            ],
            pause=self._pause,
        )

    @property
    def _pause(self) -> Literal["", "pausing", "paused"]:
        return self.pause.state if self.pause is not None else ""

    def _engine(self) -> str:
        if not self.generators:
            return "none"
        return "; ".join([self.generators[0].fingerprint, *(generator.state for generator in self.generators)])[:256]

    def _standing(self) -> Standing | None:
        if self.worker is not None and self.worker.standing is not None:
            return self.worker.standing
        return self.submitter.tally.standing if self.submitter is not None else None
