"""The control: a learner that checks nothing. ``python -m tests.attacks.trusting_learner -- COMMAND``.

What follows the dashes is a command that runs ``python -m rollmesh_peer.command learner run ...``. It runs with these
decisions replaced, and is otherwise the product's learner, process for process:

- no rollout is audited, drawn or suspected (L4, L5);
- no offence counts: nobody loses standing or is put out, and every node is in full standing from the start (L6);
- the reward of a rollout is what its node claims (:mod:`.claims`); of one without a claim the learner's own (L3);
- tripwires are off (L8).

What is left is the shape of messages, and the objective: log-probabilities are clamped as ever. No cheat of the curve
is refused by its shape. That this learner fails where the other does not shows that the experiment can fail.
"""

from __future__ import annotations

import sys
from typing import Final

from rollmesh_learner.audit import drawing
from rollmesh_learner.audit.auditor import Auditor
from rollmesh_learner.members.discipline import Discipline
from rollmesh_learner.records.ledger import Statement
from rollmesh_learner.work.book import Book
from rollmesh_learner.work.groups import LeaseRecord, RolloutKey
from rollmesh_learner.work.intake import Intake
from rollmesh_peer.command import main
from rollmesh_protocol.rollout import Result
from tests.attacks.claims import read_claims

SETTINGS: Final = (
    "audit.enabled=false",
    "audit.new_rollouts=0",
    "audit.probation_rollouts=0",
    "tripwires.enabled=false",
)


def trust_everybody() -> None:
    """Replace the learner's decisions in this process."""
    claims: dict[RolloutKey, float] = {}
    decide, score = Intake._decide, Book.score

    async def decide_and_remember(self: Intake, node, lease: LeaseRecord, result: Result, **rest) -> bytes:
        claims.update({(lease.lease_id, index): reward for index, reward in read_claims(result).items()})
        return await decide(self, node, lease, result, **rest)

    def believe(self: Book, key: RolloutKey, reward: float, *, error: str | None) -> list[Statement]:
        return score(self, key, claims.get(key, reward), error=error)

    async def overlook(self: Discipline, peer: str, code: str, **rest) -> None:
        del self, peer, code, rest

    Intake._decide = decide_and_remember
    Book.score = believe
    Discipline.offend = overlook
    Auditor.suspect = lambda _self, _rollout, **_prompt: None
    drawing.is_drawn = lambda *_key, **_rollout: False


if __name__ == "__main__":
    trust_everybody()
    words = sys.argv[sys.argv.index("--") + 1 :]
    command = words[words.index("rollmesh_peer.command") + 1 :]
    sys.exit(main([*command, *(word for setting in SETTINGS for word in ("--set", setting))]))
