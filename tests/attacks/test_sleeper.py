"""The sleeper on the tiny model: it earns full standing, and is put out by the audits that are left then."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.attacks.attack import Outcome
from tests.attacks.place import Account, open_lab, open_tiny, work_begins
from tests.attacks.report import judge, row_of
from tests.attacks.sleeper import MOST_ROLLOUTS, Sleeper

pytestmark = pytest.mark.timeout(400)

SOON = ("audit.new_rollouts=2", "audit.probation_rollouts=6", "audit.rate_steady=0.1", "audit.rate_probation=1.0")
"""So that the test takes seconds: the lab plays it with the rates of a run."""


async def test_full_standing_is_no_licence(tmp_path: Path) -> None:
    with open_tiny(tmp_path / "run", *SOON) as system:
        await work_begins(system)
        async with open_lab(system, tmp_path, model=system.folder / "model", most_tokens=600) as lab:
            lab.until = trio.current_time() + 200
            attack = Sleeper()
            attack.bound_tokens = 200
            await attack.play(lab)
            await attack.conclude(lab)
            row = row_of(attack, lab)
            assert row.ok, row
            assert attack.honest_tokens and row.generated_tokens and row.accepted
            assert "the re-audit found" in row.note
            honest = row_of(attack, lab).audited_tokens
            attack.leases = None
            assert row_of(attack, lab).audited_tokens > honest, "its honest work was audited, too"


CAUGHT = Account(
    accepted=40, trained=10, audits=1, audited_tokens=16, noticed_tokens=16, over_low=9, over_high=8, largest=9.0,
    offences=("result.sampling",),
)  # fmt: skip


def test_what_must_not_happen_is_a_miss_although_it_was_caught() -> None:
    attack = Sleeper()
    attack.outcome = Outcome(codes=["result.sampling"])
    assert judge(attack, CAUGHT) == ("caught", True, "result.sampling")
    attack.outcome.failure = "3 of its rollouts were consumed after it was caught"
    assert judge(attack, CAUGHT) == (attack.outcome.failure, False, "result.sampling")


def test_the_bound_is_that_of_the_lowest_rate() -> None:
    assert MOST_ROLLOUTS == 305
