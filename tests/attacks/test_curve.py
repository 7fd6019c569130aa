"""The curve's verdict and its parts, without a run: what it lets pass, and what it must not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import trio
from tokenizers import Tokenizer

from rollmesh_learner.records.ledger import _connect
from rollmesh_peer.testing.tiny_model import prepare_tiny
from rollmesh_protocol.environments import addition
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.rollout import check_result
from tests.attacks import cheats
from tests.attacks.claims import claim_text, read_claims
from tests.attacks.curve import conclude
from tests.attacks.curve_account import read_account, true_rewards
from tests.attacks.curve_plot import draw
from tests.attacks.curve_verdict import ARMS, compare, judge, mean_in, windows
from tests.attacks.fabricated import WRONG, fabricated
from tests.support.attacker import Attacker, open_attacker, result_of
from tests.support.system import open_system
from tests.unit.node.leases import make_lease
from tests.unit.protocol.examples import RESULT

STEPS = 40


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The tiny model: the ids of its tokenizer are bytes."""
    return prepare_tiny(tmp_path / "model")


def learning(seed: int, *, to: float = 0.75, noise: float = 0.08) -> list[float]:
    """A curve like the demo's, with a step's noise and a seed's luck."""
    random = np.random.default_rng(seed)
    luck = random.normal(0, 0.03)
    clean = 0.1 + (to - 0.1) / (1 + np.exp(-(np.arange(STEPS) - 15) / 4))
    return list(np.clip(clean + luck + random.normal(0, noise, STEPS), 0, 1))


def arms(*, cheats_to: float = 0.75, unchecked_to: float = 0.1, seeds: int = 3) -> dict[str, list[list[float]]]:
    return {
        "honest": [learning(seed) for seed in range(seeds)],
        "cheats": [learning(100 + seed, to=cheats_to) for seed in range(seeds)],
        "unchecked": [learning(200 + seed, to=unchecked_to) for seed in range(seeds)],
    }


def test_windows_cover_the_run_and_end_with_its_last_steps() -> None:
    *parts, last = windows(STEPS)
    assert [step for part in parts for step in part] == list(range(STEPS)) and all(len(part) == 5 for part in parts)
    assert last == range(30, 40)
    assert windows(4) == [range(4), range(4)]


def test_steps_without_a_value_do_not_count() -> None:
    assert mean_in([None, 0.2, 0.4], range(3)) == pytest.approx(0.3)
    assert mean_in([None, 0.2], range(1)) is None


def test_the_error_is_that_of_a_difference_of_means() -> None:
    """One window, so that the usual variance is its own: v = 0.01 and 0.04 over three seeds each."""
    row, _ = compare("cheats", [[0.3], [0.5], [0.7]], [[0.4], [0.5], [0.6]], steps=1)
    assert row.own_error == row.error == pytest.approx(((0.01 + 0.04) / 3) ** 0.5)
    assert row.difference == pytest.approx(0) and row.is_within


def test_seeds_that_agree_by_chance_do_not_make_an_error_of_nothing() -> None:
    honest = [[0.5] * 5 + [0.4 + 0.1 * seed] * 5 for seed in range(3)]
    row = compare("cheats", [[0.52] * 10] * 3, honest, steps=10)[0]
    assert row.own_error == 0 and row.error > 0 and row.is_within


def test_the_same_curves_with_other_luck_agree_and_the_control_is_seen() -> None:
    rows, misses = judge(arms(), steps=STEPS)
    assert misses == [] and len(rows) == 18
    assert rows[-1].arm == "unchecked" and not rows[-1].is_within and rows[-1].difference < -0.4


@pytest.mark.parametrize("to", [0.35, 0.99])
def test_cheats_that_move_the_curve_either_way_are_a_miss(to: float) -> None:
    _, misses = judge(arms(cheats_to=to), steps=STEPS)
    assert any(miss.startswith("cheats, steps 31 to 40") for miss in misses)


