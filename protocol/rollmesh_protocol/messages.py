"""The bodies of every request, answer and gossip message, one frozen record each.

Who asks whom over which protocol id stands in :mod:`rollmesh_protocol.streams`; what is signed travels as the bytes of
an :class:`~rollmesh_protocol.envelope.Envelope` inside these records.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from rollmesh_protocol import limits
from rollmesh_protocol.envelope import RUN_ID_CHARS
from rollmesh_protocol.identity import PEER_ID_CHARS
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.lease import DIGEST_BYTES, LEASE_ID_BYTES, SwapMode
from rollmesh_protocol.manifest import Edge
from rollmesh_protocol.record import Record

MAJOR: Final = 1
"""The major version of the protocol that this package speaks."""
MAX_ADDRESS_CHARS: Final = 256
MAX_ADDRESSES: Final = 16

Digest = Annotated[bytes, Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
LeaseId = Annotated[bytes, Field(min_length=LEASE_ID_BYTES, max_length=LEASE_ID_BYTES)]
Peer = Annotated[str, Field(min_length=1, max_length=2 * PEER_ID_CHARS)]
Sentence = Annotated[str, Field(max_length=limits.MAX_TEXT_CHARS)]
Address = Annotated[str, Field(min_length=1, max_length=MAX_ADDRESS_CHARS)]
Nats = Annotated[float, Field(gt=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
Sealed = Annotated[bytes, Field(min_length=1)]
"""An encoded envelope; opened, and so verified, before anything in it is used."""


class Head(Record):
    """The newest policy: every answer of the learner carries it. ``version`` is 0 before the first publication."""

    version: int = Field(ge=0)
    step: int = Field(ge=0)
    root: Digest


# --- hello -----------------------------------------------------------------------------------------------------------
class EngineInfo(Record):
    """What a node generates with. Declared, so for display and planning only."""

    backend: str = Field(max_length=64)
    dtype: str = Field(max_length=16)
    device: str = Field(max_length=128)


class Hello(Record):
    """A node introduces itself. ``majors`` are the protocol majors it speaks."""

    majors: tuple[int, ...] = Field(min_length=1, max_length=16)
    software: str = Field(max_length=64)
    name: str = Field(max_length=64)
    role: Literal["worker", "seed"]
    engine: EngineInfo | None
    addresses: tuple[Address, ...] = Field(max_length=MAX_ADDRESSES)
    """Where other peers may dial this node; empty when nobody can."""
    invite: bytes | None = Field(max_length=1024)


class Welcome(Record):
    """The learner's answer to a hello: the run card, and the pass that other peers ask for, both sealed."""

    card: Sealed
    admission: Sealed
    head: Head


class Pass(Record):
    """The learner's word that ``peer`` belongs to the run; good until ``PASS_VERSIONS`` versions later."""

    peer: Peer
    issued_version: int = Field(ge=0)


class Invite(Record):
    """A single-use token inside a join line."""

    token: bytes = Field(min_length=16, max_length=32)


class ModelReference(Record):
    """Which model the run trains, for people, and the root of its public base weights."""

    source: str = Field(max_length=512)
    parameters: int = Field(ge=1)
    base_root: Digest
    config: bytes = Field(max_length=limits.MAX_MODEL_CONFIG_BYTES)
    """The model's config.json; a node builds only architectures that its own library knows."""


class RunLimits(Record):
    """The most that one lease of this run asks for."""

    prompt_tokens: int = Field(ge=1, le=limits.MAX_PROMPT_TOKENS)
    new_tokens: int = Field(ge=1, le=limits.MAX_NEW_TOKENS)
    samples_per_group: int = Field(ge=1, le=limits.MAX_SAMPLES_PER_GROUP)


class MarginChecks(Record):
    """Where honest margins end, nats (``verdicts.margins.Thresholds``)."""

    any_margin: Nats
    """One token above this fails the node."""
    high_margin: Nats
    high_in_one: int = Field(ge=1, le=1000)
    """So many tokens above `high_margin` in one rollout fail it."""
    low_margin: Nats
    window_tokens: int = Field(ge=1, le=10_000_000)
    """Shares are taken over a node's last audited tokens, and over no fewer than this."""
    high_share: Share
    """A larger share above `high_margin` fails it."""
    low_share: Share
    """A larger share above `low_margin` halves its good record."""


class DriftCheck(Record):
    """The sequential test of a calibrated run (``verdicts.drift.DriftTest``).

    Each audited rollout of n tokens adds exponent * (sum of min(margin, clip) - reference * n) to a node's score, which
    never falls below 0.
    """

    clip: Nats
    reference: Nats
    exponent: float = Field(ge=0, le=1000)
    """Per nat; 0 where the calibration was too small to say anything: the test then never alarms."""
    alarm: float = Field(gt=0, le=1000)
    """At this score the node has drifted, and the score starts again."""


class LogprobChecks(Record):
    """From where on claimed log-probabilities send a rollout to the auditor (``verdicts.logprobs.LogprobLimits``)."""

    median: float = Field(gt=0, le=10)
    """Of exp(abs(difference)) - 1 over the rollout's tokens."""
    kl: Nats
    """Mean k3 estimate over them."""
    least_ratio: float = Field(gt=0, le=1)
    """Smallest probability ratio of one token."""


class Checks(Record):
    """How the learner judges sampling, so that a node can judge its own.

    Nothing in it is secret: code and method of calibration are public, and what is honest passes whoever knows the
    limits. A class of engines that the learner has come to know may be held to tighter margins than these.
    """

    margins: MarginChecks
    drift: DriftCheck | None
    """None: the run has no calibration."""
    logprobs: LogprobChecks


