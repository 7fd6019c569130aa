"""A node that cheated early and was caught late: the real learner finds what training took in, however old it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh_protocol import streams
from tests.support.attacker import open_attacker, open_studio
from tests.support.system import open_system

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOBODY_IS_AUDITED = (
    "audit.rate_new=0.0", "audit.rate_probation=0.0", "audit.rate_steady=0.0",
    "trust.median=10.0", "trust.kl=100.0", "trust.least_ratio=1e-300",
    "training.kl=0.3",  # else the model soon writes the same letters whatever the seed, and no seed is wrong any more
)  # fmt: skip
LATER = 10
"""Steps: more than twice as many versions as are kept in memory."""


async def test_old_versions_are_made_again_for_work_that_was_trained_on(tmp_path: Path) -> None:
    trained = "SELECT trained_step FROM rollouts WHERE node = ? AND state = 'consumed'"
    found = (
        "SELECT count(*), sum(a.verdict = 'hard') FROM rollouts r LEFT JOIN audits a"
        " ON a.lease_id = r.lease_id AND a.sample = r.sample WHERE r.node = ? AND r.state = 'consumed'"
    )
    with open_system(tmp_path, *NOBODY_IS_AUDITED, steps=1_000_000) as system:
        await system.add_node("honest")
        join = await system.join_line()
        async with (
            open_attacker(join, gossip=True) as scout,
            open_studio(scout, tmp_path / "studio") as studio,
            open_attacker(join) as cheat,
        ):
            await system.until_run(lambda run: run.step >= 4, timeout_s=250)  # the base model stays in memory
            while not system.rows(trained, cheat.peer):
                lease = await cheat.take_lease(root=lambda: studio.newest)
                await cheat.submit(await studio.draw(lease, seed_shift=1))
            last = max(step for (step,) in system.rows(trained, cheat.peer))
            await system.until_run(lambda run: run.step >= last + LATER, timeout_s=250)
            for _ in range(8):  # caught, for something else
                assert await cheat.refusal(streams.SUBMIT, b"junk") == "result.schema"
            await system.learner.until_logged(" that were audited again, ")
            ((consumed, bad),) = system.rows(found, cheat.peer)
            run = await system.until_run(lambda run: run.trust.consumed_bad > 0 and run.trust.reaudits_waiting == 0)
        assert " are made again for " in system.learner.log, "its weights were no longer in memory"
        assert consumed and bad and "could not be" not in system.learner.log
        assert f"of {consumed} consumed rollouts of " in system.learner.log
        assert (run.trust.consumed_bad, run.trust.reaudits_missed) == (bad, 0)
        assert min(run.trust.consumed_bad_steps) <= last
        assert [*tmp_path.rglob("*.older")] == []
        assert "Traceback" not in system.learner.log
