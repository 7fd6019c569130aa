"""The draw of who is audited: made once the reward is known, written down with it, and never made again.

A telling rollout is drawn more often (:mod:`.weighing`), and how telling it is depends on the rewards of its whole
group: the draw waits for them, unless the standing of its node leaves nothing to weigh. Nothing is consumed before it,
because only complete groups are. The randomness is that of :mod:`.draw`, which only the learner can predict.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

import numpy as np

from rollmesh_learner.audit.draw import is_drawn
from rollmesh_learner.audit.oddities import marks_of
from rollmesh_learner.audit.twins import Twins
from rollmesh_learner.audit.weighing import Evidence, Means, early_rate, steady_rate
from rollmesh_learner.members.nodes import Nodes
from rollmesh_learner.members.standing import audit_rate, is_steady
from rollmesh_learner.members.withheld import WithheldBook
from rollmesh_learner.records import rows
from rollmesh_learner.records.ledger import Statement
from rollmesh_learner.training.advantage import group_advantages
from rollmesh_learner.work.book import Book
from rollmesh_learner.work.groups import Group, RolloutKey, StoredRollout

MEANS: Final = "audit.means"
"""The name in the ledger under which the running means are kept, as JSON."""
OVER_LIMITS_KEPT: Final = 1024
"""Rollouts remembered, the newest, whose scoring ran into its limits; each waits for its group at most."""


class Drawer:
    """Draws for the rollouts of one group at a time. ``withheld`` learns of every rollout that is decided on."""

    def __init__(
        self,
        *,
        audit_key: bytes,
        book: Book,
        nodes: Nodes,
        withheld: WithheldBook,
        means: Means | None = None,
        work_tokens: int = 0,
    ) -> None:
        self._key = audit_key
        self._book = book
        self._nodes = nodes
        self.withheld = withheld
        self._twins = Twins()
        self._over_limits: deque[RolloutKey] = deque(maxlen=OVER_LIMITS_KEPT)
        self.means = means or Means()
        self.work_tokens = work_tokens
        """Prompt and generated tokens of everything drawn for or not, since the run began."""

    def over_limits(self, key: RolloutKey) -> None:
        """Scoring this rollout was ended for the time or memory that it used: one mark. A restart may forget it."""
        self._over_limits.append(key)

    def decide(self, group: Group) -> list[Statement]:
        """Draw for the scored rollouts of ``group`` that can be drawn for now."""
        scored = [s.rollout for s in group.samples if s.rollout is not None and s.rollout.reward is not None]
        is_whole = len(scored) == len(group.samples)
        advantages = _advantages(scored)
        found = [
            (rollout, self._evidence(rollout, group, advantages))
            for rollout in scored
            if rollout.state == "scoring" and (is_whole or self._is_plain(rollout.node))
        ]
        before = self.means
        for rollout, evidence in found:
            if is_steady(self._nodes.record_of(rollout.node), self._nodes.rules):
                self.means = self.means.seen(evidence)
        statements = []
        for rollout, evidence in found:
            statements += self._draw(rollout, group, evidence)
        if self.means is not before:
            statements.append(rows.put_meta(MEANS, json.dumps(asdict(self.means)).encode()))
        return statements

    def _is_plain(self, node: str) -> bool:
        """True where nothing that is known of a rollout could change its rate."""
        return audit_rate(self._nodes.record_of(node), self._nodes.rules) in (0.0, 1.0)

    def _evidence(self, rollout: StoredRollout, group: Group, advantages: Mapping[RolloutKey, float]) -> Evidence:
        tokens = np.frombuffer(rollout.tokens, dtype="<u4")
        logprobs = np.frombuffer(rollout.logprobs, dtype="<f4")
        marks = len(marks_of(tokens, logprobs))
        marks += self._twins.has_twin(tokens, logprobs, seed=rollout.seed)
        marks += rollout.key in self._over_limits
        marks += self.withheld.judge(rollout.node).is_telling
        return Evidence(
            advantage=advantages[rollout.key],
            reward=rollout.reward or 0.0,
            marks=marks,
            tokens=len(tokens) + len(group.prompt.prompt) // 4,
        )

    def _draw(self, rollout: StoredRollout, group: Group, evidence: Evidence) -> list[Statement]:
        self._tell(rollout, group)
        record, rules = self._nodes.record_of(rollout.node), self._nodes.rules
        base = audit_rate(record, rules)
        steady = is_steady(record, rules)
        rate = (
            steady_rate(evidence, means=self.means, mean_rate=base) if steady else early_rate(evidence, base_rate=base)
        )
        drawn = is_drawn(self._key, lease_id=rollout.lease_id, sample=rollout.sample, rate=rate)
        self.work_tokens += evidence.tokens
        if steady and drawn:
            self.means = self.means.drawn(evidence)
        return self._book.draw(rollout.key, drawn=drawn)

    def _tell(self, rollout: StoredRollout, group: Group) -> None:
        reward, tokens = rollout.reward or 0.0, rollout.num_tokens
        self.withheld.delivered(rollout.node, rollout.lease_id, reward=reward, tokens=tokens)
        for lease_id, node in group.samples[rollout.sample].abandoned:
            if node != rollout.node:
                self.withheld.abandoned(node, lease_id, reward=reward, tokens=tokens)


def _advantages(rollouts: list[StoredRollout]) -> dict[RolloutKey, float]:
    rewards = [rollout.reward or 0.0 for rollout in rollouts]
    if not rewards:
        return {}
    found = group_advantages(rewards, groups=[0] * len(rollouts), scale="std")
    return {rollout.key: float(advantage) for rollout, advantage in zip(rollouts, found, strict=True)}
