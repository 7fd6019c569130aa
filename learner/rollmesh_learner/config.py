"""What an operator may set of a run: one small model for each component, which gets its own and no other.

Numbers that follow from others are not here (budgets of leases, deadlines of requests: see ``staleness`` and
``limits``). Sections that belong together are checked against each other in :class:`LearnerConfig` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from rollmesh_learner.training.settings import TrainingSettings
from rollmesh_peer.config import Located, Section, Unit, load
from rollmesh_peer.config.addresses import ListenAddress, OwnAddress, PeerId
from rollmesh_protocol import limits
from rollmesh_protocol.lease import SwapMode

PREFIX: Final = "ROLLMESH_LEARNER"
"""Environment variables that override the file begin with this and two underscores."""

Share = Annotated[float, Unit("share of 1"), Field(ge=0, le=1)]
Nats = Annotated[float, Unit("nats"), Field(gt=0, le=100)]
Threads = Annotated[int, Unit("threads"), Field(ge=0, le=1024)]


class Run(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    """What people call the run: small letters, digits and dashes."""
    folder: Annotated[Path | None, Located()] = None
    """Where the run's key, ledger, checkpoints and published weights lie; unset: runs/<name> in the data folder."""
    seed: Annotated[int, Unit("any number"), Field(ge=0, lt=2**63)] = 0
    """Decides the order of tasks and every other choice of the learner that is not secret."""
    steps: Annotated[int, Unit("optimiser steps"), Field(ge=1, le=10_000_000)] = 1000
    """The run ends by itself after this many steps."""
    resume: bool = True
    """Go on from the last checkpoint in the folder; false refuses to start where there is one."""


class Network(Section):
    """Where the learner is reached."""

    listen: Annotated[tuple[ListenAddress, ...], Field(min_length=1, max_length=8)] = ("/ip4/0.0.0.0/tcp/4700",)
    """Addresses that the learner listens on."""
    announce: Annotated[tuple[OwnAddress, ...], Field(max_length=8)] = ()
    """Addresses put into the join line, where they differ from those it listens on (a router that forwards a port)."""
    upload_mbit_s: Annotated[float, Unit("Mbit/s"), Field(ge=0, le=1e6)] = 0.0
    """What sending weights may take of the uplink; 0 for no cap. Leases and receipts never wait behind it."""
    max_nodes: Annotated[int, Unit("nodes"), Field(ge=1, le=limits.MAX_LEARNER_CONNECTIONS)] = 256
    """Nodes that may take part at one time; the next one is told that the run is full."""


class Admission(Section):
    """Who may take part."""

    mode: Literal["open", "allowlist", "invite"] = "open"
    """Everybody, the peers listed in allow, or whoever holds an invitation that was not used yet."""
    allow: Annotated[tuple[PeerId, ...], Field(max_length=100_000)] = ()
    """Peer ids admitted in mode allowlist, as `rollmesh node id` prints them."""
    per_block: Annotated[int, Unit("nodes"), Field(ge=1, le=100_000)] = limits.MAX_CONNECTIONS_PER_BLOCK
    """Nodes admitted from one block of addresses (/24 of IPv4, /48 of IPv6); loopback is not counted."""

    @model_validator(mode="after")
    def _has_somebody(self) -> Self:
        if (self.mode == "allowlist") != bool(self.allow):
            raise ValueError("mode allowlist and a list in allow go together: set both or neither")
        return self


class Model(Section):
    """The model that is trained."""

    source: Annotated[str, Field(min_length=1, max_length=1024), Located(unless=("gguf:", "hub:"))]
    """The base model: a folder in Hugging Face format, hub:<owner>/<name>, or gguf:<Python package that ships one>."""
    cache: Annotated[Path | None, Located()] = None
    """Where base models are kept once they are converted; unset: models in the data folder."""


