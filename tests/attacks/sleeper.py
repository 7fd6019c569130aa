"""A node that works honestly until the learner trusts it, and then ignores the seeds of its leases.

What it meets then is the audit rate of full standing. No rollout is drawn with less than half the mean rate of 3 %,
whatever it holds (:mod:`rollmesh_learner.audit.weighing`), so with a probability of 99 % one is audited among
log(0.01) / log(1 - 0.015) = 305; at the mean rate it is one among 33 on average. One audited rollout of this kind is
enough. It is told its standing with every answer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import trio

from rollmesh_learner.config import Audit
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import Standing
from tests.attacks.attack import SamplingAttack
from tests.attacks.engine import Drawn, Order, reseeded
from tests.attacks.place import account_of

if TYPE_CHECKING:
    from tests.attacks.place import Lab

MOST_ROLLOUTS: Final = math.ceil(math.log(0.01) / math.log(1 - Audit().rate_steady / 2))
REAUDIT_S: Final = 90.0


class Sleeper(SamplingAttack):
    """Tokens are counted from its first dishonest rollout on, and so is what the ledger has of it."""

    name = "sleeper: honest until full standing, then seeds ignored"
    bound_tokens = 100
    alone = True

    def __init__(self) -> None:
        super().__init__()
        self.leases = set()
        self.honest_tokens = 0
        self.rollouts = 0
        """Dishonest ones that were handed in."""
        self._is_awake = False

    def most_tokens(self, lab: Lab) -> int:
        return MOST_ROLLOUTS * lab.studio.card.limits.new_tokens

    def heard(self, standing: Standing) -> None:
        self._is_awake = self._is_awake or standing.state == "full"

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        return await lab.forge.draw(reseeded(order, 1) if self._is_awake else order)

    def handed_in(self, lease: Lease, drawn: list[Drawn]) -> None:
        assert self.leases is not None
        if not self._is_awake:
            self.honest_tokens += sum(len(sample.tokens) for sample in drawn)
            return
        super().handed_in(lease, drawn)
        self.leases.add(lease.lease_id)
        self.rollouts += len(drawn)

    async def conclude(self, lab: Lab) -> None:
        """What of it reached the trainer, what the re-audit found of that, and that nothing was consumed after."""
        if not self.peers:
            return
        if not self._is_awake:
            self.outcome.note += f"{self.honest_tokens:,} honest tokens did not bring it into full standing"
            return
        with trio.move_on_after(REAUDIT_S):
            await lab.system.until_run(lambda run: not run.trust.reaudits_waiting, timeout_s=REAUDIT_S)
        found = account_of(lab, self.peers, leases=self.leases)
        (peer,) = self.peers
        marks = ",".join("?" * len(self.leases or ()))
        of_it = f"node = ? AND r.lease_id IN ({marks}) AND r.state IN ('assigned', 'consumed')"
        ((bad,),) = lab.rows(
            "SELECT count(*) FROM audits a JOIN rollouts r ON r.lease_id = a.lease_id AND r.sample = a.sample"
            f" WHERE a.verdict = 'hard' AND r.{of_it}",
            peer, *(self.leases or ()),
        )  # fmt: skip
        ((late,),) = lab.rows(
            "SELECT count(*) FROM rollouts r JOIN steps s ON s.step = r.trained_step WHERE s.assigned_at >"
            " (SELECT min(at) FROM offences WHERE peer = ? AND code = 'result.sampling') AND r.node = ?"
            " AND r.state IN ('assigned', 'consumed')",
            peer, peer,
        )  # fmt: skip
        self.outcome.note += (
            f"{self.honest_tokens:,} honest tokens first; {self.rollouts} dishonest rollouts until it was out (at most"
            f" {MOST_ROLLOUTS} in 99 of 100 such runs); {found.trained} of {found.accepted} accepted ones reached the"
            f" trainer, {bad} of which the re-audit found (consumed_bad)"
        )
        if late:
            self.outcome.failure = f"{late} of its rollouts were consumed after it was caught"
        elif self.rollouts > MOST_ROLLOUTS:
            self.outcome.failure = f"caught late: the bound is {MOST_ROLLOUTS} dishonest rollouts"