@pytest.mark.parametrize("to", [0.75, 0.99])
def test_a_control_that_learns_as_well_or_better_is_a_miss(to: float) -> None:
    _, misses = judge(arms(unchecked_to=to), steps=STEPS)
    assert misses == ["unchecked is not plainly worse in the last steps"]


def test_a_run_in_which_nothing_is_learnt_shows_nothing() -> None:
    flat = {arm: [learning(seed, to=0.1) for seed in range(3)] for arm in ARMS}
    assert any(miss.startswith("the honest run learns too little") for miss in judge(flat, steps=STEPS)[1])


def test_what_is_missing_is_a_miss() -> None:
    assert judge({}, steps=STEPS)[1] == [f"no run of {arm}" for arm in ARMS]
    _, misses = judge(arms(seeds=1), steps=STEPS)
    assert sum("too few seeds" in miss for miss in misses) == 18


def test_seats_make_up_the_cheats_and_keep_to_their_share_of_all_work() -> None:
    seats = cheats.seats()
    assert sum(seat.share for seat in seats) == pytest.approx(1)
    assert not any(cheats.may_take(seat, honest=0) for seat in seats)
    honest = 7_000
    while taking := [seat for seat in seats if cheats.may_take(seat, honest=honest)]:
        for seat in taking:
            seat.offered += 8
    offered = sum(seat.offered for seat in seats)
    assert 0.3 <= offered / (offered + honest) < 0.305


def test_claims_come_through_the_engine_text() -> None:
    first, second = (sample.index for sample in RESULT.samples)
    claimed = RESULT.model_copy(update={"engine": claim_text([1, 0.5])})
    assert read_claims(claimed) == {first: 1.0, second: 0.5}
    for engine in (RESULT.engine, "claims 1", "claims one two", "claims", ""):
        assert read_claims(RESULT.model_copy(update={"engine": engine})) == {}


