"""What the learner keeps in mind about its work: groups of samples, the leases on them, and the rollouts that came.

Plain mutable state without rules; only :mod:`rollmesh_learner.work.book` changes it. Rows of the ledger mirror it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rollmesh_learner.work.lengths import Fate
from rollmesh_protocol.lease import SwapMode

SampleState = Literal["open", "leased", "filled"]
GroupState = Literal["live", "assigned", "consumed", "dropped"]
LeaseState = Literal["open", "done", "refused", "returned", "expired", "void"]
RolloutState = Literal["scoring", "auditing", "ready", "assigned", "consumed", "void", "stale", "orphaned"]
RolloutKey = tuple[bytes, int]
"""(lease id, sample index)."""


@dataclass(frozen=True)
class Prompt:
    """A question ready to be leased: where it comes from, what scores it, and its token ids."""

    environment: int
    """Its place in the run's list of environments."""
    item: str
    """JSON of the environment's item: what its scorer needs."""
    prompt: bytes
    """Little-endian uint32 token ids."""


@dataclass(frozen=True)
class Stretch:
    """A run of a completion's tokens drawn under one version of the weights, from ``first_token`` on."""

    first_token: int
    version: int
    step: int
    root: bytes


@dataclass
class StoredRollout:
    """One completion that passed the first checks. Token ids and log-probabilities are little-endian bytes.

    ``version``, ``step`` and ``root`` are those of its oldest tokens: the bound S is kept by them.
    """

    lease_id: bytes
    sample: int
    group_id: int
    node: str
    version: int
    step: int
    root: bytes
    seed: int
    tokens: bytes
    logprobs: bytes
    finish: str
    drawn: bool
    """Whether it was drawn for audit: then it is consumed only after its verdict. Says nothing yet while scoring."""
    reward: float | None = None
    exact_logprobs: bytes | None = None
    state: RolloutState = "scoring"
    later: tuple[Stretch, ...] = ()
    """What newer weights drew of it, after the oldest: only under leases that allow swaps in the middle."""

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """All of it, in order, by the weights that drew it."""
        return (Stretch(0, self.version, self.step, self.root), *self.later)

    @property
    def key(self) -> RolloutKey:
        return (self.lease_id, self.sample)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


@dataclass
class Sample:
    """One place of a group."""

    index: int
    state: SampleState = "open"
    lease_id: bytes | None = None
    rollout: StoredRollout | None = None
    not_for: str = ""
    """The node whose lease on it died; others are preferred until ``not_for_until``."""
    not_for_until: float = 0.0
    abandoned: list[tuple[bytes, str]] = field(default_factory=list)
    """Leases on it that ran out or came back, with the node of each."""

    def reopen(self, *, not_for: str = "", until: float = 0.0) -> None:
        """Back to unfilled: to be leased again, with the same seed."""
        self.state = "open"
        self.lease_id = None
        self.rollout = None
        self.not_for = not_for
        self.not_for_until = until


@dataclass
class Group:
    """All samples of one prompt."""

    group_id: int
    prompt: Prompt
    samples: list[Sample]
    state: GroupState = "live"

    @property
    def oldest_step(self) -> int | None:
        """The step of the oldest weights behind any of its rollouts; None while there are none."""
        return min((s.rollout.step for s in self.samples if s.rollout), default=None)

    @property
    def is_complete(self) -> bool:
        """True when every sample has a rollout that passed all that must precede training."""
        return all(s.rollout is not None and s.rollout.state == "ready" for s in self.samples)


@dataclass
class LeaseRecord:
    """A lease that was given out, and what became of it. Times are seconds of the learner's monotonic clock."""

    lease_id: bytes
    node: str
    group_id: int
    indices: tuple[int, ...]
    version: int
    step: int
    root: bytes
    duration_s: float
    issued_at: float
    state: LeaseState = "open"
    result_digest: bytes | None = None
    receipt: bytes | None = None
    swap_mode: SwapMode = "drain"

    @property
    def expires_at(self) -> float:
        return self.issued_at + self.duration_s


@dataclass
class Tally:
    """What came of the work so far, for the accounts in ``status`` and the summary."""

    leased: int = 0
    accepted: int = 0
    rejected: int = 0
    returned: int = 0
    expired: int = 0
    late: int = 0
    stale: int = 0
    void: int = 0
    consumed: int = 0
    orphaned: int = 0
    rolled_back: int = 0
    groups_dropped: int = 0
    tokens_wasted: int = 0
    ages: dict[int, int] = field(default_factory=dict)
    """Age in steps -> rollouts consumed at that age."""
    over_cap: int = 0
    """Rollouts consumed although their node had more of the batch than its share: nobody else had work under way."""
    lengths: dict[int, dict[Fate, int]] = field(default_factory=dict)
    """Completions consumed and dropped, by bucket of lengths (:mod:`rollmesh_learner.work.lengths`)."""
