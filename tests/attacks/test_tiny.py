"""The attacks on the tiny model, against one real learner process: the classes that the lab plays on SmolLM2."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.attacks import garbage, leases, other_weights, protocol, replayed, sampling
from tests.attacks.attack import Attack
from tests.attacks.place import HONEST, account_of, open_lab, open_tiny, work_begins
from tests.attacks.report import row_of
from tests.support.system import System

pytestmark = pytest.mark.timeout(400)

CAUGHT = (
    other_weights.WrongModel, other_weights.Int4, other_weights.Draft, sampling.Colder,
    sampling.SeedIgnored, sampling.BestOfN, sampling.Edited5, sampling.EarlyEnd, sampling.OtherPrompt,
    sampling.TrimmedPrompt,
)  # fmt: skip
REFUSED = (
    protocol.NotANumber, protocol.Infinite, protocol.AboveZero, protocol.OutOfVocabulary, protocol.TooLong,
    protocol.FalseFinish, protocol.OtherRoot, protocol.MissingSamples, protocol.OwnReward, protocol.Forged,
    protocol.Reused, protocol.OtherKey, protocol.WrongKind, protocol.OtherRun, leases.Replayed, leases.Stolen,
    leases.OthersLease, leases.UnknownLease, leases.Hoarding, leases.Slowness, leases.ComingBack,
    garbage.Truncated, garbage.Nested, garbage.Bomb, garbage.ManyValues, garbage.NoFlowControl,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with open_tiny(tmp_path_factory.mktemp("attacks")) as system:
        trio.run(work_begins, system)
        yield system


@pytest.fixture
async def lab(run: System, tmp_path: Path):
    """A lab on the run; afterwards the honest node must have had more work accepted and none refused."""
    before = await run.until_node(HONEST, lambda status: status.standing is not None)
    async with open_lab(run, tmp_path, model=run.folder / "model", most_tokens=600) as lab:
        yield lab
    after = await run.until_node(HONEST, lambda status: status.accepted > before.accepted)
    assert not run.accused(after.peer) and after.standing.state in ("new", "probation", "full")
    assert "Traceback" not in run.learner.log, run.learner.tail(200)


def untouched(attack: Attack, lab) -> None:
    found = account_of(lab, attack.peers)
    assert found.trained == 0, f"{attack.name}: {found}"


async def test_completions_that_were_not_drawn_as_ordered_end_in_quarantine(lab, monkeypatch) -> None:
    for kind in CAUGHT:  # how soon is a question for the lab on a real model
        monkeypatch.setattr(kind, "bound_tokens", lab.most_tokens)
    attacks = [kind() for kind in CAUGHT]
    async with trio.open_nursery() as nursery:
        for attack in attacks:
            nursery.start_soon(attack.play, lab)
    assert {attack.name: attack.outcome.codes[-1:] for attack in attacks} == {
        attack.name: ["result.sampling"] for attack in attacks
    }
    for attack in attacks:
        if isinstance(attack, sampling.SeedIgnored | sampling.OtherPrompt):
            untouched(attack, lab)


async def test_what_breaks_the_protocol_is_refused_with_its_code(lab) -> None:
    for attack in [kind() for kind in REFUSED]:
        await attack.play(lab)
        row = row_of(attack, lab)
        assert row.ok, row
        if attack is not leases.Replayed:
            untouched(attack, lab)


async def test_nodes_do_not_go_back_for_old_announcements(lab) -> None:
    attack = replayed.OldNotices()
    await attack.play(lab)
    row = row_of(attack, lab)
    assert row.ok, row


async def test_honest_orders_pass_in_the_attackers_engine(lab) -> None:
    """Else every attacker would be caught for another reason than its attack."""

    class Honest(sampling.SamplingAttack):
        expects = frozenset()

        async def work(self, order, lab):
            return await lab.forge.draw(order)

    honest = Honest()
    lab.most_tokens = 150
    await honest.play(lab)
    found = account_of(lab, honest.peers)
    assert found.audits and found.over_low == 0, found
    assert not any(lab.system.accused(peer) for peer in honest.peers), found