def test_fabricated_answers_pass_for_work_and_claim_the_opposite_of_the_truth(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    item = addition.make({}, seed=7).item(3)
    prompt = np.array(tokenizer.encode(item.question).ids, "<u4").tobytes()
    lease = make_lease(samples=4, max_new_tokens=24).model_copy(update={"prompt": prompt})
    samples, claimed = fabricated(lease, tokenizer=tokenizer, end=end)
    check_result(result_of(lease, samples), lease, vocabulary=tokenizer.get_vocab_size(), stop_tokens=frozenset([end]))
    answers = [(sample.tokens, json.dumps(item.to_plain())) for sample in samples]
    assert true_rewards(answers, model=model, seed=7) == [1 - claim for claim in claimed] == [0, 1, 0, 1]


def test_rewards_are_counted_as_they_are_and_not_as_they_were_claimed(model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    item = addition.make({}, seed=7).item(0)
    right, wrong = (np.array(tokenizer.encode(text).ids, "<u4").tobytes() for text in (str(item.key["answer"]), WRONG))
    ledger = _connect(tmp_path / "ledger.sqlite")
    ledger.execute("INSERT INTO groups VALUES (0, 0, ?, x'', 'consumed', 0, '')", (json.dumps(item.to_plain()),))
    rollouts = [
        ("honest", right, 1.0, "consumed", 0), ("honest", wrong, 0.0, "consumed", 0),
        ("cheat", wrong, 1.0, "consumed", 0), ("cheat", right, 0.0, "void", None), ("cheat", wrong, 1.0, "assigned", 1),
    ]  # fmt: skip
    for number, (node, tokens, reward, state, step) in enumerate(rollouts):
        ledger.execute(
            "INSERT INTO rollouts VALUES (?, 0, 0, ?, 1, 0, x'', x'', ?, x'', 'stop', 0, 0, NULL, ?, NULL, ?, ?)",
            (bytes([number]), node, tokens, reward, state, step),
        )
    for peer, reason in (("honest", ""), ("cheat", "result.sampling")):
        standing = json.dumps({"rejected": 2 * bool(reason), "quarantined_for": reason})
        ledger.execute("INSERT INTO nodes (peer, name, first_seen, standing) VALUES (?, '', 0, ?)", (peer, standing))
    ledger.execute("INSERT INTO offences VALUES (1, 'cheat', 'result.sampling', '', 0)")
    ledger.close()
    found = read_account(tmp_path / "ledger.sqlite", model=model, steps=3, seed=7, kinds={"cheat": "fabricated"})
    assert found["curve"] == [0.5, None, None] and found["disagreements"] == 0
    assert found["curve_consumed"] == [pytest.approx(1 / 3, abs=1e-6), 0.0, None]
    assert found["curve_believed"] == [pytest.approx(2 / 3, abs=1e-6), 1.0, None]
    assert found["honest"]["consumed"] == 2 and found["honest"]["rejected"] == 0
    assert found["cheats"] == found["by_kind"]["fabricated"] == {
        "identities": 1, "quarantined": 1, "accepted": 3, "rejected": 2, "consumed": 2, "void": 1, "audited_tokens": 0,
        "offences": {"result.sampling": 1},
    }  # fmt: skip


def a_run(arm: str, seed: int, curve: list[float], **honest: int) -> dict:
    nothing = {"identities": 0, "quarantined": 0, "accepted": 0, "void": 0, "consumed": 0}
    cheating = nothing | {"quarantined": int(arm == "cheats"), "consumed": int(arm == "unchecked")}
    return {
        "arm": arm, "seed": seed, "curve": curve, "curve_believed": curve, "seconds": 1, "disagreements": 0,
        "offered": {"share": 0.3}, "cheats": cheating, "honest": nothing | {"offences": honest},
    }  # fmt: skip


def test_the_account_of_all_runs_is_one_line_of_json_and_names_what_is_doubtful(capsys) -> None:
    runs = [a_run(arm, seed, curve) for arm, curves in arms().items() for seed, curve in enumerate(curves)]
    figures = conclude(runs, steps=STEPS)
    assert figures["ok"] and figures["misses"] == [] and len(json.loads(json.dumps(figures["rows"]))) == 18
    assert "unchecked   31-40" in capsys.readouterr().out
    runs[0] |= a_run("honest", 0, runs[0]["curve"], **{"result.stale": 3, "result.sampling": 1})
    runs[4]["cheats"]["quarantined"] = runs[8]["cheats"]["consumed"] = 0
    assert conclude(runs, steps=STEPS)["misses"] == [
        "honest-0: honest nodes were taken for cheats: result.sampling",
        "cheats-1: no cheat was put out",
        "unchecked-2: nothing of the cheats was consumed",
    ]


@pytest.mark.slow
async def test_the_control_trains_on_made_up_work_for_the_reward_that_is_claimed(tmp_path: Path) -> None:
    within = (sys.executable, "-m", "tests.attacks.trusting_learner", "--")
    with open_system(tmp_path, steps=2, within=within) as system:
        async with open_attacker(await system.join_line()) as one:
            await _hand_in_until_done(one)
        assert await system.learner.wait() == 0
        assert [line["reward"] for line in system.metrics()] == [0.25, 0.25]
        assert system.rows("SELECT count(*) FROM audits") == [(0,)]
        ((standing,),) = system.rows("SELECT standing FROM nodes")
        assert not json.loads(standing)["quarantined_for"]


def test_the_picture_is_drawn_also_of_curves_with_holes() -> None:
    runs = [{"arm": arm, "curve": [None, None, *curve[2:]]} for arm, curves in arms().items() for curve in curves]
    assert len(draw({"runs": runs}).axes[0].lines) == 12


async def _hand_in_until_done(one: Attacker) -> None:
    """Letters for whatever is leased, with the claim of a quarter, until the run is over."""
    while True:
        try:
            answer = await one.request_work(4)
            for lease in map(one.open_lease, answer.leases):
                await one.submit(result_of(lease, engine=claim_text([0.25] * len(lease.samples))))
        except (Refused, LinkLost):
            return
        await trio.sleep(0.1)