class Environment(Section):
    """A source of tasks: prompts, and rewards for answers."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    """addition, reasoning_gym, or one that another package brings."""
    weight: Annotated[float, Unit("relative frequency"), Field(gt=0, le=1e6)] = 1.0
    """How often its tasks are drawn, relative to the other environments."""
    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    """What the environment lets one choose; it refuses what it does not know."""


class Rollouts(Section):
    """What one optimiser step is made of, and how old it may be."""

    groups_per_step: Annotated[int, Unit("prompts"), Field(ge=1, le=65_536)] = 8
    """Prompts of one step; each becomes a group."""
    samples_per_group: Annotated[int, Unit("rollouts"), Field(ge=2, le=limits.MAX_SAMPLES_PER_GROUP)] = 8
    """Rollouts of each prompt; their advantages are relative to each other."""
    max_prompt_tokens: Annotated[int, Unit("tokens"), Field(ge=1, le=limits.MAX_PROMPT_TOKENS)] = 1024
    """Tasks whose prompt is longer are passed over."""
    max_new_tokens: Annotated[int, Unit("tokens"), Field(ge=1, le=limits.MAX_NEW_TOKENS)] = 256
    """Length at which a completion is cut."""
    staleness: Annotated[int, Unit("steps"), Field(ge=0, le=64)] = 2
    """S: a rollout is trained on only if the oldest weights behind it are at most so many steps old; 0: synchronous."""
    publish_every: Annotated[int, Unit("steps"), Field(ge=1, le=64)] = 1
    """kappa: steps between two published versions of the weights."""
    temperature: Annotated[float, Unit("ratio")] = 1.0
    """Must be 1: log-probabilities are recomputed from the model as it is."""

    @field_validator("temperature")
    @classmethod
    def _is_one(cls, temperature: float) -> float:
        if temperature != 1:
            raise ValueError("must be 1: at other temperatures an engine's log-probabilities cannot be recomputed")
        return temperature

    @model_validator(mode="after")
    def _can_be_fresh(self) -> Self:
        if self.publish_every > self.staleness + 1:
            raise ValueError(
                f"publish_every = {self.publish_every} needs a staleness of at least {self.publish_every - 1}: "
                "before the next publication every rollout would be too old"
            )
        return self


class Leases(Section):
    """How work is handed out."""

    min_duration_s: Annotated[float, Unit("seconds"), Field(ge=1, le=limits.MAX_LEASE_S)] = 30.0
    """The shortest time that a node gets for a lease."""
    max_duration_s: Annotated[float, Unit("seconds"), Field(ge=1, le=limits.MAX_LEASE_S)] = 600.0
    """The longest one; between the two, it is what the node's measured speed asks for."""
    groups_at_most: Annotated[int, Unit("groups"), Field(ge=1, le=limits.MAX_GROUPS_PER_REQUEST)] = 4
    """Groups given to one node in one answer."""
    cap: Share = 0.25
    """Largest share of a batch for one node below full standing, or 1.5 equal shares where that is more."""
    swap_modes: Annotated[tuple[SwapMode, ...], Field(min_length=1, max_length=2)] = ("drain",)
    """drain: a node finishes completions before it takes newer weights; recompute: long ones go on under those."""
    recompute_from: Annotated[int, Unit("tokens"), Field(ge=1, le=limits.MAX_NEW_TOKENS)] = 4 * limits.SEGMENT_TOKENS
    """Where both are allowed, leases say recompute if rollouts.max_new_tokens is at least this; shorter ones drain."""

    @field_validator("swap_modes")
    @classmethod
    def _are_different(cls, modes: tuple[SwapMode, ...]) -> tuple[SwapMode, ...]:
        if len(set(modes)) < len(modes):
            raise ValueError("names each mode once")
        return modes

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min_duration_s > self.max_duration_s:
            raise ValueError("min_duration_s must not exceed max_duration_s")
        return self


class Training(Section, TrainingSettings):
    """The objective and the optimiser, as the trainer takes them, and the process that they run in."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer computes; auto takes the GPU where there is one."""
    threads: Threads = 0
    """Threads of the trainer on a CPU; 0 leaves the choice to torch."""
    checkpoint_every: Annotated[int, Unit("steps"), Field(ge=1, le=100_000)] = 5
    """Steps between two checkpoints; steps after the last one are done again after a crash."""
    checkpoints_kept: Annotated[int, Unit("checkpoints"), Field(ge=1, le=1000)] = 2
    """Older checkpoints are deleted, but for what a rollback needs: all back to one that is S + 3 steps older."""