class RunCard(Record):
    """What a node is told on joining. Fixed for the life of the run, but for `checks`; signed by the learner."""

    max_items: ClassVar[int] = limits.MAX_CARD_ITEMS

    run: str = Field(min_length=1, max_length=RUN_ID_CHARS)
    name: str = Field(max_length=128)
    learner: Peer
    model: ModelReference
    layout: Layout
    vocabulary: int = Field(ge=2, le=limits.MAX_VOCABULARY)
    stop_tokens: tuple[Annotated[int, Field(ge=0, lt=limits.MAX_VOCABULARY)], ...] = Field(
        max_length=limits.MAX_STOP_TOKENS
    )
    tokenizer_digest: Digest
    environments: tuple[Annotated[str, Field(max_length=128)], ...] = Field(max_length=64)
    limits: RunLimits
    swap_modes: tuple[SwapMode, ...] = Field(min_length=1, max_length=2)
    checks: Checks | None = None
    """May be missing; missing or nil: the defaults. Changes at a start of the learner, after a calibration."""

    def is_same_run(self, other: RunCard) -> bool:
        """True when the two say the same of the run, however it judges."""
        return self.model_copy(update={"checks": None}) == other.model_copy(update={"checks": None})


# --- work ------------------------------------------------------------------------------------------------------------
class Standing(Record):
    """How the learner regards a node: its state, and what came of its rollouts."""

    state: Literal["new", "probation", "full", "quarantined"]
    accepted: int = Field(ge=0)
    rejected: int = Field(ge=0)
    audited: int = Field(ge=0)
    reason: Sentence


class LeaseRequest(Record):
    """A node asks for work, or only says that it is alive (``groups`` = 0)."""

    groups: int = Field(ge=0, le=limits.MAX_GROUPS_PER_REQUEST)
    version_held: int = Field(ge=0)
    root_held: Digest | None
    tokens_per_s: float = Field(ge=0, le=1e9)
    waiting_for: Sentence


class Wait(Record):
    """Ask again after this many seconds; why."""

    seconds: float = Field(ge=0, le=3600)
    why: Sentence


class LeaseAnswer(Record):
    """Sealed leases, or how long to wait and why."""

    head: Head
    leases: tuple[Sealed, ...] = Field(max_length=limits.MAX_GROUPS_PER_REQUEST)
    wait: Wait | None
    standing: Standing


class Receipt(Record):
    """What became of a result. The same bytes sent again get the same receipt.

    ``accepted`` are sample indices of the lease; ``code`` is set when anything was refused.
    """

    lease_id: LeaseId
    accepted: tuple[int, ...] = Field(max_length=limits.MAX_SAMPLES_PER_GROUP)
    code: str | None = Field(max_length=64)
    detail: Sentence
    head: Head
    standing: Standing


class ReturnRequest(Record):
    """Leases that a node gives back unfinished, and why (a code)."""

    lease_ids: tuple[LeaseId, ...] = Field(min_length=1, max_length=4 * limits.MAX_GROUPS_PER_REQUEST)
    code: str = Field(max_length=64)


class ReturnAnswer(Record):
    """How many of the returned leases were open; their samples are leased again at once."""

    returned: int = Field(ge=0)
    head: Head


# --- weights ---------------------------------------------------------------------------------------------------------
class ManifestRequest(Record):
    """Ask for a manifest by name; the answer is its encoded envelope."""

    name: Digest


class EdgesRequest(Record):
    """Ask how to get to the head from ``root``; None for nothing usable at hand."""

    root: Digest | None


class EdgesAnswer(Record):
    """Edges on the way to the head, enough for a cheapest path."""

    head: Head
    edges: tuple[Edge, ...] = Field(max_length=limits.MAX_EDGES)


class PeersRequest(Record):
    """Ask for neighbours."""

    count: int = Field(ge=1, le=limits.MAX_NEIGHBOURS)


class Neighbour(Record):
    """A peer of the swarm and where it can be dialled."""

    peer: Peer
    addresses: tuple[Address, ...] = Field(min_length=1, max_length=MAX_ADDRESSES)


class PeersAnswer(Record):
    """Some admitted peers that can be dialled."""

    peers: tuple[Neighbour, ...] = Field(max_length=limits.MAX_NEIGHBOURS)
    head: Head


class HaveRequest(Record):
    """Opens a have stream: my pass, the manifest that I am after, and the chunks of it that I hold."""

    admission: Sealed
    manifest: Digest
    bitmap: bytes = Field(max_length=limits.HAVE_BYTES)


class HaveUpdate(Record):
    """The chunks that I hold now. The first is the answer to the request; more follow while the stream lives."""

    bitmap: bytes = Field(max_length=limits.HAVE_BYTES)


class ChunkRequest(Record):
    """Ask for chunks; each comes as a frame of its own, in this order."""

    manifest: Digest
    indices: tuple[Annotated[int, Field(ge=0, lt=limits.MAX_CHUNKS)], ...] = Field(
        min_length=1, max_length=limits.MAX_CHUNKS_PER_REQUEST
    )


# --- gossip ----------------------------------------------------------------------------------------------------------
class PolicyHeader(Record):
    """A new version is out. The manifest itself is fetched by name."""

    version: int = Field(ge=1)
    step: int = Field(ge=0)
    root: Digest
    parent: Digest | None
    manifest: Digest
    manifest_bytes: int = Field(ge=1, le=limits.MANIFEST_BYTES)
    payload_bytes: int = Field(ge=1, le=limits.MAX_MODEL_BYTES)


class Notice(Record):
    """A word from the learner to all. ``sequence`` only grows; receivers keep the highest and ignore older ones."""

    sequence: int = Field(ge=1)
    kind: Literal["pause", "resume", "drain", "ended"]
    text: Sentence
