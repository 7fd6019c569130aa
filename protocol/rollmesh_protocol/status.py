"""What anyone may see of the mesh: the records behind ``rollmesh status``. No network addresses of others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollmesh_protocol.messages import Digest, Head, Peer, Sentence, Standing
from rollmesh_protocol.record import Record

PEERS_PER_PAGE = 200
MOST_BAD_STEPS = 16
MOST_SPREADS = 2
"""Versions whose spread is told: the newest, and the one before it."""


class StatusRequest(Record):
    """Ask for one page of peers (from 0); the rest of the status comes with each page."""

    page: int = Field(ge=0, le=10_000)


class PeerStatus(Record):
    """One node as the learner sees it. Times are ages in seconds, so that nobody's clock matters."""

    peer: Peer
    name: str = Field(max_length=64)
    role: str = Field(max_length=16)
    engine: str = Field(max_length=256)
    connected: bool
    path: Literal["in", "out", "none"]
    """Which side opened the connection."""
    version: int = Field(ge=0)
    tokens_per_s: float = Field(ge=0)
    standing: Standing
    leased_samples: int = Field(ge=0)
    last_accepted_s: float | None
    """Seconds since its last accepted rollout; None when there was none."""
    last_seen_s: float
    waiting_for: Sentence
    withheld: Sentence
    """Why the learner thinks that it lets go of what does badly; empty where it does not. It is audited more."""


class SpreadStatus(Record):
    """How one version has spread among the nodes that are online; seconds since its announcement."""

    version: int = Field(ge=1)
    head_bytes: int = Field(ge=0)
    """What it takes to get there from the version before, manifest and payload; 0 where no patch leads there."""
    age_s: float = Field(ge=0)
    online: int = Field(ge=0)
    holding: int = Field(ge=0)
    most_s: float | None
    """When nine in ten held it; None while they do not. Heartbeats tell it, so it is some seconds coarse."""
    last_s: float | None
    """When all held it."""
    bytes_from_learner: int = Field(ge=0)
    """What the learner's own uplink gave until the last of those who hold it had it, of all payloads together."""
    slowest: tuple[Annotated[str, Field(max_length=64)], ...] = Field(max_length=8)
    """Names of those who took longest, or still fetch; the slowest first."""


class LengthStatus(Record):
    """Completions of ``tokens`` to twice as many tokens less one: how many were trained on, how many dropped."""

    tokens: int = Field(ge=1)
    consumed: int = Field(ge=0)
    dropped: int = Field(ge=0)
    """With their groups, because these could not be trained on within the staleness bound."""


class TrustStatus(Record):
    """What checking strangers' work costs, and what it found in work that was trained on already."""

    audits_waiting: int = Field(ge=0)
    """Rollouts that wait for their audit."""
    audits_most: int = Field(ge=0)
    """So many may: nodes below full standing get no work that would make it more."""
    audited_tokens: int = Field(ge=0)
    """Recomputed since the run began, prompts included."""
    work_tokens: int = Field(ge=0)
    """Accepted since the run began: generated tokens and prompts."""
    steady_audited_tokens: int = Field(ge=0)
    """The same two, of nodes in full standing alone."""
    steady_work_tokens: int = Field(ge=0)
    consumed_bad: int = Field(ge=0)
    """Rollouts that failed an audit after they had been trained on."""
    consumed_bad_steps: tuple[Annotated[int, Field(ge=0)], ...] = Field(max_length=MOST_BAD_STEPS)
    """The last steps that trained on any."""
    reaudits_waiting: int = Field(ge=0)
    """Consumed rollouts of quarantined nodes that are still to be looked at again."""
    reaudits_missed: int = Field(default=0, ge=0)
    """Such that could not be, since the learner started: most often the weights behind them are gone."""
    over_cap: int = Field(ge=0)
    """Rollouts trained on above their node's share of a batch, because nobody else had work under way."""
    lengths: tuple[LengthStatus, ...] = Field(max_length=32)
    """The shortest first."""


class RunStatus(Record):
    """The learner's view of the run."""

    run: str
    name: str
    learner: Peer
    software: str
    state: Sentence
    """What the learner is doing, or what it waits for."""
    head: Head
    head_bytes: int = Field(ge=0)
    """What a node that holds the version before fetches for the head: manifest and payload."""
    model_bytes: int = Field(ge=0)
    """The whole weights, to compare with."""
    spread: tuple[SpreadStatus, ...] = Field(max_length=MOST_SPREADS)
    """The newest version first."""
    step: int = Field(ge=0)
    steps: int = Field(ge=0)
    mean_reward: float | None
    """Over all rollouts accepted for the last step, before any filter."""
    rollbacks: int = Field(ge=0, default=0)
    """How often the run went back to older weights because a step had gone wrong."""
    last_rollback: Sentence = ""
    """The last of them: which figure passed which bound, from which step to which, rollouts voided."""
    groups_leased: int = Field(ge=0)
    groups_ready: int = Field(ge=0)
    rollouts_accepted: int = Field(ge=0)
    rollouts_rejected: int = Field(ge=0)
    audits_done: int = Field(ge=0)
    audits_failed: int = Field(ge=0)
    trust: TrustStatus
    bubble_fraction: float = Field(ge=0, le=1)
    uptime_s: float = Field(ge=0)
    children: tuple[Annotated[str, Field(max_length=256)], ...] = Field(max_length=16)
    """One sentence for each child process."""
    peers: tuple[PeerStatus, ...] = Field(max_length=PEERS_PER_PAGE)
    page: int = Field(ge=0)
    pages: int = Field(ge=1)


class NodeStatus(Record):
    """A node's view of itself and of its link to the run."""

    peer: Peer
    name: str
    software: str
    run: str
    learner: Peer
    learner_connected: bool
    head: Head | None
    version_held: int = Field(ge=0)
    root_held: Digest | None
    engine: str = Field(max_length=256)
    tokens_per_s: float = Field(ge=0)
    leases_open: int = Field(ge=0)
    standing: Standing | None
    accepted: int = Field(ge=0)
    rejected: int = Field(ge=0)
    last_accepted_s: float | None
    last_refusal: Sentence
    bytes_from_learner: int = Field(ge=0)
    bytes_from_peers: int = Field(ge=0)
    chunks_from_learner: int = Field(ge=0)
    chunks_from_peers: int = Field(ge=0)
    bytes_served: int = Field(ge=0)
    neighbours: int = Field(ge=0)
    waiting_for: Sentence
    uptime_s: float = Field(ge=0)
    engine_why: Sentence = ""
    """Why it generates with this engine and on these GPUs."""
    pause: Literal["", "pausing", "paused"] = ""
    """The owner's word; paused: the engine is gone, and its memory free."""


class StatusAnswer(Record):
    """Exactly one of the two is set: a learner answers with the run, a node with itself."""

    run: RunStatus | None
    node: NodeStatus | None