class Audit(Section):
    """Recomputation of rollouts under the exact weights that they claim. Margins: see the design of trust."""

    enabled: bool = True
    """False trusts every node: for runs whose nodes are all your own."""
    rate_new: Share = 1.0
    """Probability that a rollout of a new node is recomputed."""
    rate_probation: Share = 0.5
    """The same for a node on probation."""
    rate_steady: Share = 0.03
    """The same, on average, for a node in good standing; telling rollouts are drawn more often."""
    new_rollouts: Annotated[int, Unit("rollouts"), Field(ge=0, le=100_000)] = 10
    """Audited rollouts after which a node is no longer new."""
    probation_rollouts: Annotated[int, Unit("rollouts"), Field(ge=0, le=100_000)] = 50
    """Audited rollouts after which probation ends."""
    soft_half_life_s: Annotated[float, Unit("seconds"), Field(gt=0, le=1e9)] = 86_400.0
    """After so long a small offence weighs half as much towards quarantine, which itself never fades."""
    away_s: Annotated[float, Unit("seconds"), Field(gt=0, le=1e9)] = 604_800.0
    """A node of which nothing was accepted for longer is on probation again."""
    queue: Annotated[float, Unit("batches"), Field(ge=1, le=1000)] = 2.0
    """Rollouts that may wait for audit; nodes below full standing get no work that would make it more."""
    any_margin: Nats = 3.0
    """One token whose margin exceeds this fails the node at once."""
    high_margin: Nats = 1.0
    """Tokens above this margin are counted towards high_in_one and high_share."""
    high_in_one: Annotated[int, Unit("tokens"), Field(ge=1, le=1000)] = 3
    """So many tokens above high_margin in one rollout fail the node at once."""
    low_margin: Nats = 0.5
    """Tokens above this margin are counted towards low_share."""
    window_tokens: Annotated[int, Unit("tokens"), Field(ge=1, le=10_000_000)] = 200
    """Shares are taken over a node's last audited tokens, and over no fewer than this."""
    high_share: Share = 0.01
    """A larger share above high_margin fails the node."""
    low_share: Share = 0.01
    """A larger share above low_margin halves the node's good record."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the auditor computes."""
    threads: Threads = 0
    """Threads of the auditor on a CPU; 0 leaves the choice to torch."""


class Tripwires(Section):
    """From where on a step counts as gone wrong: the run then goes back to the last good weights.

    The reasons for the forms of the bounds are in ``training.tripwires``; the defaults leave every honest run on record
    alone with room to spare.
    """

    enabled: bool = True
    """False lets a run go wherever it goes."""
    window: Annotated[int, Unit("steps"), Field(ge=5, le=1000)] = 20
    """The last good steps with which a step is compared."""
    min_steps: Annotated[int, Unit("steps"), Field(ge=5, le=1000)] = 10
    """With fewer good steps than this nothing is compared; absolute bounds act from the first step on."""
    spike_factor: Annotated[float, Unit("robust standard deviations"), Field(ge=1, le=1000)] = 10.0
    """A divergence or gradient norm so far above the median of the window trips, if it is above its floor too."""
    kl_floor: Nats = 0.2
    """A step whose update moves the policy by no more than this is never compared with others."""
    kl_most: Nats = 2.0
    """A step whose update moves the policy by more than this trips whatever came before."""
    gradient_floor: Annotated[float, Unit("L2 norm"), Field(gt=0)] = 10.0
    """A gradient, before it is scaled down, that is no larger than this is never compared with others."""
    gradient_most: Annotated[float, Unit("L2 norm"), Field(gt=0)] = 1000.0
    """A gradient that is larger than this trips whatever came before."""
    clipped_most: Share = 0.5
    """A larger share of tokens with a clipped probability ratio trips."""
    reward_fall: Annotated[float, Unit("reward"), Field(gt=0, le=1)] = 0.25
    """A mean reward that falls below the median of the window by less than this never trips."""
    reward_rise: Annotated[float, Unit("reward"), Field(gt=0, le=1)] = 0.5
    """One that rises above the best of the last 5 steps by less than this never trips."""
    reward_factor: Annotated[float, Unit("robust standard deviations"), Field(ge=1, le=1000)] = 3.0
    """Nor does one that is off by less than this; and it must be off by more than the luck of prompts explains."""
    length_share: Annotated[float, Unit("share of the median"), Field(gt=0, le=10)] = 0.5
    """A mean length that leaves the range of the last 5 steps by less never trips; few prompts are allowed more."""
    length_factor: Annotated[float, Unit("robust standard deviations"), Field(ge=1, le=1000)] = 5.0
    """Nor does one that leaves it by less than this."""
    most_rollbacks: Annotated[int, Unit("rollbacks"), Field(ge=0, le=1000)] = 3
    """One more than this within rollback_steps ends the run, with a good checkpoint; 0 ends it at the first."""
    rollback_steps: Annotated[int, Unit("steps"), Field(ge=1, le=1_000_000)] = 200
    """The steps over which rollbacks are counted together."""

    @model_validator(mode="after")
    def _can_act(self) -> Self:
        if self.min_steps > self.window:
            raise ValueError("min_steps must not exceed window: bounds that compare would never act")
        return self


class Trust(Section):
    """From where on a node's log-probabilities, compared with the learner's own, send a rollout to the auditor."""

    median: Annotated[float, Unit("ratio"), Field(gt=0, le=10)] = 0.10
    """Median of exp(abs(difference)) - 1 over the rollout's tokens."""
    kl: Nats = 0.10
    """Mean k3 estimate of the divergence over its tokens."""
    least_ratio: Annotated[float, Unit("ratio"), Field(gt=0, lt=1)] = 1e-4
    """Smallest probability ratio of one token."""


class Weights(Section):
    """How versions of the weights are published and kept."""

    anchor_every: Annotated[int, Unit("versions"), Field(ge=1, le=1_000_000)] = 64
    """Versions between two whole snapshots for those who join late."""
    skip_every: tuple[Annotated[int, Unit("versions"), Field(ge=2, le=4096)], ...] = Field((8, 32), max_length=4)
    """Patches over so many versions at once, for nodes that are slow or slept. Each takes one more image in memory."""
    patch_chunk_kib: Annotated[int, Unit("KiB"), Field(ge=4, le=1024)] = limits.PATCH_CHUNK_BYTES // limits.KIB
    """Size of the pieces in which patches travel."""
    anchor_chunk_kib: Annotated[int, Unit("KiB"), Field(ge=4, le=1024)] = limits.ANCHOR_CHUNK_BYTES // limits.KIB
    """Size of the pieces in which whole snapshots travel."""
    keep_versions: Annotated[int, Unit("versions"), Field(ge=1, le=1_000_000)] = 256
    """Published patches that are kept for nodes that slept."""
    ram_folder: Annotated[str, Located()] = "/dev/shm"  # noqa: S108 - a private folder is made in it
    """A folder in memory, which spares the disk; empty, or where memory is short, the run's folder is used."""


class Scoring(Section):
    """The child processes in which answers are scored."""

    cpu_s: Annotated[int, Unit("seconds"), Field(ge=1, le=600)] = 2
    """Computing time of one answer; beyond it there is no reward."""
    wall_s: Annotated[float, Unit("seconds"), Field(gt=0, le=600)] = 6.0
    """Time on the clock of one answer, which only one that waits for something reaches first."""
    memory_mb: Annotated[int, Unit("MiB"), Field(ge=64, le=1_048_576)] = 512
    """Memory of one answer, on top of what its environment has loaded."""


class Status(Section):
    """What strangers may see."""

    public: bool = True
    """Answer `rollmesh status --join ...` from anywhere; false: this machine's owner and admitted nodes only."""


class Log(Section):
    """The learner's log, on stderr."""

    format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object a line."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important lines that are written."""


class LearnerConfig(Section):
    """A run's whole configuration."""

    run: Run
    """The run as a whole."""
    network: Network = Network()
    """Where the learner is reached."""
    admission: Admission = Admission()
    """Who may take part."""
    model: Model
    """The model that is trained."""
    environments: Annotated[tuple[Environment, ...], Field(min_length=1, max_length=256)]
    """Where tasks come from; one table for each environment."""
    rollouts: Rollouts = Rollouts()
    """What one optimiser step is made of, and how old it may be."""
    leases: Leases = Leases()
    """How work is handed out."""
    training: Training = Training()
    """The objective and the optimiser (AdamW with fp32 masters), and the trainer's process."""
    audit: Audit = Audit()
    """Recomputation of rollouts under the exact weights that they claim."""
    tripwires: Tripwires = Tripwires()
    """From where on a step counts as gone wrong: the run then goes back to the last good weights."""
    trust: Trust = Trust()
    """From where on a node's log-probabilities send a rollout to the auditor."""
    weights: Weights = Weights()
    """How versions of the weights are published and kept."""
    scoring: Scoring = Scoring()
    """The child processes in which answers are scored."""
    status: Status = Status()
    """What strangers may see."""
    log: Log = Log()
    """The learner's log, on stderr."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.weights.keep_versions < self.rollouts.staleness + 2:
            raise ValueError(
                f"weights.keep_versions = {self.weights.keep_versions} must be at least "
                f"rollouts.staleness + 2 = {self.rollouts.staleness + 2}: auditors move between recent versions"
            )
        return self


def load_config(path: Path, *, overrides: Sequence[str] = (), environ: Mapping[str, str]) -> LearnerConfig:
    """A run's configuration from its file, ``ROLLMESH_LEARNER__...`` and ``--set``; UsageError says what is wrong."""
    return load(LearnerConfig, path=path, overrides=overrides, environ=environ, prefix=PREFIX)
